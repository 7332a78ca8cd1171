"""What attention over values by channel becomes for sm_90a, checked without a GPU."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed here")

SHARED_BYTES = 233_472  # what a multiprocessor of sm_90 has; each CTA takes 1 KB for itself
REGISTERS = 65_536
BUFFERED = 131_072  # bytes of keys and values that a multiprocessor has room for: twice what must be under way


@pytest.fixture(scope="module")
def code(compiled: Callable[[str], Any]) -> dict[str, dict[str, int]]:
    return compiled("compiled_channel_attention.py")


def test_both_products_are_the_fp8_tensor_cores_and_nothing_is_widened(code):
    assert len(code) == 3
    for name, counts in code.items():
        # Of 64 tokens: 128 values of a head by 32 at a time, and twice 64 values over 64 tokens by 32 at a time.
        assert counts["fp8_tensor_core"] == 8, name
        assert counts["other_tensor_core"] == 0, name
        assert counts["byte_reads"] == 0, name


def test_keys_values_and_scales_are_asked_for_ahead(code):
    for name, counts in code.items():
        ctas = min(
            SHARED_BYTES // (counts["shared_bytes"] + 1024), REGISTERS // (counts["registers"] * counts["threads"])
        )
        # 16 bytes a thread: keys and values of a block take 2 * 64 * 128 / 2048 = 8 copies, for each block ahead.
        assert counts["async_copies"] >= 3 * 8, name
        assert ctas * counts["shared_bytes"] >= BUFFERED, name


def test_nothing_is_spilled_to_local_memory_and_the_kernel_can_start_early(code):
    for name, counts in code.items():
        assert counts["spilled"] == 0, name
        assert counts["of_target"] == 1, name
        assert counts["waits"] == 1, name
        assert counts["lets_next_start"] >= 1, name
