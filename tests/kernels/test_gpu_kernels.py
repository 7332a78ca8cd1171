"""The kernels on the GPU: against the references, run against run, and one row count against another."""

import pytest
import torch

from slackwater_kernels import reference
from slackwater_kernels.canary import check_weight
from slackwater_kernels.core import CanaryError
from slackwater_kernels.gemm import Workspace, bsgemm, gate_up_swiglu
from slackwater_kernels.layout import Fp8Activations, Fp8Weight
from slackwater_kernels.mlp import MlpWeights, Norm, mlp
from slackwater_kernels.quantize import quantize_activations, rmsnorm_quantize, swiglu_quantize

pytestmark = pytest.mark.gpu

SHAPES = {"wqkv": (6144, 2560), "wo": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728), "odd": (320, 1152)}
MANY = (1, 3, 7, 16, 17, 33, 64, 127, 128, 257)
# bf16 is rounded once, 2^-9 of the result.  Inside a 128-block the tensor core keeps about 14 bits of its largest sum.
ROUNDING, ACCUMULATOR = 2.0**-8, 2.0**-12


def rows(m: int, k: int, seed: int = 0) -> torch.Tensor:
    """bf16 rows of very different sizes, so that no scale is like another."""
    generator = torch.Generator("cuda").manual_seed(100 * m + k + seed)
    x = torch.randn(m, k, generator=generator, device="cuda")
    spread = torch.exp(torch.randn(m, k // 64, generator=generator, device="cuda"))
    return (x * spread.repeat_interleave(64, 1)).bfloat16()


def weight(name: str) -> tuple[reference.CanonicalWeight, Fp8Weight]:
    n, k = SHAPES[name]
    canonical = reference.quantize_weight(rows(n, k, seed=5) * 0.02)
    return canonical, Fp8Weight.prepare(canonical, "cuda")


def test_quantiser_equals_the_reference_bit_for_bit():
    for m in (1, 3, 8, 33, 130):
        for k in (128, 640, 2560, 9728):
            x = rows(m, k)
            x[0, 0], x[m // 2, 1] = torch.inf, torch.nan
            x[-1, -128:] = 0.0
            x[-1, :2] = 1e-20

            got = quantize_activations(x)

            wanted = reference.quantize_activations(x)
            assert torch.equal(got.codes, wanted.codes), (m, k)
            assert torch.equal(got.scales.nan_to_num(-1), wanted.scales.nan_to_num(-1)), (m, k)


def test_every_bf16_value_is_rounded_as_the_reference_rounds_it():
    every = torch.arange(1 << 16, device="cuda").to(torch.int16).view(torch.bfloat16)
    x = every.view(-1, 1).repeat(1, 128).contiguous()
    x[:, 1:] = torch.tensor(3.0, dtype=torch.bfloat16)

    got = quantize_activations(x)

    wanted = reference.quantize_activations(x)
    assert torch.equal(got.codes, wanted.codes)
    assert torch.equal(got.scales.nan_to_num(-1), wanted.scales.nan_to_num(-1))


def test_norm_and_swiglu_are_quantised_as_their_references():
    for m in (1, 7, 64):
        x, gain = rows(m, 2560), rows(1, 2560, seed=3)[0]
        gate_up = rows(m, 19456)

        for got, wanted in (
            (rmsnorm_quantize(x, gain, 1e-6), reference.rmsnorm(x, gain, 1e-6)),
            (swiglu_quantize(gate_up), reference.swiglu(gate_up)),
        ):
            # Half a step of E4M3 is 2^-4 of a value; exponential and sum may move a bf16 by one step.
            values, exact = reference.dequantize_activations(got), wanted.double()
            amax = exact.abs().view(m, -1, 128).amax(-1).repeat_interleave(128, 1)
            assert ((values - exact).abs() <= exact.abs() * 2.0**-3.9 + amax * 2.0**-17).all()


@pytest.mark.parametrize("name", SHAPES)
def test_product_is_near_the_exact_one_and_no_row_depends_on_the_others(name):
    canonical, handle = weight(name)
    k = SHAPES[name][1]
    x = rows(max(MANY), k)
    workspace = Workspace("cuda")
    values = reference.dequantize_weight(canonical)
    whole = reference.quantize_activations(x)
    exact = reference.dequantize_activations(whole) @ values.T
    size = reference.dequantize_activations(whole).abs() @ values.abs().T
    results = {}

    for m in MANY:
        part = reference.quantize_activations(x[:m])
        results[m] = bsgemm(part, handle, workspace)
        again = bsgemm(part, handle, workspace)
        assert torch.equal(results[m], again), m

    for m, got in results.items():
        bound = exact[:m].abs() * ROUNDING + size[:m] * ACCUMULATOR
        assert ((got.double() - exact[:m]).abs() <= bound).all(), m
        assert torch.equal(got, results[max(MANY)][:m]), m


@pytest.mark.parametrize("name", ["wo", "gate_up"])
def test_residual_is_added_before_the_one_rounding(name):
    canonical, handle = weight(name)
    n, k = SHAPES[name]
    x, residual = reference.quantize_activations(rows(5, k)), rows(5, n, seed=9)

    got = bsgemm(x, handle, Workspace("cuda"), residual)

    exact = reference.bsgemm(x, canonical) + residual.double()
    size = reference.dequantize_activations(x).abs() @ reference.dequantize_weight(canonical).abs().T
    assert ((got.double() - exact).abs() <= exact.abs() * ROUNDING + size * ACCUMULATOR).all()


def test_fused_swiglu_equals_the_two_one_after_the_other():
    _, handle = weight("gate_up")
    workspace = Workspace("cuda")
    for m in MANY:
        x = quantize_activations(rows(m, 2560))

        fused = gate_up_swiglu(x, handle, workspace)
        two_step = swiglu_quantize(bsgemm(x, handle, workspace))

        assert torch.equal(fused.codes, two_step.codes), m
        assert torch.equal(fused.scales, two_step.scales), m


@pytest.mark.parametrize("m", [1, 16, 64, 127])
def test_block_replays_from_a_graph_bit_for_bit_without_synchronising(m):
    gate_up, down = weight("gate_up"), weight("down")
    weights = MlpWeights(gate_up[1], down[1])
    x, residual = rows(m, 2560), rows(m, 2560, seed=2)
    norm, workspace = Norm(rows(1, 2560, seed=3)[0], 1e-6), Workspace("cuda")
    eager = mlp(x, weights, workspace, norm, residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mlp(x, weights, workspace, norm, residual)

    for _ in range(20):
        captured.fill_(torch.nan)
        torch.cuda.set_sync_debug_mode("error")
        graph.replay()
        torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(captured, eager)

    # Where gate or up lands one bf16 step away, a hidden value's FP8 code moves by a whole step of up to 2^-3.
    normed = reference.rmsnorm(x, norm.gain, norm.eps)
    exact = reference.mlp(normed, gate_up[0], down[0]) + residual.double()
    assert ((captured.double() - exact).norm() / exact.norm()).item() < 2.0**-6


def test_a_product_that_outgrows_the_workspace_is_refused_while_a_graph_is_captured():
    _, handle = weight("wo")
    x = reference.quantize_activations(rows(4, 4096))
    workspace, graph = Workspace("cuda"), torch.cuda.CUDAGraph()

    with pytest.raises(ValueError, match="before capturing"), torch.cuda.graph(graph):
        bsgemm(x, handle, workspace)


@pytest.mark.parametrize("name", ["wqkv", "down", "odd"])
def test_canary_passes_a_sound_weight_and_finds_scales_in_a_wrong_order(name):
    canonical, handle = weight(name)
    blocks = canonical.scales.shape[1]
    transposed = canonical.scales.T.contiguous().view(-1)

    check_weight(handle, canonical)

    with pytest.raises(CanaryError, match="wrong order"):
        check_weight(Fp8Weight(handle.n, handle.k, handle.codes, transposed), canonical)
    shifted = handle.scales.roll(blocks)
    with pytest.raises(CanaryError, match="wrong order"):
        check_weight(Fp8Weight(handle.n, handle.k, handle.codes, shifted), canonical)


def test_nan_stays_in_its_row():
    _, handle = weight("wqkv")
    x = rows(4, 2560)
    x[2, 700] = torch.nan

    got = bsgemm(quantize_activations(x), handle, Workspace("cuda"))

    assert got.isnan().all(1).tolist() == [False, False, True, False]
    assert got.isnan().any(1).tolist() == [False, False, True, False]


def test_no_rows_are_a_result_too():
    _, handle = weight("wo")
    empty = quantize_activations(torch.empty(0, 4096, dtype=torch.bfloat16, device="cuda"))

    assert isinstance(empty, Fp8Activations)
    assert bsgemm(empty, handle, Workspace("cuda")).shape == (0, 2560)
