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

from slackwater_kernels.core import KvForm, UnsupportedError
from slackwater_kernels.plan import (
    BLOCK_ROWS,
    attention_launch,
    attention_splits,
    described,
    extend_launch,
    flat_parts,
    gated_launch,
    gates_at_once,
    launch,
    sum_tree,
)

HOPPER = "sm_90"
BLACKWELL, DATA_CENTRE = "sm_120", "sm_103"
MX_ARCHS = (BLACKWELL, DATA_CENTRE)  # what has the block-scaled instructions that `tl.dot_scaled` becomes
_REFERENCE = "slackwater_kernels.reference"
_REFERENCE_MX = "slackwater_kernels.reference_mx_attention"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation's place in the matrix.  archs: where its kernel runs; instead: what to use elsewhere."""

    name: str
    archs: tuple[str, ...]
    instead: str
    triton: bool = True  # whether its kernel is compiled by Triton or was ahead of time


OPERATIONS = (
    Operation("quantize_activations", (HOPPER,), f"{_REFERENCE}.quantize_activations"),
    Operation("rmsnorm_quantize", (HOPPER,), f"{_REFERENCE}.rmsnorm and quantize_activations"),
    Operation("swiglu_quantize", (HOPPER,), f"{_REFERENCE}.swiglu and quantize_activations"),
    Operation("bsgemm", (HOPPER,), f"{_REFERENCE}.bsgemm, or bf16 weights with torch.nn.functional.linear"),
    Operation("gate_up_swiglu", (HOPPER,), f"{_REFERENCE}.bsgemm and swiglu"),
    Operation("mlp_block", (HOPPER,), "mlp without a `block`, or the reference's mlp", triton=False),
    Operation("append_kv", (HOPPER,), f"{_REFERENCE}.append_kv"),
    Operation(
        "decode_attention",
        (HOPPER,),
        f"{_REFERENCE}.decode_attention, or torch.nn.functional.scaled_dot_product_attention with enable_gqa=True",
    ),
    Operation("decode_attention_quantize", (HOPPER,), f"{_REFERENCE}.decode_attention and quantize_activations"),
    Operation("append_tokens", (HOPPER,), f"{_REFERENCE}.append_tokens"),
    Operation("extend_attention", (HOPPER,), f"{_REFERENCE}.extend_attention"),
    Operation(
        "prefill_attention",
        (HOPPER,),
        f"{_REFERENCE}.prefill_attention, or torch.nn.functional.scaled_dot_product_attention of each row with "
        "is_causal=True and enable_gqa=True",
    ),
    Operation("quantize_mx", MX_ARCHS, f"{_REFERENCE}.quantize_mx, or quantize_activations on {HOPPER}"),
    Operation("rmsnorm_quantize_mx", MX_ARCHS, f"{_REFERENCE}.rmsnorm and quantize_mx"),
    Operation("swiglu_quantize_mx", MX_ARCHS, f"{_REFERENCE}.swiglu and quantize_mx"),
    Operation("mxgemm", MX_ARCHS, f"{_REFERENCE}.dequantize_mx and a bf16 product, or bsgemm on {HOPPER}"),
    Operation("append_kv_mx", (BLACKWELL,), f"{_REFERENCE_MX}.append_kv_mx, or append_kv on {HOPPER}"),
    Operation("append_tokens_mx", (BLACKWELL,), f"{_REFERENCE_MX}.append_tokens_mx, or append_tokens on {HOPPER}"),
    Operation(
        "decode_attention_mx", (BLACKWELL,), f"{_REFERENCE_MX}.decode_attention, or decode_attention on {HOPPER}"
    ),
    Operation(
        "extend_attention_mx", (BLACKWELL,), f"{_REFERENCE_MX}.extend_attention, or extend_attention on {HOPPER}"
    ),
    Operation(
        "prefill_attention_mx", (BLACKWELL,), f"{_REFERENCE_MX}.prefill_attention, or prefill_attention on {HOPPER}"
    ),
    Operation("draw", (HOPPER, *MX_ARCHS), f"{_REFERENCE}.draw"),
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
    entry = _BY_NAME[operation]
    return arch(torch.device(device)) in entry.archs and (not entry.triton or find_spec("triton") is not None)


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
    raise UnsupportedError(
        f"{operation} has no kernel for {here}: it runs on {', '.join(entry.archs)}; use {entry.instead}"
    )


@cache
def sources() -> Any:
    """The module of Triton kernels; a first call in a process imports Triton."""
    return import_module("slackwater_kernels.triton_source")


@cache
def mx_sources() -> Any:
    """The module of Triton kernels for MXFP8."""
    return import_module("slackwater_kernels.mxfp8_source")


@cache
def attention_sources() -> Any:
    """The module of the Triton kernels of attention over bf16, and of those that put tokens into pages."""
    return import_module("slackwater_kernels.attention_source")


@cache
def fp8_attention_sources() -> Any:
    """The module of attention's Triton kernel over FP8."""
    return import_module("slackwater_kernels.fp8_attention_source")


@cache
def mx_attention_sources() -> Any:
    """The module of attention's Triton kernels over MXFP8."""
    return import_module("slackwater_kernels.mx_attention_source")


@cache
def extend_sources() -> Any:
    """The module of the Triton kernels of attention with many queries a row."""
    return import_module("slackwater_kernels.extend_source")


@cache
def sampling_sources() -> Any:
    """The module of the sampler's Triton kernel."""
    return import_module("slackwater_kernels.sampling_source")


def describe(n: int, k: int, m: int, *, gated: bool = False) -> dict[str, object]:
    """What a product of [M, K] with a weight [N, K] does: form, tile, split, order of the sum.

    The order depends on (N, K) alone, so every form gives a row the same bits: there is no other, faster form.
    """
    return described(sum_tree(n, k), gated_launch(m) if gated else launch(n, k, m))


def describe_mlp(m: int, *, block: bool) -> dict[str, object]:
    """What the feed-forward block does with M rows: form, launches, order of its sums.   block: whether it has one.

    The two forms add in another order, so a row's bits are the same up to 16 rows, and the same from 17 on; they are
    the same at every M without a `block`.
    """
    if block and m <= BLOCK_ROWS:
        return {
            "form": "block",
            "launches": 1,
            "sum": "gate and up: every third of 20 blocks, three sums; down: 8 parts of K, in each every third of 19 "
            "half blocks, three sums",
            "batch_invariant": f"up to {BLOCK_ROWS} rows",
        }
    return {
        "form": "launches",
        "launches": 3 if gates_at_once(m) else 4,
        "sum": "as `describe` says of the two products",
        "batch_invariant": f"from {BLOCK_ROWS + 1} rows on" if block else True,
    }


def describe_attention(max_length: int, form: KvForm) -> dict[str, object]:
    """What attention over rows of up to `max_length` tokens does: division, order of its sums.

    The batch is no argument: with it the number of CTAs grows and nothing else.  A row's bits follow from its own
    length, query, keys and values; they are the same alone, among others and at every `max_length` that holds it.
    """
    chosen = attention_launch(form)
    return {
        "form": form.value,
        "launches": 1,
        "block": chosen.block,
        "chunk": chosen.chunk,
        "split": attention_splits(max_length, chosen),
        "warps": chosen.warps,
        "stages": chosen.stages,
        "sum": f"blocks of {chosen.block} tokens in order in chunks of {chosen.chunk}, chunks in order",
        "batch_invariant": True,
    }


def describe_extend(num_tokens: int, num_rows: int, sharers: int, *, fp8: bool) -> dict[str, object]:
    """What attention of T new tokens of B rows does: division, order of its sums, what a query's bits depend on.

    fp8: the pool's form; prefill has that of bf16.   sharers: query heads that share a head of keys.  The sizes change
    the number of CTAs and nothing else: a query's bits follow from its position and from the tokens up to it.
    """
    chosen = extend_launch(fp8=fp8)
    return {
        "form": "fp8" if fp8 else "bf16",
        "launches": 1,
        "queries": chosen.queries(sharers),
        "block": chosen.block,
        "parts": flat_parts(num_tokens, num_rows, chosen.queries(sharers)),
        "warps": chosen.warps,
        "stages": chosen.stages,
        "sum": f"blocks of {chosen.block} keys from position 0 on, in order",
        "batch_invariant": True,
        "chunk_invariant": True,
    }


def matrix() -> dict[str, dict[str, object]]:
    """Operation -> where it runs and what to use elsewhere."""
    return {entry.name: {"archs": entry.archs, "instead": entry.instead} for entry in OPERATIONS}
