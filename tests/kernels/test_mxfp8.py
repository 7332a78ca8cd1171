"""MXFP8: layouts and refusals, and the kernels' own code on small shapes without a GPU, against the references."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater_kernels import dispatch, reference
from slackwater_kernels.canary import check_mx_weight
from slackwater_kernels.core import CanaryError, LayoutError, MxRule, UnsupportedError
from slackwater_kernels.gemm import Workspace
from slackwater_kernels.layout import CanonicalMx, MxWeight, MxWords
from slackwater_kernels.mxfp8 import (
    describe,
    mx_launch,
    mxgemm,
    quantize_mx,
    rmsnorm_quantize_mx,
    run_mxgemm,
    run_quantize_mx,
    run_rmsnorm_quantize_mx,
    run_swiglu_quantize_mx,
    swiglu_quantize_mx,
)
from slackwater_kernels.numerics import e8m0_byte
from slackwater_kernels.plan import Take, sum_tree

RULES = pytest.mark.parametrize("rule", MxRule)
# NumPy adds a leaf's products in fp32 and so does the reference in fp64; nothing else is rounded before bf16.
TOLERANCE = 2.0**-8


@pytest.fixture
def kernels(interpreted):
    """`slackwater_kernels.mxfp8_source`, run by NumPy on CPU tensors."""
    if not hasattr(import_module("triton.runtime.interpreter").InterpreterBuilder, "create_dot_scaled"):
        pytest.skip("this Triton interprets no tl.dot_scaled; 3.9 does")
    return import_module("slackwater_kernels.mxfp8_source")


def rows(m: int, k: int, seed: int = 0) -> torch.Tensor:
    """bf16 rows whose blocks of 32 have very different sizes, so that no exponent is like another."""
    generator = torch.Generator().manual_seed(1000 * m + k + seed)
    x = torch.randn(m, k, generator=generator)
    return (x * torch.exp(2 * torch.randn(m, k // 32, generator=generator)).repeat_interleave(32, 1)).bfloat16()


def canonical(n: int, k: int, seed: int = 7) -> CanonicalMx:
    return reference.quantize_mx(rows(n, k, seed))


@given(n=st.integers(1, 300), blocks=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_a_weight_comes_back_from_its_tiles_as_it_was(n, blocks, seed):
    before = canonical(n, 128 * blocks, seed)

    after = MxWeight.prepare(before, "cpu").canonical()

    assert torch.equal(after.codes, before.codes)
    assert torch.equal(after.scales, before.scales)
    assert after.rule is before.rule


def test_a_tile_holds_its_rows_words_and_rows_that_fill_it_hold_one():
    bytes_ = torch.arange(200 * 12, dtype=torch.int32).remainder(251).to(torch.uint8).view(200, 12)
    before = CanonicalMx(torch.full((200, 384), 0x38, dtype=torch.uint8), bytes_, MxRule.RCEIL)

    words = MxWeight.prepare(before, "cpu").scales.view(2, 3, 128)

    low, *higher = bytes_[130, 8:].tolist()
    assert words[1, 2, 2].item() & 0xFFFFFFFF == low | higher[0] << 8 | higher[1] << 16 | higher[2] << 24
    assert words[1, :, 72:].eq(0x7F7F7F7F).all()


CODES = torch.zeros(256, 384, dtype=torch.uint8)
BYTES = torch.zeros(256, 12, dtype=torch.uint8)
TILES, WORDS = torch.zeros(2, 3, 128, 128, dtype=torch.uint8), torch.zeros(2 * 3 * 128, dtype=torch.int32)
RULE = MxRule.RCEIL


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        pytest.param(lambda: MxWeight(256, 384, CODES, WORDS, RULE), "MxWeight.prepare", id="canonical codes"),
        pytest.param(
            lambda: MxWeight(256, 384, TILES, BYTES.view(torch.int32), RULE), "MxWeight.prepare",
            id="canonical bytes as words [N, K / 128]",
        ),
        pytest.param(
            lambda: MxWeight(256, 384, TILES, BYTES.view(torch.int32).T.contiguous().T, RULE), "MxWeight.prepare",
            id="words with strides (1, N)",
        ),
        pytest.param(lambda: MxWeight(256, 384, TILES, BYTES, RULE), r"int32 \[768\], got uint8", id="bytes"),
        pytest.param(lambda: MxWeight(384, 256, TILES, WORDS, RULE), r"\[3, 2, 128, 128\]", id="N and K swapped"),
        pytest.param(lambda: MxWeight(256, 384, TILES.transpose(2, 3), WORDS, RULE), "row-major", id="tiles on a side"),
        pytest.param(
            lambda: MxWeight(256, 384, TILES, torch.zeros(769, dtype=torch.int32)[1:], RULE), "16 bytes", id="sliced"
        ),
        pytest.param(lambda: MxWeight(256, 384, TILES, WORDS.to("meta"), RULE), "prepare them anew", id="two devices"),
        pytest.param(lambda: MxWeight.prepare(TILES, "cpu"), "quantise it first", id="preparing a tensor"),
        pytest.param(
            lambda: MxWeight.prepare(reference.quantize_weight(torch.ones(256, 384)), "cpu"), "CanonicalMx",
            id="a weight of the other form",
        ),
        pytest.param(
            lambda: MxWeight.prepare(reference.quantize_mx(torch.ones(4, 96)), "cpu"), "no multiple of 128", id="K = 96"
        ),
        pytest.param(
            lambda: CanonicalMx(CODES, BYTES.view(torch.int32), RULE), "MxWords.canonical", id="int32 words on disk"
        ),
        pytest.param(lambda: CanonicalMx(CODES, BYTES.T.contiguous().T, RULE), "row-major", id="bytes by column"),
        pytest.param(lambda: CanonicalMx(CODES, BYTES.T.contiguous(), RULE), r"\[256, 12\]", id="transposed bytes"),
        pytest.param(
            lambda: MxWords(256, 384, torch.zeros(256 * 384 + 1, dtype=torch.uint8)[1:].view(256, 384), WORDS, RULE),
            "16 bytes", id="codes inside something else",
        ),
    ],
)  # fmt: skip
def test_a_form_refuses_any_other(make, complaint):
    with pytest.raises(LayoutError, match=complaint):
        make()


WEIGHT, X = MxWeight(256, 384, TILES, WORDS, RULE), MxWords.prepare(reference.quantize_mx(torch.zeros(5, 384)), "cpu")
SPACE, BF16 = Workspace("cpu"), torch.zeros(5, 256, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        pytest.param(lambda: mxgemm(CODES, WEIGHT, SPACE), "call quantize_mx", id="codes for x"),
        pytest.param(lambda: mxgemm(X, TILES, SPACE), "call MxWeight.prepare", id="tiles for a weight"),
        pytest.param(lambda: mxgemm(X, canonical(256, 384), SPACE), "MxWeight.prepare", id="canonical for a weight"),
        pytest.param(lambda: mxgemm(X, X, SPACE), "MxWeight.prepare, got MxWords|an MxWeight, got MxWords", id="words"),
        pytest.param(lambda: run_mxgemm(None, WEIGHT, X, SPACE), "call quantize_mx", id="swapped"),
        pytest.param(
            lambda: run_mxgemm(None, reference.quantize_activations(torch.zeros(5, 384)), WEIGHT, SPACE), "MxWords",
            id="activations of the other form",
        ),
        pytest.param(
            lambda: run_mxgemm(None, MxWords.prepare(reference.quantize_mx(torch.zeros(5, 256)), "cpu"), WEIGHT, SPACE),
            "agree in K", id="another K",
        ),
        pytest.param(lambda: run_mxgemm(None, X, WEIGHT, SPACE, BF16.T), r"residual must be bfloat16 \[5, 256\]",
                     id="transposed residual"),
        pytest.param(lambda: run_mxgemm(None, X, WEIGHT, SPACE, BF16.to("meta")), "residual on meta", id="elsewhere"),
        pytest.param(lambda: run_mxgemm(None, X, WEIGHT, Workspace("meta")), "workspace on meta", id="far workspace"),
        pytest.param(lambda: run_quantize_mx(None, BF16.float()), "cast it to bf16", id="fp32 rows"),
        pytest.param(lambda: run_quantize_mx(None, torch.zeros(256, 5, dtype=torch.bfloat16).T), "row-major", id="T"),
        pytest.param(lambda: run_quantize_mx(None, BF16[:, :96].contiguous()), "no multiple of 128", id="short rows"),
        pytest.param(lambda: run_quantize_mx(None, BF16[0]), "flatten", id="one dimension"),
        pytest.param(lambda: run_swiglu_quantize_mx(None, BF16[:, :128].contiguous()), "of 256", id="half a gate"),
        pytest.param(lambda: run_rmsnorm_quantize_mx(None, BF16, BF16[0, :128], 1e-6), "one gain", id="short gain"),
        pytest.param(
            lambda: run_rmsnorm_quantize_mx(None, BF16, BF16[0].to("meta"), 1e-6), "gain on meta", id="far gain"
        ),
        pytest.param(lambda: torch.add(WEIGHT, 1), "torch.add on a MxWeight", id="an operation of torch"),
    ],
)  # fmt: skip
def test_an_operation_refuses_what_it_would_have_to_guess(call, complaint):
    with pytest.raises((LayoutError, TypeError), match=complaint):
        call()


@pytest.mark.parametrize("arch", ["cpu", "sm_90", "sm_100"])
def test_other_hardware_is_refused_by_name_with_what_to_use_there(monkeypatch, arch):
    monkeypatch.setattr(dispatch, "arch", lambda device: arch)

    for call, instead in (
        (lambda: quantize_mx(torch.zeros(2, 256, dtype=torch.bfloat16)), "quantize_activations on sm_90"),
        (lambda: rmsnorm_quantize_mx(BF16, BF16[0], 1e-6), "reference.rmsnorm and quantize_mx"),
        (lambda: swiglu_quantize_mx(BF16), "reference.swiglu and quantize_mx"),
        (lambda: mxgemm(X, WEIGHT, SPACE), "bsgemm on sm_90"),
    ):
        with pytest.raises(UnsupportedError, match=f"no kernel for {arch}: it runs on sm_120, sm_103; use .*{instead}"):
            call()


@pytest.mark.parametrize(("arch", "tile"), [("sm_120", (64, 16)), ("sm_103", (128, 16))])
def test_blackwell_has_the_operations_and_their_description(monkeypatch, arch, tile):
    monkeypatch.setattr(dispatch, "arch", lambda device: arch)

    assert dispatch.supported("mxgemm", "cpu") is dispatch.supported("quantize_mx", "cpu") is True
    assert not dispatch.supported("bsgemm", "cpu")
    one, many = describe(2560, 9728, 1, arch), describe(2560, 9728, 512, arch)
    assert one["tile"] == tile
    assert one["sum"] == many["sum"] == "76 blocks in leaves of 6, 3 leaves a group"
    assert (one["split"], many["split"]) == (5, 1)


def test_the_canary_reads_a_sound_weight_and_finds_a_wrong_order():
    sound = canonical(200, 640, seed=3)
    handle = MxWeight.prepare(sound, "cpu")

    def multiply(x, weight, workspace):
        return (reference.dequantize_mx(x.canonical()) @ reference.dequantize_mx(weight.canonical()).T).bfloat16()

    check_mx_weight(handle, sound, multiply)

    words = handle.scales.view(2, 5, 128)
    for planted in (
        MxWeight(200, 640, handle.codes, words.transpose(0, 1).contiguous().view(-1), handle.rule),
        MxWeight(200, 640, handle.codes, words.transpose(1, 2).contiguous().view(-1), handle.rule),
        MxWeight(200, 640, handle.codes, handle.scales.roll(1), handle.rule),
        MxWeight(200, 640, handle.codes, handle.scales.view(-1, 1).view(torch.uint8).flip(1).view(torch.int32).view(-1),
                 handle.rule),
        MxWeight(200, 640, handle.codes.transpose(2, 3).contiguous(), handle.scales, handle.rule),
    ):  # fmt: skip
        with pytest.raises(CanaryError, match="wrong order"):
            check_mx_weight(planted, sound, multiply)


def same(got: MxWords, wanted: CanonicalMx) -> bool:
    packed = MxWords.prepare(wanted, "cpu")
    return torch.equal(got.codes, packed.codes) and torch.equal(got.scales, packed.scales)


@RULES
@pytest.mark.parametrize(("m", "k"), [(1, 128), (3, 640), (5, 256)])
def test_quantiser_equals_the_reference_bit_for_bit_also_in_its_padding(kernels, rule, m, k):
    x = rows(m, k)
    x[0, 0], x[-1, 5] = torch.inf, -0.0
    x[:, -32:] = 0.0
    x[0, -64], x[0, -63] = 1e-38, 1e-40  # the second one is subnormal

    got = run_quantize_mx(kernels, x, rule, pdl=False)

    assert got.rule is rule
    assert same(got, reference.quantize_mx(x, rule))


@RULES
def test_quantiser_makes_a_block_with_nan_all_nan_and_no_other(kernels, rule):
    x = rows(2, 256)
    x[1, 130] = torch.nan

    got = run_quantize_mx(kernels, x, rule, pdl=False)

    assert same(got, reference.quantize_mx(x, rule))
    assert got.canonical().scales.eq(255).nonzero().tolist() == [[1, 4]]
    padding = got.scales.view(2, 4, 1).view(torch.uint8)[:, 2:]
    assert padding.eq(127).all()


@RULES
def test_norm_and_swiglu_are_quantised_as_their_references(kernels, rule):
    x, gain = rows(3, 384), rows(1, 384, seed=3)[0]
    gate_up = rows(3, 512).clamp(-20, 20)

    normed = run_rmsnorm_quantize_mx(kernels, x, gain, 1e-6, rule, pdl=False)
    gated = run_swiglu_quantize_mx(kernels, gate_up, rule, pdl=False)

    for got, wanted in ((normed, reference.rmsnorm(x, gain, 1e-6)), (gated, reference.swiglu(gate_up))):
        # Exponential and sum may move a bf16 by one step, and with it a code; hardly ever a block's exponent.
        exact = reference.quantize_mx(wanted, rule)
        assert (got.codes != exact.codes).float().mean() < 0.02
        assert (got.canonical().scales != exact.scales).float().mean() < 0.05
        off = reference.dequantize_mx(got.canonical()) - reference.dequantize_mx(exact)
        assert (off.norm() / wanted.double().norm()).item() < 2.0**-7
        assert got.scales.view(-1, 4)[:, 3].eq(0x7F7F7F7F).all()


@RULES
def test_exponents_come_from_the_bits_of_every_size(kernels, rule):
    # Each power of two that bf16 has, with what is near it and near 1.75 times it, as its block's largest value.
    largest = torch.arange(1 << 15).view(256, 128)[:255, [0, 1, 96, 97, 127]].to(torch.int16).view(torch.bfloat16)
    x = torch.zeros(10, 128, 32, dtype=torch.bfloat16)
    x.view(1280, 32)[:1275, 7] = largest.reshape(-1)

    got = run_quantize_mx(kernels, x.view(10, 4096), rule, pdl=False)

    assert same(got, reference.quantize_mx(x.view(10, 4096), rule))
    assert torch.equal(got.canonical().scales.view(-1)[:1275], e8m0_byte(largest.float().reshape(-1), rule))


@pytest.mark.parametrize("take", [Take.GROUP, Take.ALL])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 128), (3, 200, 1792), (17, 64, 768)])
def test_product_is_near_the_exact_one(kernels, take, m, n, k):
    weight = canonical(n, k)
    x = reference.quantize_mx(rows(m, k))
    launch = replace(mx_launch(m), take=take)

    got = run_mxgemm(
        kernels, MxWords.prepare(x, "cpu"), MxWeight.prepare(weight, "cpu"), Workspace("cpu"), pdl=False, chosen=launch
    )

    values, weights = reference.dequantize_mx(x), reference.dequantize_mx(weight)
    exact, size = values @ weights.T, values.abs() @ weights.abs().T
    assert got.shape == (m, n)
    assert ((got.double() - exact).abs() <= exact.abs() * TOLERANCE + size * 1e-6).all()


def test_every_form_gives_a_row_the_same_bits(kernels):
    weight = MxWeight.prepare(canonical(128, 2304), "cpu")
    x, residual, space = rows(18, 2304), rows(18, 128), Workspace("cpu")
    tree = sum_tree(128, 2304)
    assert (tree.leaves, tree.groups) == (4, 2)

    def product(first, last, launch):
        part = MxWords.prepare(reference.quantize_mx(x[first:last]), "cpu")
        return run_mxgemm(kernels, part, weight, space, residual[first:last], pdl=False, chosen=launch)

    whole = product(0, 18, mx_launch(18))

    assert torch.equal(product(0, 18, replace(mx_launch(18), take=Take.ALL, rows=128)), whole)
    assert torch.equal(product(17, 18, mx_launch(1)), whole[17:])
    assert torch.equal(product(3, 7, mx_launch(64)), whole[3:7])


def test_a_nan_stays_in_its_row(kernels):
    x = rows(3, 256)
    x[1, 200] = torch.nan

    got = run_mxgemm(
        kernels, run_quantize_mx(kernels, x, pdl=False), MxWeight.prepare(canonical(64, 256), "cpu"), SPACE, pdl=False
    )

    assert got.isnan().all(1).tolist() == got.isnan().any(1).tolist() == [False, True, False]


def test_no_rows_are_a_result_too(kernels):
    none = run_quantize_mx(kernels, torch.empty(0, 384, dtype=torch.bfloat16), pdl=False)

    assert run_mxgemm(kernels, none, WEIGHT, SPACE, pdl=False).shape == (0, 256)
