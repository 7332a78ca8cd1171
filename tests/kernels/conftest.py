"""The Triton kernels under Triton's interpreter, with its casts set right."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from slackwater_kernels.numerics import from_e4m3, to_e4m3

SOURCES = "slackwater_kernels.triton_source"
ALL_SOURCES = (
    SOURCES,
    "slackwater_kernels.attention_source",
    "slackwater_kernels.extend_source",
    "slackwater_kernels.fp8_attention_source",
    "slackwater_kernels.mx_attention_source",
    "slackwater_kernels.mxfp8_source",
    "slackwater_kernels.paged_source",
    "slackwater_kernels.sampling_source",
)


def is_ours_to_reload(name: str) -> bool:
    """Triton's Python modules and our sources; its compiled library can be loaded only once."""
    return name in ALL_SOURCES or (name.partition(".")[0] == "triton" and not name.startswith("triton._C"))


@pytest.fixture(scope="package")
def compiled() -> Callable[[str], Any]:
    """Runs one of the scripts here that compile, in a process of its own; returns what it has found."""

    def run(script: str) -> Any:
        # The tests with interpreted kernels may be under way in this process.
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, Path(__file__).with_name(script)]
        found = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert found.returncode == 0, found.stderr
        return json.loads(found.stdout)

    return run


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
    as_is, dot_as_is = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        # The interpreter's own casts drop mantissa carries, do not saturate, cut bf16 off and lose the lowest bits of
        # its subnormals (triton#8322).
        if source == tl.bfloat16 and target == tl.float32:
            return (np.array(data).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        if target == tl.bfloat16 and source == tl.float32:
            return torch.from_numpy(np.array(data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        if target == tl.float8e4nv and source == tl.float32:
            return to_e4m3(torch.from_numpy(np.array(data))).numpy()
        if source == tl.float8e4nv:
            decoded = from_e4m3(torch.from_numpy(np.array(data).view(np.uint8)))
            return decoded.to({16: torch.float16, 32: torch.float32}[target.primitive_bitwidth]).numpy()
        return as_is(data, source, target, rounding)

    def dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        # The interpreter keeps bf16 as its bits and would multiply those.
        operands = [
            interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
            if x.dtype.scalar == tl.bfloat16
            else x
            for x in (a, b)
        ]
        return dot_as_is(self, *operands, *more)

    patch.setattr(interpreter, "_convert_float", convert)
    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    yield import_module(SOURCES)
    patch.undo()
    for name in [name for name in sys.modules if is_ours_to_reload(name)]:
        sys.modules[f"interpreted {name}"] = sys.modules.pop(name)  # where the end of the process finds it
    sys.modules.update(before)
