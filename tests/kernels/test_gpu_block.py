"""The block in one launch on the GPU: against the reference, run against run, one row count against another."""

import pytest
import torch

from slackwater_kernels import reference
from slackwater_kernels.block import mlp_block
from slackwater_kernels.block_layout import BlockWeights
from slackwater_kernels.dispatch import describe_mlp
from slackwater_kernels.gemm import Workspace
from slackwater_kernels.layout import CanonicalWeight
from slackwater_kernels.mlp import MlpWeights, Norm, mlp
from slackwater_kernels.quantize import quantize_activations

pytestmark = pytest.mark.gpu

MANY = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16)
# Where gate or up lands one bf16 step away, a hidden value's FP8 code moves by a whole step of up to 2^-3.
ERROR = 2.0**-6


def rows(m: int, k: int, seed: int = 0) -> torch.Tensor:
    """bf16 rows of very different sizes, so that no scale is like another."""
    generator = torch.Generator("cuda").manual_seed(100 * m + k + seed)
    x = torch.randn(m, k, generator=generator, device="cuda")
    spread = torch.exp(torch.randn(m, k // 64, generator=generator, device="cuda"))
    return (x * spread.repeat_interleave(64, 1)).bfloat16()


@pytest.fixture(scope="module")
def canonical() -> tuple[CanonicalWeight, CanonicalWeight]:
    return (
        reference.quantize_weight(rows(19456, 2560, seed=5) * 0.02),
        reference.quantize_weight(rows(2560, 9728, seed=6) * 0.01),
    )


@pytest.fixture(scope="module")
def weights(canonical: tuple[CanonicalWeight, CanonicalWeight]) -> BlockWeights:
    return BlockWeights.prepare(*canonical, "cuda")


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


def test_the_block_is_near_the_exact_one_and_no_row_depends_on_the_others(canonical, weights):
    x, residual, workspace = rows(16, 2560), rows(16, 2560, seed=1), Workspace("cuda")
    exact = reference.mlp(x, *canonical)
    results = {}

    for m in MANY:
        results[m] = mlp_block(x[:m], weights, workspace)
        assert torch.equal(results[m], mlp_block(x[:m], weights, workspace)), m
        assert torch.equal(results[m], mlp_block(quantize_activations(x[:m]), weights, workspace)), m
        added = mlp_block(x[:m], weights, workspace, residual[:m])
        assert error(added, exact[:m] + residual[:m].double()) < ERROR, m

    for m, got in results.items():
        for row in range(m):
            assert error(got[row], exact[row]) < ERROR, (m, row)
        assert torch.equal(got, results[16][:m]), m


def test_every_hidden_value_and_every_row_of_down_is_in_its_place():
    """Each output is one product: the position of both shows in it."""
    generator = torch.Generator("cuda").manual_seed(3)
    gate_up = torch.zeros(19456, 2560, device="cuda")
    columns = torch.randint(0, 2560, (9728,), device="cuda", generator=generator)
    hidden = torch.arange(9728, device="cuda")
    gate_up[hidden, columns] = 1.0
    gate_up[9728 + hidden, columns] = 1.0
    chosen = torch.randperm(9728, device="cuda", generator=generator)[:2560]
    down = torch.zeros(2560, 9728, device="cuda")
    down[torch.arange(2560, device="cuda"), chosen] = 1.0
    canonical = reference.quantize_weight(gate_up), reference.quantize_weight(down)
    x = rows(16, 2560)

    got = mlp_block(x, BlockWeights.prepare(*canonical, "cuda"), Workspace("cuda"))

    wanted = reference.mlp(x, *canonical)
    # A fast exponential may be one bf16 step off, which a code of FP8 may make 2^-3 of, or a subnormal one its step.
    assert ((got.double() - wanted).abs() <= wanted.abs() * 2.0**-2.9 + wanted.abs().max() * 2.0**-17).all()
    assert (got == wanted.bfloat16()).double().mean().item() > 0.9


@pytest.mark.parametrize("m", [1, 4, 16, 33, 64, 127, 128])
def test_the_form_that_describe_names_is_near_the_reference_behind_a_norm_with_a_residual(canonical, m):
    prepared, workspace = MlpWeights.prepare(*canonical, "cuda"), Workspace("cuda")
    x, residual, norm = rows(m, 2560), rows(m, 2560, seed=2), Norm(rows(1, 2560, seed=3)[0], 1e-6)

    got = mlp(x, prepared, workspace, norm, residual)

    exact = reference.mlp(reference.rmsnorm(x, norm.gain, norm.eps), *canonical) + residual.double()
    assert error(got, exact) < ERROR
    assert describe_mlp(m, block=True)["form"] == ("block" if m <= 16 else "launches")


@pytest.mark.parametrize("m", [1, 3, 16])
def test_it_replays_from_a_graph_bit_for_bit_without_synchronising(weights, m):
    x, workspace = rows(m, 2560), Workspace("cuda")
    eager = mlp_block(x, weights, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [mlp_block(x, weights, workspace) for _ in range(8)]  # each may start before the one in front ends

    for _ in range(20):
        for out in captured:
            out.fill_(torch.nan)
        torch.cuda.set_sync_debug_mode("error")
        graph.replay()
        torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(out, eager) for out in captured)


def test_launches_of_other_row_counts_in_a_row_do_not_read_each_others_words(weights):
    x, workspace = rows(16, 2560), Workspace("cuda")
    expected = mlp_block(x, weights, workspace)
    counts = [(7 * i) % 16 + 1 for i in range(100)]

    got = [mlp_block(x[:m], weights, workspace) for m in counts]

    assert all(torch.equal(out, expected[:m]) for m, out in zip(counts, got, strict=True))


def test_nan_stays_in_its_row(weights, canonical):
    x = rows(5, 2560)
    x[1, 700], x[3] = torch.nan, 0.0

    got = mlp_block(x, weights, Workspace("cuda"))

    assert got.isnan().all(1).tolist() == [False, True, False, False, False]
    assert got.isnan().any(1).tolist() == [False, True, False, False, False]
    assert not got[3].any()
    assert error(got[[0, 2, 4]], reference.mlp(x, *canonical)[[0, 2, 4]]) < ERROR


def test_rows_are_quantised_inside_as_by_the_quantiser_also_at_the_ends_of_the_range(weights):
    x = rows(16, 2560)
    x[0, 0], x[3, 1], x[7, 2] = torch.inf, -torch.inf, torch.nan
    x[9, -128:], x[9, -1] = 0.0, 1e-20
    x[12] *= 2.0**-120

    got = mlp_block(x, weights, Workspace("cuda"))

    wanted = mlp_block(quantize_activations(x), weights, Workspace("cuda"))
    assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))


def test_no_rows_are_a_result_too(weights):
    assert mlp_block(rows(1, 2560)[:0], weights, Workspace("cuda")).shape == (0, 2560)


def test_a_workspace_that_was_not_used_is_refused_while_a_graph_is_captured(weights):
    x, workspace, graph = rows(1, 2560), Workspace("cuda"), torch.cuda.CUDAGraph()
    mlp_block(x, weights, Workspace("cuda"))

    with pytest.raises(ValueError, match="before capturing"), torch.cuda.graph(graph):
        mlp_block(x, weights, workspace)
