"""Layouts: canonical there and back, and a wrong one planted at every entry."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater_kernels import reference
from slackwater_kernels.canary import check_weight
from slackwater_kernels.core import CanaryError, LayoutError
from slackwater_kernels.gemm import Workspace, bsgemm, run_bsgemm, run_gate_up_swiglu
from slackwater_kernels.layout import CanonicalMx, CanonicalWeight, Fp8Activations, Fp8Weight, MxWords
from slackwater_kernels.mlp import MlpWeights
from slackwater_kernels.quantize import run_quantize, run_rmsnorm_quantize, run_swiglu_quantize


def canonical(n: int, k: int, seed: int = 0) -> CanonicalWeight:
    """Random codes and a scale of its own for each block."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 0x7F, (n, k), dtype=torch.uint8, generator=generator)
    blocks = (-(-n // 128), k // 128)
    return CanonicalWeight(codes, (torch.randperm(blocks[0] * blocks[1], generator=generator) + 1.0).view(blocks) / 64)


@given(n=st.integers(1, 300), blocks=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_a_weight_comes_back_from_its_tiles_as_it_was(n, blocks, seed):
    before = canonical(n, 128 * blocks, seed)

    handle = Fp8Weight.prepare(before, "cpu")

    after = handle.canonical()
    assert torch.equal(after.codes, before.codes)
    assert torch.equal(after.scales, before.scales)


def test_a_tile_holds_the_rows_and_columns_of_its_block():
    before = canonical(200, 384)

    handle = Fp8Weight.prepare(before, "cpu")

    assert torch.equal(handle.codes[1, 2, :72], before.codes[128:, 256:])
    assert not handle.codes[1, :, 72:].any()
    assert handle.scales[1 * 3 + 2] == before.scales[1, 2]


@given(rows=st.integers(0, 9), blocks=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_activation_and_mx_scales_come_back_from_their_packed_forms(rows, blocks, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 128 * blocks, generator=generator)
    x *= torch.arange(1, x.numel() // 32 + 1).view(rows, 4 * blocks).repeat_interleave(32, 1)

    mx = reference.quantize_mx(x)
    words = MxWords.prepare(mx, "cpu")
    activations = reference.quantize_activations(x)

    assert torch.equal(words.canonical().scales, mx.scales)
    assert torch.equal(Fp8Activations.pack(*activations.logical()).scales, activations.scales)


def test_a_word_holds_four_bytes_lowest_first_and_padding_rows_hold_one():
    mx = CanonicalMx(
        torch.zeros(3, 256, dtype=torch.uint8), torch.arange(24, dtype=torch.uint8).view(3, 8), reference.MxRule.RCEIL
    )

    words = MxWords.prepare(mx, "cpu").scales.view(2, 4)

    assert words[1, 2].item() == 20 | 21 << 8 | 22 << 16 | 23 << 24
    assert words[:, 3].tolist() == [0x7F7F7F7F] * 2


def test_files_say_their_form_and_another_form_is_refused():
    weight, mx = canonical(130, 256), reference.quantize_mx(torch.randn(3, 64))

    again = CanonicalWeight.from_tensors(weight.to_tensors("w"), "w", weight.metadata())
    mx_again = CanonicalMx.from_tensors(mx.to_tensors("w"), "w", mx.metadata())

    assert again.codes is weight.codes
    assert mx_again.rule is mx.rule
    with pytest.raises(LayoutError, match="format must be 'fp8_e4m3_128x128', got 'mxfp8_e4m3_1x32'"):
        CanonicalWeight.from_tensors(weight.to_tensors("w"), "w", mx.metadata())
    with pytest.raises(LayoutError, match="version must be '1', got '2'"):
        CanonicalMx.from_tensors(mx.to_tensors("w"), "w", {**mx.metadata(), "version": "2"})


CODES, SCALES = torch.zeros(256, 384, dtype=torch.uint8), torch.ones(2, 3)
TILES = torch.zeros(2, 3, 128, 128, dtype=torch.uint8)
X_CODES, X_SCALES = torch.zeros(5, 384, dtype=torch.uint8), torch.ones(3 * 8)
MX_SCALES, WORDS = torch.zeros(256, 12, dtype=torch.uint8), torch.zeros(3 * 256, dtype=torch.int32)
RULE = reference.MxRule.RCEIL


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        pytest.param(lambda: CanonicalWeight(CODES, SCALES.T), "was it saved transposed", id="transposed scales"),
        pytest.param(
            lambda: CanonicalWeight(CODES, SCALES.T.contiguous().T), "row-major", id="scales with the other strides"
        ),
        pytest.param(lambda: CanonicalWeight(CODES.T, SCALES.T), "row-major", id="a transposed weight"),
        pytest.param(lambda: CanonicalWeight(CODES, SCALES.double()), "float32", id="fp64 scales"),
        pytest.param(lambda: CanonicalWeight(CODES.float(), SCALES), "view float8_e4m3fn as uint8", id="float codes"),
        pytest.param(lambda: CanonicalWeight(CODES, SCALES[:1]), r"\[2, 3\]", id="scales of half the rows"),
        pytest.param(lambda: Fp8Weight(256, 384, CODES, SCALES.view(-1)), "Fp8Weight.prepare", id="canonical codes"),
        pytest.param(lambda: Fp8Weight(256, 384, TILES, SCALES), "Fp8Weight.prepare", id="canonical scales"),
        pytest.param(
            lambda: Fp8Weight(256, 384, TILES.transpose(2, 3), SCALES.view(-1)), "row-major", id="tiles on their side"
        ),
        pytest.param(
            lambda: Fp8Weight(256, 384, TILES.view(3, 2, 128, 128), SCALES.view(-1)), r"\[2, 3, 128, 128\]",
            id="tiles of the transposed weight",
        ),
        pytest.param(lambda: Fp8Weight(384, 256, TILES, SCALES.view(-1)), r"\[3, 2, 128, 128\]", id="N and K swapped"),
        pytest.param(
            lambda: Fp8Weight(256, 384, TILES, SCALES.view(-1).to("meta")), "prepare them anew", id="two devices"
        ),
        pytest.param(
            lambda: Fp8Weight(256, 384, TILES, torch.ones(7)[1:]), "16 bytes", id="scales inside something else"
        ),
        pytest.param(lambda: Fp8Weight.prepare(CODES, "cpu"), "quantise it first", id="preparing a tensor"),
        pytest.param(
            lambda: Fp8Activations(5, 384, X_CODES, torch.ones(5, 3)), "quantize_activations", id="logical scales"
        ),
        pytest.param(
            lambda: Fp8Activations(5, 384, X_CODES, torch.ones(15)), "quantize_activations", id="unpadded scales"
        ),
        pytest.param(
            lambda: Fp8Activations(5, 384, torch.zeros(384, 5, dtype=torch.uint8).T, X_SCALES), "row-major",
            id="activations by column",
        ),
        pytest.param(lambda: Fp8Activations.pack(X_CODES, torch.ones(3, 5).T), "row-major", id="packing a transpose"),
        pytest.param(lambda: CanonicalMx(CODES, MX_SCALES.view(torch.int32), RULE), "MxWords.canonical", id="words"),
        pytest.param(lambda: CanonicalMx(CODES, MX_SCALES.T.contiguous().T, RULE), "row-major", id="bytes by column"),
        pytest.param(
            lambda: MxWords(256, 384, CODES, MX_SCALES.view(torch.int32), RULE), "MxWords.prepare", id="canonical bytes"
        ),
        pytest.param(lambda: MxWords(384, 256, CODES, WORDS, RULE), "MxWords.prepare", id="rows and K swapped"),
        pytest.param(lambda: MxWords.prepare(CODES, "cpu"), "quantise it first", id="packing a tensor"),
    ],
)  # fmt: skip
def test_a_form_refuses_any_other(make, complaint):
    with pytest.raises(LayoutError, match=complaint):
        make()


WEIGHT, X = Fp8Weight(256, 384, TILES, SCALES.view(-1)), Fp8Activations(5, 384, X_CODES, X_SCALES)
LONG, LONG_X = Fp8Weight.prepare(canonical(256, 1280), "cpu"), reference.quantize_activations(torch.zeros(5, 1280))
SPACE, BF16 = Workspace("cpu"), torch.zeros(5, 256, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        pytest.param(lambda: bsgemm(X_CODES, WEIGHT, SPACE), "call quantize_activations", id="codes for x"),
        pytest.param(lambda: bsgemm(X, TILES, SPACE), "call Fp8Weight.prepare", id="tiles for a weight"),
        pytest.param(lambda: bsgemm(X, canonical(256, 384), SPACE), "Fp8Weight.prepare", id="canonical for a weight"),
        pytest.param(lambda: run_bsgemm(None, WEIGHT, X, SPACE), "call quantize_activations", id="swapped"),
        pytest.param(
            lambda: run_bsgemm(None, reference.quantize_activations(torch.zeros(5, 256)), WEIGHT, SPACE), "agree in K",
            id="another K",
        ),
        pytest.param(lambda: run_bsgemm(None, X, WEIGHT, SPACE, BF16.T), r"residual must be bfloat16 \[5, 256\]",
                     id="transposed residual"),
        pytest.param(lambda: run_bsgemm(None, X, WEIGHT, SPACE, BF16.float()), "residual", id="fp32 residual"),
        pytest.param(lambda: run_bsgemm(None, X, WEIGHT, SPACE, BF16.to("meta")), "residual on meta", id="elsewhere"),
        pytest.param(lambda: run_bsgemm(None, X, WEIGHT, Workspace("meta")), "workspace on meta", id="far workspace"),
        pytest.param(lambda: run_gate_up_swiglu(None, LONG_X, LONG, SPACE), "use bsgemm and swiglu", id="split K"),
        pytest.param(lambda: run_quantize(None, BF16.float()), "cast it to bf16", id="fp32 rows"),
        pytest.param(lambda: run_quantize(None, torch.zeros(256, 5, dtype=torch.bfloat16).T), "row-major", id="column"),
        pytest.param(lambda: run_quantize(None, BF16[:, :100].contiguous()), "no multiple of 128", id="short rows"),
        pytest.param(lambda: run_quantize(None, BF16[0]), "flatten", id="one dimension"),
        pytest.param(lambda: run_swiglu_quantize(None, BF16[:, :128].contiguous()), "of 256", id="half a gate"),
        pytest.param(lambda: run_rmsnorm_quantize(None, BF16, BF16[0, :128], 1e-6), "one gain per column", id="gain"),
        pytest.param(lambda: MlpWeights(WEIGHT, WEIGHT), "gate above up", id="a block that does not fit"),
    ],
)  # fmt: skip
def test_an_operation_refuses_what_it_would_have_to_guess(call, complaint):
    with pytest.raises(LayoutError, match=complaint):
        call()


@pytest.mark.parametrize(
    "take",
    [
        pytest.param(lambda: torch.add(WEIGHT, 1), id="add"),
        pytest.param(lambda: torch.zeros(3).copy_(WEIGHT), id="copy"),
        pytest.param(lambda: torch.nn.functional.linear(torch.zeros(1, 384), WEIGHT), id="linear"),
        pytest.param(lambda: torch.cat((X, X)), id="cat"),
    ],
)
def test_a_handle_is_no_tensor(take):
    with pytest.raises((LayoutError, TypeError)):
        take()


def test_the_canary_reads_a_sound_weight_and_finds_a_wrong_order():
    sound = canonical(200, 640, seed=3)
    handle = Fp8Weight.prepare(sound, "cpu")

    def multiply(x, weight, workspace):
        return reference.bsgemm(x, weight.canonical()).bfloat16()

    check_weight(handle, sound, multiply)

    for planted in (
        Fp8Weight(200, 640, handle.codes, handle.scales.view(2, 5).T.contiguous().view(-1)),
        Fp8Weight(200, 640, handle.codes, handle.scales.roll(1)),
        Fp8Weight(200, 640, handle.codes.transpose(2, 3).contiguous(), handle.scales),
    ):
        with pytest.raises(CanaryError, match="wrong order"):
            check_weight(planted, sound, multiply)
