"""What the kernels become for sm_90a, checked without a GPU: a slower path would not be seen in any result."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed here")


@pytest.fixture(scope="module")
def instructions(compiled: Callable[[str], Any]) -> dict[str, dict[str, int]]:
    return compiled("compiled.py")


def test_products_use_the_native_fp8_tensor_core_and_no_slower_one(instructions):
    for name in ("wqkv", "down", "many", "gated", "gated many"):
        counts = instructions[name]
        assert counts["QGMMA"] > 0, name
        assert counts["HGMMA"] == counts["HMMA"] == 0, name


def test_every_kernel_can_start_before_the_one_in_front_has_ended(instructions):
    for name, counts in instructions.items():
        assert counts["ACQBULK"] == 1, name  # waits once for the kernel in front
        assert counts["PREEXIT"] >= 1, name  # lets the next one start
        assert counts["target"] > 0, name


def test_nothing_is_spilled_to_local_memory(instructions):
    for name, counts in instructions.items():
        assert counts["LDL"] == counts["STL"] == 0, name


def test_loads_take_the_path_that_was_planned(instructions):
    assert instructions["many"]["UTMALDG"] > 0
    assert instructions["gated many"]["UTMALDG"] > 0
    assert instructions["gated"]["LDGSTS"] > 0
