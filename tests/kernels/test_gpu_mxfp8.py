"""The MXFP8 kernels on a GPU without their instruction: Triton widens, the addresses and the numbers are the same."""

import pytest
import torch

from slackwater_kernels import reference
from slackwater_kernels.canary import check_mx_weight
from slackwater_kernels.core import CanaryError, MxRule
from slackwater_kernels.dispatch import mx_sources
from slackwater_kernels.gemm import Workspace
from slackwater_kernels.layout import CanonicalMx, MxWeight, MxWords
from slackwater_kernels.mxfp8 import (
    mx_launch,
    run_mxgemm,
    run_quantize_mx,
    run_rmsnorm_quantize_mx,
    run_swiglu_quantize_mx,
)

pytestmark = pytest.mark.gpu

SHAPES = {"wqkv": (6144, 2560), "wo": (2560, 4096), "down": (2560, 9728), "odd": (320, 1152)}
MANY = (1, 3, 7, 16, 17, 33, 64, 127, 128, 257)
# bf16 is rounded once, 2^-9 of the result; a leaf's sum is rounded to fp32, or to a little less, at each step.
ROUNDING, ACCUMULATOR = 2.0**-8, 2.0**-12


def rows(m: int, k: int, seed: int = 0) -> torch.Tensor:
    """bf16 rows whose blocks of 32 have very different sizes, so that no exponent is like another."""
    generator = torch.Generator("cuda").manual_seed(100 * m + k + seed)
    x = torch.randn(m, k, generator=generator, device="cuda")
    spread = torch.exp(2 * torch.randn(m, k // 32, generator=generator, device="cuda"))
    return (x * spread.repeat_interleave(32, 1)).bfloat16()


def weight(name: str) -> tuple[CanonicalMx, MxWeight]:
    n, k = SHAPES[name]
    canonical = reference.quantize_mx(rows(n, k, seed=5) * 0.02)
    return canonical, MxWeight.prepare(canonical, "cuda")


def same(got: MxWords, wanted: CanonicalMx) -> bool:
    packed = MxWords.prepare(wanted, "cuda")
    return torch.equal(got.codes, packed.codes) and torch.equal(got.scales, packed.scales)


@pytest.mark.parametrize("rule", MxRule)
def test_quantiser_equals_the_reference_bit_for_bit(rule):
    for m in (1, 3, 8, 33, 130):
        for k in (128, 640, 2560, 9728):
            x = rows(m, k)
            x[0, 0], x[m // 2, 1] = torch.inf, torch.nan
            x[-1, -128:] = 0.0
            x[-1, -64:-60] = 1e-40  # subnormal

            assert same(run_quantize_mx(mx_sources(), x, rule), reference.quantize_mx(x, rule)), (m, k)


@pytest.mark.parametrize("rule", MxRule)
def test_every_bf16_value_is_rounded_as_the_reference_rounds_it(rule):
    every = torch.arange(1 << 16, device="cuda").to(torch.int16).view(torch.bfloat16)
    x = every.view(-1, 1).repeat(1, 128).contiguous()
    x[:, 1:32] = torch.tensor(3.0, dtype=torch.bfloat16)

    assert same(run_quantize_mx(mx_sources(), x, rule), reference.quantize_mx(x, rule))


@pytest.mark.parametrize("rule", MxRule)
def test_norm_and_swiglu_are_quantised_as_their_references(rule):
    for m in (1, 7, 64):
        x, gain, gate_up = rows(m, 2560), rows(1, 2560, seed=3)[0], rows(m, 19456)

        for got, wanted in (
            (run_rmsnorm_quantize_mx(mx_sources(), x, gain, 1e-6, rule), reference.rmsnorm(x, gain, 1e-6)),
            (run_swiglu_quantize_mx(mx_sources(), gate_up, rule), reference.swiglu(gate_up)),
        ):
            # Exponential and sum may move a bf16 by one step, and with it a code; hardly ever a block's exponent.
            exact = reference.quantize_mx(wanted, rule)
            assert (got.codes != exact.codes).float().mean() < 0.02
            assert (got.canonical().scales != exact.scales).float().mean() < 0.01
            off = reference.dequantize_mx(got.canonical()) - reference.dequantize_mx(exact)
            assert (off.norm() / wanted.double().norm()).item() < 2.0**-7


@pytest.mark.parametrize("name", SHAPES)
def test_product_is_near_the_exact_one_and_no_row_depends_on_the_others(name):
    canonical, handle = weight(name)
    x = rows(max(MANY), SHAPES[name][1])
    workspace = Workspace("cuda")
    weights, values = reference.dequantize_mx(canonical), reference.dequantize_mx(reference.quantize_mx(x))
    exact, size = values @ weights.T, values.abs() @ weights.abs().T

    results = {m: run_mxgemm(mx_sources(), run_quantize_mx(mx_sources(), x[:m]), handle, workspace) for m in MANY}

    for m, got in results.items():
        again = run_mxgemm(mx_sources(), run_quantize_mx(mx_sources(), x[:m]), handle, workspace)
        assert torch.equal(got, again), m
        bound = exact[:m].abs() * ROUNDING + size[:m] * ACCUMULATOR
        assert ((got.double() - exact[:m]).abs() <= bound).all(), m
        # Widened to bf16 another tile is another instruction, whose sum inside 16 values has its own order.
        assert ((got.double() - results[max(MANY)][:m].double()).abs() <= bound).all(), m


@pytest.mark.parametrize("m", [1, 33, 64, 257])
def test_the_launch_of_data_centre_blackwell_gives_the_same_product(m):
    canonical, handle = weight("odd")
    x, workspace = rows(m, 1152), Workspace("cuda")
    quantised = reference.quantize_mx(x)

    got = run_mxgemm(mx_sources(), MxWords.prepare(quantised, "cuda"), handle, workspace, chosen=mx_launch(m, "sm_103"))

    values, weights = reference.dequantize_mx(quantised), reference.dequantize_mx(canonical)
    exact, size = values @ weights.T, values.abs() @ weights.abs().T
    assert ((got.double() - exact).abs() <= exact.abs() * ROUNDING + size * ACCUMULATOR).all()


@pytest.mark.parametrize("m", [1, 64])
def test_chain_replays_from_a_graph_bit_for_bit_without_synchronising(m):
    _, handle = weight("wo")
    x, residual, workspace = rows(m, 4096), rows(m, 2560, seed=2), Workspace("cuda")

    def chain():
        return run_mxgemm(mx_sources(), run_quantize_mx(mx_sources(), x), handle, workspace, residual)

    eager = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()

    for _ in range(20):
        captured.fill_(torch.nan)
        torch.cuda.set_sync_debug_mode("error")
        graph.replay()
        torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(captured, eager)


@pytest.mark.parametrize("name", ["wqkv", "odd"])
def test_canary_passes_a_sound_weight_and_finds_exponents_in_a_wrong_order(name):
    canonical, handle = weight(name)

    def multiply(x, weight, workspace):
        return run_mxgemm(mx_sources(), x, weight, workspace)

    check_mx_weight(handle, canonical, multiply)

    words = handle.scales.view(*handle.codes.shape[:2], 128)
    for planted in (words.transpose(1, 2), words.transpose(0, 1), words.roll(1, 2)):
        spoilt = MxWeight(handle.n, handle.k, handle.codes, planted.contiguous().view(-1), handle.rule)
        with pytest.raises(CanaryError, match="wrong order"):
            check_mx_weight(spoilt, canonical, multiply)


def test_nan_stays_in_its_row():
    _, handle = weight("wqkv")
    x = rows(4, 2560)
    x[2, 700] = torch.nan

    got = run_mxgemm(mx_sources(), run_quantize_mx(mx_sources(), x), handle, Workspace("cuda"))

    assert got.isnan().all(1).tolist() == got.isnan().any(1).tolist() == [False, False, True, False]
