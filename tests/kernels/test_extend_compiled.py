"""What attention of many queries a row becomes for sm_90a, checked without a GPU: a slower path shows in no result."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from slackwater_kernels.plan import extend_launch

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed here")

SHARED_BYTES = 232_448  # the most that a CTA of sm_90 may have
REGISTERS = 65_536


@pytest.fixture(scope="module")
def code(compiled: Callable[[str], Any]) -> dict[str, dict[str, int]]:
    return compiled("compiled_extend.py")


def attentions(code):
    return {name: counts for name, counts in code.items() if not name.startswith("append")}


def test_products_run_on_the_tensor_core_of_a_warpgroup_and_no_byte_is_read_or_written_alone(code):
    assert len(attentions(code)) == 7
    for name, counts in attentions(code).items():
        assert counts["warpgroup_products"] >= 2, name
        assert counts["small_products"] == 0, name
        assert counts["byte_reads"] == counts["byte_writes"] == 0, name


def test_no_constant_is_converted_to_fp8(code):
    for name, counts in code.items():
        assert counts["converted_constants"] == 0, name


def test_keys_values_and_scales_are_asked_for_two_steps_ahead(code):
    for name, counts in attentions(code).items():
        launch = extend_launch(fp8="fp8" in name)
        assert launch.stages == 3, name
        # The copies of a step stand in front of the loop for each step ahead, and once in it.
        keys_and_values = 2 * launch.block * 128 * (1 if "fp8" in name else 2)
        scales = 2 if "fp8" in name else 0
        assert counts["wide_copies"] >= launch.stages * keys_and_values // (16 * counts["threads"]), name
        assert counts["async_copies"] >= counts["wide_copies"] + launch.stages * scales, name
        assert counts["shared_bytes"] <= SHARED_BYTES, name


def test_nothing_is_spilled_to_local_memory(code):
    for name, counts in code.items():
        assert counts["spilled"] == 0, name
        assert counts["registers"] * counts["threads"] <= REGISTERS, name


def test_every_kernel_can_start_before_the_one_in_front_has_ended(code):
    for name, counts in code.items():
        assert counts["of_target"] == 1, name
        assert counts["waits"] == 1, name
        assert counts["lets_next_start"] >= 1, name
