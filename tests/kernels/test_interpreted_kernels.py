"""The kernels' own code on small shapes, without a GPU: against the references, and one launch against another."""

from dataclasses import replace

import pytest
import torch

from slackwater_kernels import reference
from slackwater_kernels.gemm import Workspace, run_bsgemm, run_gate_up_swiglu
from slackwater_kernels.layout import Fp8Weight
from slackwater_kernels.plan import Launch, Take, sum_tree
from slackwater_kernels.quantize import run_quantize, run_rmsnorm_quantize, run_swiglu_quantize

STREAM = Launch(Take.LEAF, 128, 16, 4, 3, tma=False, ahead=0, early=True)
LOOP = Launch(Take.GROUP, 64, 16, 4, 3, tma=False, ahead=0, early=True)
# NumPy adds a 128-block's products in fp32 and so does the reference in fp64; nothing else is rounded before bf16.
TOLERANCE = 2.0**-8


def rows(m: int, k: int, seed: int = 0) -> torch.Tensor:
    """bf16 rows of very different sizes, so that no scale is like another."""
    generator = torch.Generator().manual_seed(1000 * m + k + seed)
    x = torch.randn(m, k, generator=generator)
    return (x * torch.exp(2 * torch.randn(m, k // 32, generator=generator)).repeat_interleave(32, 1)).bfloat16()


def weight(n: int, k: int) -> tuple[reference.CanonicalWeight, Fp8Weight]:
    canonical = reference.quantize_weight(rows(n, k, seed=7))
    return canonical, Fp8Weight.prepare(canonical, "cpu")


@pytest.mark.parametrize(("m", "k"), [(1, 128), (3, 640), (5, 256)])
def test_quantiser_equals_the_reference_bit_for_bit(interpreted, m, k):
    x = rows(m, k)
    x[0, 0], x[-1, 5] = torch.inf, 0.0
    x[:, -128:] = 0.0

    got = run_quantize(interpreted, x, pdl=False)

    wanted = reference.quantize_activations(x)
    assert torch.equal(got.codes, wanted.codes)
    assert torch.equal(got.scales, wanted.scales)


def test_quantiser_makes_a_group_with_nan_all_nan(interpreted):
    x = rows(2, 256)
    x[1, 130] = torch.nan

    got = run_quantize(interpreted, x, pdl=False)

    wanted = reference.quantize_activations(x)
    assert torch.equal(got.codes, wanted.codes)
    assert got.scales.view(2, 4).isnan().tolist() == [[False] * 4, [False, True, False, False]]


def test_norm_and_swiglu_are_quantised_as_their_references(interpreted):
    x, gain = rows(3, 384), rows(1, 384, seed=3)[0]
    gate_up = rows(3, 512).clamp(-20, 20)

    normed = run_rmsnorm_quantize(interpreted, x, gain, 1e-6, pdl=False)
    gated = run_swiglu_quantize(interpreted, gate_up, pdl=False)

    for got, wanted in (
        (normed, reference.rmsnorm(x, gain, 1e-6)),
        (gated, reference.swiglu(gate_up)),
    ):
        # Half a step of E4M3 is 2^-4 of a value; the exponential and the norm's sum may move a bf16 by one step.
        values = reference.dequantize_activations(got)
        amax = wanted.double().abs().view(3, -1, 128).amax(-1).repeat_interleave(128, 1)
        assert ((values - wanted.double()).abs() <= wanted.double().abs() * 2.0**-3.9 + amax * 2.0**-17).all()


@pytest.mark.parametrize("take", [Take.LEAF, Take.GROUP, Take.ALL])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 128), (3, 200, 1792), (17, 64, 768)])
def test_product_is_near_the_exact_one(interpreted, take, m, n, k):
    canonical, handle = weight(n, k)
    x = reference.quantize_activations(rows(m, k))
    launch = replace(STREAM if take is Take.LEAF else LOOP, take=take)

    got = run_bsgemm(interpreted, x, handle, Workspace("cpu"), pdl=False, chosen=launch)

    exact = reference.bsgemm(x, canonical)
    size = reference.dequantize_activations(x).abs() @ reference.dequantize_weight(canonical).abs().T
    assert got.shape == (m, n)
    assert ((got.double() - exact).abs() <= exact.abs() * TOLERANCE + size * 1e-6).all()


def test_every_form_gives_a_row_the_same_bits(interpreted):
    _, handle = weight(128, 2304)
    x = rows(18, 2304)
    tree = sum_tree(128, 2304)
    residual = rows(18, 128)
    workspace = Workspace("cpu")
    assert (tree.leaves, tree.groups) == (4, 2)

    whole = run_bsgemm(
        interpreted, reference.quantize_activations(x), handle, workspace, residual, pdl=False, chosen=STREAM
    )
    forms = [
        run_bsgemm(interpreted, reference.quantize_activations(x[i : i + m]), handle, workspace,
                   residual[i : i + m], pdl=False, chosen=launch)
        for i, m, launch in (
            (0, 18, LOOP),
            (0, 18, replace(LOOP, take=Take.ALL, rows=128)),
            (0, 18, replace(STREAM, rows=64, tokens=32)),
            (17, 1, STREAM),
        )
    ]  # fmt: skip

    for form in forms[:3]:
        assert torch.equal(form, whole)
    assert torch.equal(forms[3], whole[17:])


def test_a_workspace_is_clean_again_after_each_product(interpreted):
    _, handle = weight(128, 1280)
    x = reference.quantize_activations(rows(2, 1280))
    workspace = Workspace("cpu")

    first = run_bsgemm(interpreted, x, handle, workspace, pdl=False, chosen=STREAM)
    workspace.take(0, 0)[0].fill_(torch.nan)
    second = run_bsgemm(interpreted, x, handle, workspace, pdl=False, chosen=STREAM)

    assert torch.equal(first, second)
    assert not workspace.take(0, 0)[1].any()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # silu of a very negative gate is 0
def test_gate_up_with_swiglu_equals_the_two_one_after_the_other(interpreted, monkeypatch):
    monkeypatch.setattr("slackwater_kernels.plan._ALONE", 1)  # so that a small N counts as filling the card
    canonical, handle = weight(512, 256)
    x = reference.quantize_activations(rows(3, 256))
    launch = replace(LOOP, take=Take.ALL)

    workspace = Workspace("cpu")
    fused = run_gate_up_swiglu(interpreted, x, handle, workspace, pdl=False, chosen=launch)
    plain = run_bsgemm(interpreted, x, handle, workspace, pdl=False, chosen=launch)

    two_step = run_swiglu_quantize(interpreted, plain, pdl=False)
    assert torch.equal(fused.codes, two_step.codes)
    assert torch.equal(fused.scales, two_step.scales)
    assert (plain.double() - reference.bsgemm(x, canonical)).abs().max() > 0  # rounded, so something is at stake
