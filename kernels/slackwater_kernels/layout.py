"""Where the bytes of a quantised tensor lie: the canonical form on disk and the handles that kernels take.

Owns the two canonical forms, the in-memory layouts, the way between them and every check of a layout.  Owns no
arithmetic.  A kernel takes a handle and never a tensor, and no in-memory form has the shape of a canonical one, so
scales of a wrong layout are an error here and not a worse model.  Checks read metadata alone: they are safe while a
CUDA graph is captured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, float32, uint8

from slackwater_kernels.core import E8M0_BIAS, GROUP, MX_BLOCK, ROW_PAD, LayoutError, MxRule, padded

VERSION = 1
TILE = GROUP * GROUP


def require(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], hint: str) -> None:
    """Raise LayoutError unless the tensor is exactly this: dtype, shape and row-major strides."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise LayoutError(f"{name} must be {_text(dtype, shape)}, got {_text(tensor.dtype, tensor.shape)}; {hint}")
    if not tensor.is_contiguous():
        raise LayoutError(
            f"{name} must be row-major {_text(dtype, shape)}, got strides {tuple(tensor.stride())}; {hint}"
        )


def _text(dtype: torch.dtype, shape: tuple[int, ...] | torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def require_k(name: str, k: int, multiple: int = GROUP) -> None:
    """Raise LayoutError unless a row's length fits the groups."""
    if k <= 0 or k % multiple:
        raise LayoutError(f"{name} has K = {k}, which is no multiple of {multiple}; pad K with zeros where it is made")


def require_rows(name: str, x: Tensor) -> tuple[int, int]:
    """(M, K) of rows to quantise.  Raises LayoutError unless they are bf16 [M, K], K a multiple of the groups."""
    if x.dim() != 2:
        raise LayoutError(f"{name} must be bf16 [M, K], got {x.dtype} {list(x.shape)}; flatten what leads")
    m, k = x.shape
    require(name, x, torch.bfloat16, (m, k), "cast it to bf16 where it is produced and make it contiguous there")
    require_k(name, k)
    return m, k


def require_residual(residual: Tensor | None, shape: tuple[int, int], device: torch.device) -> None:
    """Raise LayoutError unless it can be added to a product of this shape, if there is one."""
    if residual is None:
        return
    require("residual", residual, torch.bfloat16, shape, "it is added to the product element by element")
    if residual.device != device:
        raise LayoutError(f"x is on {device} but residual on {residual.device}; keep all on one device")


class _Handle:
    """What every in-memory form refuses: being taken for a tensor."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        raise LayoutError(
            f"torch.{getattr(func, '__name__', func)} on a {cls.__name__}: its bytes lie as its kernel wants them; "
            "take `canonical()` for values that may be read"
        )


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalWeight:
    """A block-scaled FP8 weight as it stands on disk.

    codes: uint8 [N, K], E4M3 by bits, row-major.   scales: fp32 [ceil(N / 128), K / 128], row-major; the value of
    an element is code times scale.
    """

    FORMAT: ClassVar[str] = "fp8_e4m3_128x128"
    codes: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        n, k = _two_dimensions("codes", self.codes)
        require_k("a weight", k)
        require("codes", self.codes, uint8, (n, k), "view float8_e4m3fn as uint8 and keep it row-major")
        rows, columns = -(-n // GROUP), k // GROUP
        hint = f"for weight [{n}, {k}] that is one scale per 128 x 128 block; was it saved transposed?"
        require("scales", self.scales, float32, (rows, columns), hint)

    def to_tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors to save under this name; `metadata` goes beside them."""
        return {f"{name}.codes": self.codes, f"{name}.scales": self.scales}

    @classmethod
    def metadata(cls) -> dict[str, str]:
        """What the file says of its form."""
        return {"format": cls.FORMAT, "version": str(VERSION)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], name: str, metadata: Mapping[str, str]) -> "CanonicalWeight":
        """Read back what `to_tensors` and `metadata` gave; another format or version is a LayoutError."""
        _require_format(cls.metadata(), metadata)
        return cls(tensors[f"{name}.codes"], tensors[f"{name}.scales"])


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalMx:
    """An MXFP8 tensor as it stands on disk: codes uint8 [rows, K] and one E8M0 byte per 32, uint8 [rows, K / 32]."""

    FORMAT: ClassVar[str] = "mxfp8_e4m3_1x32"
    codes: Tensor
    scales: Tensor
    rule: MxRule

    def __post_init__(self) -> None:
        rows, k = _two_dimensions("codes", self.codes)
        require_k("an MXFP8 tensor", k, MX_BLOCK)
        require("codes", self.codes, uint8, (rows, k), "view float8_e4m3fn as uint8 and keep it row-major")
        hint = "one E8M0 byte per 32 values of a row; packed words go through `MxWords.canonical()`"
        require("scales", self.scales, uint8, (rows, k // MX_BLOCK), hint)

    def to_tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors to save under this name; `metadata` goes beside them."""
        return {f"{name}.codes": self.codes, f"{name}.scales": self.scales}

    def metadata(self) -> dict[str, str]:
        """What the file says of its form."""
        return {"format": self.FORMAT, "version": str(VERSION), "rule": self.rule.value}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], name: str, metadata: Mapping[str, str]) -> "CanonicalMx":
        """Read back what `to_tensors` and `metadata` gave; another format or version is a LayoutError."""
        _require_format({"format": cls.FORMAT, "version": str(VERSION)}, metadata)
        return cls(tensors[f"{name}.codes"], tensors[f"{name}.scales"], MxRule(metadata["rule"]))


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight(_Handle):
    """A block-scaled FP8 weight in the order in which a multiprocessor reads it.

    codes: uint8 [ceil(N / 128), K / 128, 128, 128], whole tiles, the last ones filled with zeros.
    scales: fp32 [ceil(N / 128) * K / 128], one a tile in the same order.   Made by `prepare` alone.
    """

    n: int
    k: int
    codes: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        tiles, blocks = -(-self.n // GROUP), self.k // GROUP
        hint = "make the handle with `Fp8Weight.prepare(canonical)`"
        require_k("a weight", self.k)
        require("codes", self.codes, uint8, (tiles, blocks, GROUP, GROUP), hint)
        require("scales", self.scales, float32, (tiles * blocks,), hint)
        _require_one_device(self)
        _require_aligned(self)

    @classmethod
    def prepare(cls, canonical: CanonicalWeight, device: torch.device | str) -> "Fp8Weight":
        """Lay a canonical weight out on a device; complete when this returns, also for kernels that start early."""
        if not isinstance(canonical, CanonicalWeight):
            raise LayoutError(f"prepare takes a CanonicalWeight, got {type(canonical).__name__}; quantise it first")
        n, k = canonical.codes.shape
        rows = padded(n, GROUP)
        codes = torch.zeros(rows, k, dtype=uint8, device=device)
        codes[:n] = canonical.codes.to(device)
        tiles = codes.view(rows // GROUP, GROUP, k // GROUP, GROUP).transpose(1, 2).contiguous()
        weight = cls(n, k, tiles, canonical.scales.to(device).reshape(-1).clone())
        if tiles.is_cuda:
            # The GEMM asks for weights before it waits for the kernel in front of it.
            torch.cuda.current_stream(tiles.device).synchronize()
        return weight

    def canonical(self) -> CanonicalWeight:
        """The same weight as it stands on disk."""
        tiles, blocks = self.codes.shape[:2]
        rows = self.codes.transpose(1, 2).reshape(tiles * GROUP, self.k)
        return CanonicalWeight(rows[: self.n].contiguous(), self.scales.view(tiles, blocks).clone())


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Activations(_Handle):
    """Activations in FP8 with one fp32 scale per 128 values of a row.

    codes: uint8 [M, K], row-major.   scales: fp32 [K / 128 * pad(M, 4)]: group by group, rows side by side; the rows
    that pad M hold 0.  Made by the quantisers alone.
    """

    m: int
    k: int
    codes: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        hint = "make the handle with `quantize_activations(x)`"
        require_k("activations", self.k)
        require("codes", self.codes, uint8, (self.m, self.k), hint)
        require("scales", self.scales, float32, (self.k // GROUP * padded(self.m, ROW_PAD),), hint)
        _require_one_device(self)
        _require_aligned(self)

    @classmethod
    def pack(cls, codes: Tensor, scales: Tensor) -> "Fp8Activations":
        """From codes uint8 [M, K] and scales fp32 [M, K / 128] in logical order, as `reference` gives them."""
        m, k = _two_dimensions("codes", codes)
        require("scales", scales, float32, (m, k // GROUP), "one scale per 128 values of a row, row-major")
        packed = torch.zeros(k // GROUP, padded(m, ROW_PAD), dtype=float32, device=scales.device)
        packed[:, :m] = scales.T
        return cls(m, k, codes, packed.reshape(-1))

    def logical(self) -> tuple[Tensor, Tensor]:
        """(codes uint8 [M, K], scales fp32 [M, K / 128])."""
        packed = self.scales.view(self.k // GROUP, padded(self.m, ROW_PAD))
        return self.codes, packed[:, : self.m].T.contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class MxWords(_Handle):
    """MXFP8 with its scales as sm_120's block-scaled instruction takes them.

    codes: uint8 [rows, K], row-major.   scales: int32 [K / 128 * pad(rows, 4)], the four E8M0 bytes of 128 values a
    word, lowest byte first, word by word along K with rows side by side.  Padding rows hold byte 127 (one), never
    255: 0 times NaN would be NaN.
    """

    rows: int
    k: int
    codes: Tensor
    scales: Tensor
    rule: MxRule

    def __post_init__(self) -> None:
        hint = "make the handle with `MxWords.prepare(canonical)`"
        require_k("an MXFP8 tensor", self.k)
        require("codes", self.codes, uint8, (self.rows, self.k), hint)
        require("scales", self.scales, torch.int32, (self.k // GROUP * padded(self.rows, ROW_PAD),), hint)
        _require_one_device(self)
        _require_aligned(self)

    @classmethod
    def prepare(cls, canonical: CanonicalMx, device: torch.device | str) -> "MxWords":
        """Pack a canonical tensor's scales into words on a device."""
        if not isinstance(canonical, CanonicalMx):
            raise LayoutError(f"prepare takes a CanonicalMx, got {type(canonical).__name__}; quantise it first")
        rows, k = canonical.codes.shape
        require_k("an MXFP8 tensor", k)
        scales = torch.full((k // GROUP, padded(rows, ROW_PAD), 4), 127, dtype=uint8, device=device)
        scales[:, :rows] = canonical.scales.to(device).view(rows, k // GROUP, 4).transpose(0, 1)
        words = scales.view(torch.int32).reshape(-1)
        return cls(rows, k, canonical.codes.to(device), words, canonical.rule)

    def canonical(self) -> CanonicalMx:
        """The same tensor as it stands on disk."""
        blocks = self.k // GROUP
        octets = self.scales.view(blocks, padded(self.rows, ROW_PAD), 1).view(uint8)  # [K / 128, pad(rows), 4]
        scales = octets[:, : self.rows].transpose(0, 1).reshape(self.rows, blocks * 4)
        return CanonicalMx(self.codes, scales.contiguous(), self.rule)


@dataclass(frozen=True, slots=True, eq=False)
class MxWeight(_Handle):
    """An MXFP8 weight in the order in which a multiprocessor reads it.

    codes: uint8 [ceil(N / 128), K / 128, 128, 128], whole tiles, the last ones filled with zeros.
    scales: int32 [ceil(N / 128) * K / 128 * 128]: tile by tile a word for each of its rows, which holds the four E8M0
    bytes of 128 values, lowest byte first; rows that fill a tile hold byte 127 (one).   Made by `prepare` alone.
    """

    n: int
    k: int
    codes: Tensor
    scales: Tensor
    rule: MxRule

    def __post_init__(self) -> None:
        tiles, blocks = -(-self.n // GROUP), self.k // GROUP
        hint = "make the handle with `MxWeight.prepare(canonical)`"
        require_k("a weight", self.k)
        require("codes", self.codes, uint8, (tiles, blocks, GROUP, GROUP), hint)
        require("scales", self.scales, torch.int32, (tiles * blocks * GROUP,), hint)
        _require_one_device(self)
        _require_aligned(self)

    @classmethod
    def prepare(cls, canonical: CanonicalMx, device: torch.device | str) -> "MxWeight":
        """Lay a canonical weight out on a device; complete when this returns, also for kernels that start early."""
        if not isinstance(canonical, CanonicalMx):
            raise LayoutError(f"prepare takes a CanonicalMx, got {type(canonical).__name__}; quantise it first")
        n, k = canonical.codes.shape
        require_k("a weight", k)
        tiles, blocks = -(-n // GROUP), k // GROUP
        rows = torch.zeros(tiles * GROUP, k, dtype=uint8, device=device)
        rows[:n] = canonical.codes.to(device)
        octets = torch.full((tiles * GROUP, blocks * 4), E8M0_BIAS, dtype=uint8, device=device)
        octets[:n] = canonical.scales.to(device)
        codes = rows.view(tiles, GROUP, blocks, GROUP).transpose(1, 2).contiguous()
        words = octets.view(tiles, GROUP, blocks, 4).transpose(1, 2).contiguous().view(torch.int32).reshape(-1)
        weight = cls(n, k, codes, words, canonical.rule)
        if codes.is_cuda:
            torch.cuda.current_stream(codes.device).synchronize()
        return weight

    def canonical(self) -> CanonicalMx:
        """The same weight as it stands on disk."""
        tiles, blocks = self.codes.shape[:2]
        rows = self.codes.transpose(1, 2).reshape(tiles * GROUP, self.k)
        octets = self.scales.view(tiles, blocks, GROUP, 1).view(uint8).transpose(1, 2).reshape(tiles * GROUP, -1)
        return CanonicalMx(rows[: self.n].contiguous(), octets[: self.n].contiguous(), self.rule)


def _two_dimensions(name: str, tensor: Tensor) -> tuple[int, int]:
    if tensor.dim() != 2:
        raise LayoutError(f"{name} must have 2 dimensions, got {_text(tensor.dtype, tensor.shape)}")
    return tensor.shape[0], tensor.shape[1]


def _require_format(wanted: Mapping[str, str], got: Mapping[str, str]) -> None:
    for key, value in wanted.items():
        if got.get(key) != value:
            raise LayoutError(f"the file's {key} must be {value!r}, got {got.get(key)!r}; quantise the model anew")


def _require_one_device(handle: Any) -> None:
    if handle.codes.device != handle.scales.device:
        raise LayoutError(f"codes are on {handle.codes.device} but scales on {handle.scales.device}; prepare them anew")


def _require_aligned(handle: Any) -> None:
    for field in fields(handle):
        tensor = getattr(handle, field.name)
        if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.data_ptr() % 16:
            raise LayoutError(f"{field.name} must start at a multiple of 16 bytes; was it sliced? clone it")
