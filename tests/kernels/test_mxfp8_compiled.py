"""What the MXFP8 kernels and the sampler become, checked without a GPU: a slower path would be seen in no result."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed here")

SHARED_BYTES = 101_376  # what a block may have on sm_120


@pytest.fixture(scope="module")
def code(compiled: Callable[[str], Any]) -> dict[str, dict[str, dict[str, int]]]:
    return compiled("compiled_mxfp8.py")


def products(kernels):
    return {name: counts for name, counts in kernels.items() if not name.startswith(("quantise", "draw"))}


def test_products_use_the_block_scaled_instruction_and_no_slower_one(code):
    assert len(products(code["sm_120a"])) == 4
    for name, counts in products(code["sm_120a"]).items():
        assert counts["block_scaled"] > 0, name
        assert counts["plain_fp8"] == counts["widened"] == 0, name


def test_data_centre_blackwell_has_its_own_block_scaled_instruction(code):
    for name, counts in products(code["sm_103a"]).items():
        assert counts["block_scaled_ptx"] > 0, name
        assert counts["of_target"] == 1, name
        assert counts["spilled"] == 0, name


def test_what_is_compiled_for_blackwell_fits_it_and_spills_nothing(code):
    for name, counts in code["sm_120a"].items():
        assert counts["of_target"] == 1, name
        assert counts["shared_bytes"] <= SHARED_BYTES, name
        assert counts["spilled"] == 0, name


def test_every_kernel_can_start_before_the_one_in_front_has_ended(code):
    for name, counts in code["sm_120a"].items():
        if name != "draw":
            assert counts["waits"] == 1, name
            assert counts["lets_next_start"] >= 1, name


def test_quantisers_keep_subnormal_numbers_and_the_sampler_its_logarithms(code):
    for target in code.values():
        assert target["quantise"]["subnormals_lost"] == 0
        # An approximate logarithm of a uniform near 1 has no digit right.
        assert target["draw"]["approximate_logarithms"] == 0
        assert target["draw"]["spilled"] == 0


def test_the_same_source_compiles_for_hopper_where_it_is_widened(code):
    for name, counts in products(code["sm_90a"]).items():
        assert counts["block_scaled"] == 0, name
        assert counts["widened"] > 0, name
