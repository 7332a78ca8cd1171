"""The Triton kernels under Triton's interpreter, with its casts set right."""

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from slackwater_kernels.numerics import from_e4m3, to_e4m3

SOURCES = "slackwater_kernels.triton_source"


def is_ours_to_reload(name: str) -> bool:
    """Triton's Python modules and our sources; its compiled library can be loaded only once."""
    return name == SOURCES or (name.partition(".")[0] == "triton" and not name.startswith("triton._C"))


@pytest.fixture(scope="package")
def interpreted() -> Iterator[ModuleType]:
    """`slackwater_kernels.triton_source`, run by NumPy on CPU tensors.

    Triton decides when it is imported whether it interprets, and torch imports it on its own occasions; so it is
    imported a second time here, and what was there is put back afterwards.
    """
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed here")
    before = {name: module for name, module in sys.modules.items() if is_ours_to_reload(name)}
    for name in before:
        del sys.modules[name]
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_INTERPRET", "1")
    interpreter, tl = import_module("triton.runtime.interpreter"), import_module("triton.language")
    as_is = interpreter._convert_float

    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        # The interpreter's own casts drop mantissa carries, do not saturate and cut bf16 off (triton#8322).
        if target == tl.bfloat16 and source == tl.float32:
            return torch.from_numpy(np.array(data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        if target == tl.float8e4nv and source == tl.float32:
            return to_e4m3(torch.from_numpy(np.array(data))).numpy()
        if source == tl.float8e4nv:
            decoded = from_e4m3(torch.from_numpy(np.array(data).view(np.uint8)))
            return decoded.to({16: torch.float16, 32: torch.float32}[target.primitive_bitwidth]).numpy()
        return as_is(data, source, target, rounding)

    patch.setattr(interpreter, "_convert_float", convert)
    yield import_module(SOURCES)
    patch.undo()
    for name in [name for name in sys.modules if is_ours_to_reload(name)]:
        sys.modules[f"interpreted {name}"] = sys.modules.pop(name)  # where the end of the process finds it
    sys.modules.update(before)
