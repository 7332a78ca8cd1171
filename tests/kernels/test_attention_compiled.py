"""What attention becomes for sm_90a, checked without a GPU: a slower path would be seen in no result."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from slackwater_kernels.plan import FP8_ATTENTION

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed here")

SHARED_BYTES = 233_472  # what a multiprocessor of sm_90 has; each CTA takes 1 KB for itself
REGISTERS = 65_536
BUFFERED = 131_072  # bytes of keys and values that a multiprocessor has room for: twice what must be under way


@pytest.fixture(scope="module")
def code(compiled: Callable[[str], Any]) -> dict[str, dict[str, int]]:
    return compiled("compiled_attention.py")


def of(code, start):
    found = {name: counts for name, counts in code.items() if name.startswith(start)}
    assert found
    return found


def test_both_products_of_fp8_are_its_tensor_cores_and_nothing_is_widened(code):
    assert len(of(code, "fp8 launch")) == 3 + len(FP8_ATTENTION) - 1
    for name, counts in of(code, "fp8").items():
        # Of 64 tokens: 128 numbers of a head by 32 at a time, and twice 64 numbers over 64 tokens by 32 at a time.
        assert counts["fp8_products"] >= 8, name
        assert counts["other_products"] == 0, name
    for name, counts in of(code, "fp8 launch").items():
        assert counts["byte_reads"] == 0, name


def test_no_constant_is_converted_to_fp8(code):
    for name, counts in of(code, "fp8").items():
        assert counts["converted_constants"] == 0, name


def test_products_of_bf16_run_on_the_tensor_core_and_nothing_is_read_from_shared_memory_by_the_byte(code):
    assert len(of(code, "bf16 launch")) == 3
    for name, counts in of(code, "bf16").items():
        assert counts["other_products"] >= 32, name
        assert counts["byte_reads"] == 0, name
        assert counts["matrix_reads"] > 0, name


def test_keys_values_and_scales_are_asked_for_ahead(code):
    for name, counts in (of(code, "fp8 launch 0") | of(code, "fp8 quantised") | of(code, "bf16 launch 0")).items():
        ctas = min(
            SHARED_BYTES // (counts["shared_bytes"] + 1024), REGISTERS // (counts["registers"] * counts["threads"])
        )
        # 16 bytes a thread: keys and values of a block of 64 take 8 copies in FP8 and 16 in bf16, for each block ahead.
        assert counts["async_copies"] >= 3 * (16 if "bf16" in name else 8), name
        assert ctas >= 2, name
        assert ctas * counts["shared_bytes"] >= BUFFERED, name


def test_nothing_is_spilled_to_local_memory(code):
    for name, counts in code.items():
        assert counts["spilled"] == 0, name


def test_every_kernel_can_start_before_the_one_in_front_has_ended(code):
    for name, counts in code.items():
        assert counts["of_target"] == 1, name
        assert counts["waits"] == 1, name
        assert counts["lets_next_start"] >= 1, name
