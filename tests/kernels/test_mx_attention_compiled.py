"""What MXFP8 attention becomes, checked without a GPU: a slower path would be seen in no result."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from slackwater_kernels.mx_attention import DECODE, TILES

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed here")

SHARED_BYTES = 101_376  # what a block, and a multiprocessor but for 1 KB a block, may have on sm_120
REGISTERS = 65_536


@pytest.fixture(scope="module")
def code(compiled: Callable[[str], Any]) -> dict[str, dict[str, dict[str, int]]]:
    return compiled("compiled_mx_attention.py")


def attentions(kernels):
    return {name: counts for name, counts in kernels.items() if name.startswith(("decode", "extend", "prefill"))}


def test_both_products_use_the_block_scaled_instruction_and_no_slower_one(code):
    assert len(attentions(code["sm_120a"])) == 5
    for name, counts in attentions(code["sm_120a"]).items():
        launch, rows = (DECODE, 16) if name.startswith("decode") else (TILES, TILES.rows)
        # 16 x 8 x 32 an instruction: queries with keys over 128 values, weights with 128 values over tokens.
        tiles = rows // 16 * launch.block // 8 * 4 // launch.warps
        assert counts["block_scaled_ptx"] == (2 if name.startswith("decode") else 4) * tiles, name
        assert counts["block_scaled"] == counts["block_scaled_ptx"], name
        assert counts["plain_fp8"] == counts["widened"] == 0, name


def test_keys_and_values_are_asked_for_ahead(code):
    for name, counts in attentions(code["sm_120a"]).items():
        ctas = min(
            SHARED_BYTES // (counts["shared_bytes"] + 1024), REGISTERS // (counts["registers"] * counts["threads"])
        )
        assert counts["copies_ahead"] >= 4, name  # keys, their words, values and their scales of a block or more
        assert ctas >= 2, name


def test_nothing_is_read_from_shared_memory_by_the_byte_in_a_loop(code):
    for name, counts in attentions(code["sm_120a"]).items():
        assert counts["turned_reads"] > 0, name
        assert counts["byte_reads"] <= 4, name  # the exponents of the queries, once


def test_what_is_compiled_for_blackwell_fits_it_and_spills_nothing(code):
    for name, counts in code["sm_120a"].items():
        assert counts["of_target"] == 1, name
        assert counts["shared_bytes"] <= SHARED_BYTES, name
        assert counts["spilled"] == 0, name


def test_every_kernel_can_start_before_the_one_in_front_has_ended(code):
    for name, counts in code["sm_120a"].items():
        assert counts["waits"] == 1, name
        assert counts["lets_next_start"] >= 1, name


def test_quantisers_keep_subnormal_numbers(code):
    for name in ("append", "append tokens", "quantise"):
        assert code["sm_120a"][name]["subnormals_lost"] == 0


def test_the_same_source_compiles_for_hopper_where_it_is_widened(code):
    for name, counts in attentions(code["sm_90a"]).items():
        assert counts["block_scaled"] == 0, name
        assert counts["widened"] > 0, name
