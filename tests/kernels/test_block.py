"""The block in one launch without a GPU: where its bytes lie, what it refuses, what was compiled for it."""

import hashlib
import json
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import slackwater_kernels.cuda
from slackwater_kernels.block import CUBIN, SLOTS, mlp_block, shared_bytes
from slackwater_kernels.block_layout import BlockWeights
from slackwater_kernels.core import LayoutError, UnsupportedError
from slackwater_kernels.dispatch import describe_mlp, supported
from slackwater_kernels.gemm import Workspace
from slackwater_kernels.layout import CanonicalWeight, Fp8Activations, Fp8Weight
from slackwater_kernels.mlp import MlpWeights
from slackwater_kernels.reference import quantize_activations

CUDA = Path(slackwater_kernels.cuda.__file__).parent
K, HIDDEN, N = 2560, 9728, 2560
FIRST_UNIT, SECOND_UNIT = 19 * 512, 20 * 512  # bytes of 64 columns of a CTA's rows
SECOND = 40 * FIRST_UNIT


def canonical(n: int, k: int, seed: int) -> CanonicalWeight:
    """Random codes and a scale of its own for each block."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, generator=generator)
    blocks = (n // 128, k // 128)
    return CanonicalWeight(codes, (torch.randperm(blocks[0] * blocks[1], generator=generator) + 1.0).view(blocks) / 64)


@pytest.fixture(scope="module")
def weights() -> tuple[CanonicalWeight, CanonicalWeight, BlockWeights]:
    gate_up, down = canonical(2 * HIDDEN, K, 1), canonical(N, HIDDEN, 2)
    return gate_up, down, BlockWeights.prepare(gate_up, down, "cpu")


def in_unit(row: torch.Tensor, column: torch.Tensor, rows: int) -> torch.Tensor:
    """The byte of a unit of 64 columns: 16 columns of all rows side by side."""
    return column % 64 // 16 * rows * 16 + row * 16 + column % 16


def test_a_block_comes_back_from_its_pieces_as_it_was(weights):
    gate_up, down, handle = weights

    again = handle.canonical()

    for before, after in zip((gate_up, down), again, strict=True):
        assert torch.equal(before.codes, after.codes)
        assert torch.equal(before.scales, after.scales)


def test_a_hidden_value_has_its_gate_and_up_rows_in_one_group_of_one_cta(weights):
    gate_up, _, handle = weights
    hidden, column = torch.arange(HIDDEN)[:, None], torch.arange(K)[None]
    for up in (0, 1):
        row = hidden % 76 // 4 * 8 + up * 4 + hidden % 4

        found = handle.codes[hidden // 76, column // 64 * FIRST_UNIT + in_unit(row, column, 152)]

        assert torch.equal(found, gate_up.codes[up * HIDDEN : (up + 1) * HIDDEN])


def test_eight_ctas_share_the_sums_of_160_rows_of_down(weights):
    _, down, handle = weights
    row, column = torch.arange(N)[:, None], torch.arange(HIDDEN)[None]
    cta = row // 160 * 8 + column // 1216
    within = column % 1216

    found = handle.codes[cta, SECOND + within // 64 * SECOND_UNIT + in_unit(row % 160, within, 160)]

    assert torch.equal(found, down.codes)


def test_each_row_finds_its_own_scale(weights):
    gate_up, down, handle = weights
    scales = handle.scales.view(128, 100)
    hidden, block = torch.arange(HIDDEN)[:, None], torch.arange(20)[None]
    cta = hidden // 76
    second = hidden // 128 - cta * 76 // 128  # 0 or 1: a CTA's rows touch two blocks at most
    for up in (0, 1):
        found = scales[cta, block * 4 + up * 2 + second]
        assert torch.equal(found, gate_up.scales[up * 76 + torch.arange(HIDDEN) // 128])
    row, half = torch.arange(N)[:, None], torch.arange(152)[None]
    cta = row // 160 * 8 + half // 19
    place = 80 + (half // 2 - half // 19 * 19 // 2) * 2 + row // 128 - row // 160 * 160 // 128

    assert torch.equal(scales[cta, place], down.scales[torch.arange(N) // 128][:, torch.arange(152) // 2])


CODES, SCALES = torch.zeros(128, 583680, dtype=torch.uint8), torch.ones(128 * 100)
BLOCK, X, SPACE = BlockWeights(CODES, SCALES), torch.zeros(3, K, dtype=torch.bfloat16), Workspace("cpu")
GATE_UP, DOWN = canonical(256, 384, 0), canonical(384, 128, 0)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        pytest.param(lambda: BlockWeights(CODES, SCALES.view(128, 100)), "BlockWeights.prepare", id="scales by CTA"),
        pytest.param(lambda: BlockWeights(CODES.view(-1), SCALES), "BlockWeights.prepare", id="flat codes"),
        pytest.param(
            lambda: BlockWeights(torch.zeros(583680, 128, dtype=torch.uint8).T, SCALES), "row-major", id="by column"
        ),
        pytest.param(lambda: BlockWeights(CODES, SCALES.to("meta")), "prepare them anew", id="two devices"),
        pytest.param(lambda: BlockWeights(CODES, torch.ones(12801)[1:]), "16 bytes", id="scales in something else"),
        pytest.param(lambda: BlockWeights.prepare(GATE_UP, DOWN, "cpu"), "separate launches", id="another size"),
        pytest.param(lambda: BlockWeights.prepare(CODES, DOWN, "cpu"), "quantise it first", id="preparing a tensor"),
        pytest.param(lambda: mlp_block(X, CODES, SPACE), "BlockWeights.prepare", id="codes for weights"),
        pytest.param(lambda: mlp_block(BLOCK, X, SPACE), "BlockWeights.prepare", id="swapped"),
        pytest.param(lambda: mlp_block(X.float(), BLOCK, SPACE), "cast it to bf16", id="fp32 rows"),
        pytest.param(lambda: mlp_block(X[:, :128], BLOCK, SPACE), r"\[3, 2560\]", id="short rows"),
        pytest.param(lambda: mlp_block(X[0], BLOCK, SPACE), r"\[2560, 2560\]", id="one dimension"),
        pytest.param(lambda: mlp_block(X.T.contiguous().T, BLOCK, SPACE), "row-major", id="rows by column"),
        pytest.param(lambda: mlp_block(X.repeat(6, 1), BLOCK, SPACE), "up to 16 rows, got 18", id="many rows"),
        pytest.param(lambda: mlp_block("x", BLOCK, SPACE), "bf16", id="no rows at all"),
        pytest.param(
            lambda: mlp_block(quantize_activations(torch.ones(3, 128)), BLOCK, SPACE), "agree in K", id="another K"
        ),
        pytest.param(lambda: mlp_block(X, BLOCK, SPACE, X[:2]), "residual", id="residual of fewer rows"),
        pytest.param(lambda: mlp_block(X, BLOCK, SPACE, X.to("meta")), "residual on meta", id="residual elsewhere"),
        pytest.param(lambda: mlp_block(X, BLOCK, Workspace("meta")), "workspace on meta", id="far workspace"),
        pytest.param(
            lambda: MlpWeights(Fp8Weight.prepare(canonical(256, 128, 0), "cpu"),
                               Fp8Weight.prepare(canonical(128, 128, 0), "cpu"), BLOCK),
            "prepare without it", id="a block of another size",
        ),
    ],
)  # fmt: skip
def test_whatever_would_have_to_be_guessed_is_refused(call, complaint):
    with pytest.raises(LayoutError, match=complaint):
        call()


def test_the_handle_is_no_tensor():
    with pytest.raises((LayoutError, TypeError)):
        torch.add(BLOCK, 1)


def test_a_cpu_is_refused_by_name_with_the_alternative():
    quantised = Fp8Activations.pack(torch.zeros(3, K, dtype=torch.uint8), torch.ones(3, K // 128))

    for x in (X, quantised):
        with pytest.raises(
            UnsupportedError, match="mlp_block has no kernel for cpu: it runs on sm_90; use mlp without"
        ):
            mlp_block(x, BLOCK, SPACE)
    assert not supported("mlp_block", "cpu")


def test_other_sizes_are_prepared_for_the_launches_alone():
    weights = MlpWeights.prepare(canonical(256, 128, 0), canonical(128, 128, 0), "cpu")

    assert weights.block is None


def test_describe_tells_the_form_and_where_a_rows_bits_are_the_same():
    one, many, without = describe_mlp(1, block=True), describe_mlp(17, block=True), describe_mlp(1, block=False)

    assert (one["form"], many["form"], without["form"]) == ("block", "launches", "launches")
    assert (one["launches"], many["launches"], without["launches"]) == (1, 3, 3)
    assert (one["batch_invariant"], many["batch_invariant"]) == ("up to 16 rows", "from 17 rows on")
    assert without["batch_invariant"] is True


def test_the_workspace_keeps_its_words():
    space = Workspace("cpu")

    first = space.words(8)

    assert space.words(8) is first
    with pytest.raises(LayoutError, match="holds 8 words and 9 are asked for"):
        space.words(9)


def test_what_is_shipped_was_compiled_from_this_source():
    made = json.loads((CUDA / "mlp.json").read_text())

    for name, key in ((made["source"], "source_sha256"), (CUBIN, "cubin_sha256")):
        found = hashlib.sha256((CUDA / name).read_bytes()).hexdigest()
        assert found == made[key], (
            f"{name} is not what the cubin was made from; run python -m slackwater_kernels.cuda.build"
        )
    assert "-gencode=arch=compute_90a,code=sm_90a" in made["flags"]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton, which brings the disassembler, is not installed here")
def test_the_machine_code_uses_the_fp8_tensor_core_and_spills_nothing():
    import triton

    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    code = subprocess.run([disassembler, CUDA / CUBIN], capture_output=True, text=True, check=True).stdout
    kernels = re.split(r"\.section\s+\.text\.", code)[1:]
    assert sorted(part.partition(",")[0] for part in kernels) == sorted(f"mlp_{room}" for room in SLOTS)
    for part in kernels:
        name = part.partition(",")[0]
        words = re.findall(r"\b[A-Z][A-Z0-9]+\b", part)
        counts = {word: words.count(word) for word in words}
        assert counts["QGMMA"] == 30, name  # three tiles of 64 rows: 4 steps of 32 columns in gate_up, 4 and 2 in down
        assert counts["UBLKCP"] == 1, name  # weights by the bulk copy engine
        assert counts["ACQBULK"] == 1, name  # waits once for the kernel in front
        assert counts["PREEXIT"] == 1, name  # lets the next one start
        assert {"HGMMA", "HMMA", "LDL", "STL"}.isdisjoint(counts), name
    assert "sm_90a" in code


def test_two_ctas_never_share_a_multiprocessor():
    for room in SLOTS:
        assert 114 << 10 < shared_bytes(room) <= 227 << 10
