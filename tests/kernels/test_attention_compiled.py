"""What attention becomes for sm_90a, checked without a GPU: a slower path would be seen in no result."""

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
    return compiled("compiled_attention.py")


def decodes(code):
    return {name: counts for name, counts in code.items() if not name.startswith("append")}


def test_products_run_on_the_tensor_core_and_nothing_is_read_from_shared_memory_by_the_byte(code):
    assert len(decodes(code)) == 5
    for name, counts in decodes(code).items():
        assert counts["tensor_core"] >= 32, name
        assert counts["byte_reads"] == 0, name
        assert counts["matrix_reads"] > 0, name


def test_keys_values_and_scales_are_asked_for_ahead(code):
    for name, counts in decodes(code).items():
        ctas = min(
            SHARED_BYTES // (counts["shared_bytes"] + 1024), REGISTERS // (counts["registers"] * counts["threads"])
        )
        assert counts["async_copies"] > 0, name
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
