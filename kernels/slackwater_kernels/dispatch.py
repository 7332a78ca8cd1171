"""Which architecture has which kernel, and what to use where there is none.

Owns the support matrix, the refusals and the lazy way to the Triton sources.  Nothing falls back: an operation on
hardware without its kernel raises `UnsupportedError`, which names the hardware and the alternative.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from slackwater_kernels.core import UnsupportedError
from slackwater_kernels.plan import gated_launch, launch, splits, sum_tree

HOPPER = "sm_90"
_REFERENCE = "slackwater_kernels.reference"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation's place in the matrix.  archs: where its kernel runs; instead: what to use elsewhere."""

    name: str
    archs: tuple[str, ...]
    instead: str


OPERATIONS = (
    Operation("quantize_activations", (HOPPER,), f"{_REFERENCE}.quantize_activations"),
    Operation("rmsnorm_quantize", (HOPPER,), f"{_REFERENCE}.rmsnorm and quantize_activations"),
    Operation("swiglu_quantize", (HOPPER,), f"{_REFERENCE}.swiglu and quantize_activations"),
    Operation("bsgemm", (HOPPER,), f"{_REFERENCE}.bsgemm, or bf16 weights with torch.nn.functional.linear"),
    Operation("gate_up_swiglu", (HOPPER,), f"{_REFERENCE}.bsgemm and swiglu"),
    Operation("mxfp8_gemm", (), f"{_REFERENCE}.dequantize_mx and a bf16 product"),
)
_BY_NAME = {operation.name: operation for operation in OPERATIONS}


def arch(device: torch.device) -> str:
    """`sm_90` for a Hopper GPU, `cpu` for a CPU: the name that the matrix and the errors use."""
    if device.type != "cuda":
        return device.type
    if torch.version.cuda is None:
        return "rocm"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def supported(operation: str, device: torch.device | str) -> bool:
    """Whether the operation has a kernel that can run on this device, in this environment."""
    return arch(torch.device(device)) in _BY_NAME[operation].archs and find_spec("triton") is not None


def require_supported(operation: str, tensor: Tensor) -> None:
    """Raise UnsupportedError unless the operation runs where the tensor is, and that is the current device."""
    if supported(operation, tensor.device):
        if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
            raise UnsupportedError(
                f"{operation} runs on the current device, cuda:{torch.cuda.current_device()}, and its input is on "
                f"{tensor.device}; call it inside torch.cuda.device({tensor.get_device()})"
            )
        return
    here, entry = arch(tensor.device), _BY_NAME[operation]
    if here in entry.archs:
        raise UnsupportedError(f"{operation} on {here} needs the package triton, which is not installed here")
    where = f"it runs on {', '.join(entry.archs)}" if entry.archs else "no kernel exists yet"
    raise UnsupportedError(f"{operation} has no kernel for {here}: {where}; use {entry.instead}")


@cache
def sources() -> Any:
    """The module of Triton kernels; a first call in a process imports Triton."""
    return import_module("slackwater_kernels.triton_source")


def describe(n: int, k: int, m: int, *, gated: bool = False) -> dict[str, object]:
    """What a product of [M, K] with a weight [N, K] does: form, tile, split, order of the sum.

    The order depends on (N, K) alone, so every form gives a row the same bits: there is no other, faster form.
    """
    tree = sum_tree(n, k)
    chosen = gated_launch(m) if gated else launch(n, k, m)
    return {
        "takes": chosen.take.value,
        "tile": (chosen.rows, chosen.tokens),
        "warps": chosen.warps,
        "stages": chosen.stages,
        "split": splits(tree, chosen.take),
        "sum": f"{tree.blocks} blocks in leaves of {tree.leaf}, {tree.group} leaves a group",
        "batch_invariant": True,
    }


def matrix() -> dict[str, dict[str, object]]:
    """Operation -> where it runs and what to use elsewhere."""
    return {entry.name: {"archs": entry.archs, "instead": entry.instead} for entry in OPERATIONS}
