"""Loading and launching what was compiled ahead of time, through the CUDA driver.

Owns the C structures of a launch and the loaded kernels of a process.  No compiler, no network, no JIT: a cubin is for
one architecture, and its caller has checked that it is this one.  Called by `block`.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from slackwater_kernels.core import KernelsError, UnsupportedError

_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_DEPENDENT = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class DriverError(KernelsError):
    """The CUDA driver refused a call.  The message says which and with what."""


class _Value(ctypes.Union):
    _fields_ = (("bytes", ctypes.c_char * 64), ("number", ctypes.c_int))


class _Attribute(ctypes.Structure):
    _fields_ = (("name", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", _Value))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Kernel:
    """A kernel of which all CTAs of a launch are resident at once."""

    def __init__(self, function: ctypes.c_void_p, ctas: int, threads: int, shared_bytes: int) -> None:
        self._function = function
        self._sizes = (ctas, 1, 1), (threads, 1, 1), shared_bytes
        self._attribute = _Attribute(_DEPENDENT, b"", _Value(number=1))

    def launch(self, arguments: ctypes.Structure) -> None:
        """On torch's current stream; it may start before the kernel in front has ended."""
        stream = torch.cuda.current_stream().cuda_stream
        launch = _Launch(*self._sizes, stream, ctypes.pointer(self._attribute), 1)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _call("cuLaunchKernelEx", ctypes.byref(launch), self._function, pointers, None)


@cache
def kernel(cubin: str, name: str, ctas: int, threads: int, shared_bytes: int, device: int) -> Kernel:
    """The kernel on this device, which must be the current one.

    Raises UnsupportedError where its CTAs do not all fit on the device at once: they wait for one another.
    """
    function = ctypes.c_void_p()
    _call("cuModuleGetFunction", ctypes.byref(function), _module(cubin, device), name.encode())
    _call("cuFuncSetAttribute", function, _SHARED_BYTES, shared_bytes)
    each = ctypes.c_int()
    size = ctypes.c_size_t(shared_bytes)
    _call("cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(each), function, threads, size)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    if each.value * multiprocessors < ctas:
        raise UnsupportedError(
            f"{name} needs {ctas} multiprocessors at once and this GPU has {multiprocessors} (is it divided by MIG?); "
            "use the separate launches"
        )
    return Kernel(function, ctas, threads, shared_bytes)


@cache
def _module(cubin: str, device: int) -> ctypes.c_void_p:
    torch.cuda.current_stream(device)  # torch makes the device's context, where it has not yet
    module = ctypes.c_void_p()
    image = (Path(__file__).parent / cubin).read_bytes()
    _call("cuModuleLoadData", ctypes.byref(module), image)
    return module


@cache
def _driver() -> Callable[[str], Any]:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnsupportedError("the CUDA driver's library libcuda.so.1 is not installed here") from error
    return lambda name: getattr(library, name)


def _call(name: str, *arguments: Any) -> None:
    code = _driver()(name)(*arguments)
    if code:
        raise DriverError(f"{name} failed with the CUDA error {code}")
