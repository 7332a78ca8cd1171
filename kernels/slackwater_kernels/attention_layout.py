"""Where keys and values lie in pages, and which pages a row reads: the handles that attention takes.

Owns the two forms of the pool, the rows' block tables, which tokens of a flat batch are whose, and every check of what
goes with them.  Owns no arithmetic and hands out no page, which is the engine's cache.  Checks read metadata alone:
they are safe while a CUDA graph is captured.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, bfloat16, float32, int32, uint8

from slackwater_kernels.core import GROUP, KvForm, LayoutError
from slackwater_kernels.layout import _Handle, _require_aligned, require

HEAD = GROUP  # values of a head: one scale's worth, so a head of the output is a group of wo's input
PAGE_SIZES = (16, 32, 64, 128)
_MAX_SLOTS = 2**31 - 1  # tokens times heads: the kernels count them in int32
MAX_SHARERS = 16  # query heads that share a head of keys: the rows of the tensor core's least tile
_FLAT = "the new tokens of all rows, one after the other"


@dataclass(frozen=True, slots=True, eq=False)
class KvPool(_Handle):
    """Keys and values in bf16: [pages, kv heads, page size, 128] each, a head's tokens of a page side by side."""

    form: ClassVar[KvForm] = KvForm.BF16
    num_pages: int
    num_kv_heads: int
    page_size: int
    keys: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        _check_sizes(self)
        hint = "make the pool with `KvPool.zeros(...)`; heads come before the tokens of a page"
        for name in ("keys", "values"):
            require(name, getattr(self, name), bfloat16, self._shape, hint)
        _check_storage(self)

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        return self.num_pages, self.num_kv_heads, self.page_size, HEAD

    @property
    def device(self) -> torch.device:
        return self.keys.device

    @classmethod
    def zeros(cls, num_pages: int, num_kv_heads: int, page_size: int, device: torch.device | str) -> "KvPool":
        """A pool of zeros."""
        shape = num_pages, num_kv_heads, page_size, HEAD
        keys, values = (torch.zeros(shape, dtype=bfloat16, device=device) for _ in range(2))
        return cls(num_pages, num_kv_heads, page_size, keys, values)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8KvPool(_Handle):
    """Keys and values in FP8 with one fp32 scale a token and head; the values are turned in their pages.

    keys: uint8 [pages, kv heads, page size, 128], E4M3 by bits, a head's tokens of a page side by side.   values: uint8
    [pages, kv heads, 128 * page size]: of a head all tokens of a page side by side, for one of the 128 numbers after
    another.  The product with keys sums over the 128, that with values over tokens, and Hopper's FP8 tensor cores sum
    over what lies side by side: so they read both as they lie.   key_scales, value_scales: fp32 [pages, kv heads,
    page size]; a number is code times scale.

    A token with a NaN among its keys or values has the scale NaN there.  Of keys its codes are NaN too; of values they
    are 0: no code of a value is NaN, also in slots that no token has, since a weight of 0 would not hide it.
    """

    form: ClassVar[KvForm] = KvForm.FP8
    num_pages: int
    num_kv_heads: int
    page_size: int
    keys: Tensor
    key_scales: Tensor
    values: Tensor
    value_scales: Tensor

    def __post_init__(self) -> None:
        _check_sizes(self)
        hint = "make the pool with `Fp8KvPool.zeros(...)`; heads come before tokens, and values are turned"
        shape = self.num_pages, self.num_kv_heads, self.page_size
        require("keys", self.keys, uint8, (*shape, HEAD), hint)
        require("values", self.values, uint8, (*shape[:2], HEAD * self.page_size), hint)
        for name in ("key_scales", "value_scales"):
            require(name, getattr(self, name), float32, shape, hint)
        _check_storage(self)

    @property
    def device(self) -> torch.device:
        return self.keys.device

    @property
    def turned(self) -> Tensor:
        """The values as [pages, kv heads, 128, page size]."""
        return self.values.view(self.num_pages, self.num_kv_heads, HEAD, self.page_size)

    @classmethod
    def zeros(cls, num_pages: int, num_kv_heads: int, page_size: int, device: torch.device | str) -> "Fp8KvPool":
        """A pool of zeros."""
        shape = num_pages, num_kv_heads, page_size
        keys = torch.zeros(*shape, HEAD, dtype=uint8, device=device)
        values = torch.zeros(*shape[:2], HEAD * page_size, dtype=uint8, device=device)
        key_scales, value_scales = (torch.zeros(shape, dtype=float32, device=device) for _ in range(2))
        return cls(num_pages, num_kv_heads, page_size, keys, key_scales, values, value_scales)


Pool = KvPool | Fp8KvPool
"""What queries attend to, and what tokens are put into."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedRows:
    """Which pages the rows of a batch read, and how many of their tokens count.

    table: int32 [B, width], a row's pages in order; entries behind its last token's page are not read.   lengths: int32
    [B], on the device and read there alone, with the token of this step; 0 is an idle row.   max_length: what no length
    exceeds; the launch follows from it, so a CUDA graph holds for every length up to it.
    """

    table: Tensor
    lengths: Tensor
    max_length: int

    def __post_init__(self) -> None:
        if self.table.dim() != 2 or 0 in self.table.shape:
            raise LayoutError(
                f"table must be int32 [B, width], got {self.table.dtype} {list(self.table.shape)}; one row of pages a "
                "sequence"
            )
        rows, width = self.table.shape
        require("table", self.table, int32, (rows, width), "page numbers are int32; cast the table where it is kept")
        require("lengths", self.lengths, int32, (rows,), "one length for each row of the table")
        if self.table.device != self.lengths.device:
            raise LayoutError(
                f"table is on {self.table.device} but lengths on {self.lengths.device}; keep them together"
            )
        if self.max_length < 1:
            raise LayoutError(f"max_length must be 1 or more, got {self.max_length}")

    @property
    def num_rows(self) -> int:
        return self.table.shape[0]

    @property
    def width(self) -> int:
        return self.table.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class NewTokens:
    """Which tokens of a flat batch are whose: starts[b] to starts[b + 1] are row b's, in order, and its last ones.

    starts: int32 [B + 1], on the device and read there alone; none is less than the one before.  Tokens in front of
    starts[0] and from starts[B] on are nobody's, as the padding of a captured graph is.  A row is wrong, and no other
    is, if its tokens end before they begin, do not lie inside the batch or are more than `max_new`.  A start that falls
    back makes its row wrong and counts as the highest before it, so that no token is two rows'.   max_new: what no row
    has more of, so a CUDA graph holds for every count up to it.
    """

    starts: Tensor
    max_new: int

    def __post_init__(self) -> None:
        if self.starts.dim() != 1 or self.starts.numel() < 2:
            raise LayoutError(
                f"starts must be int32 [B + 1], got {self.starts.dtype} {list(self.starts.shape)}; one more than rows"
            )
        require("starts", self.starts, int32, tuple(self.starts.shape), "token numbers are int32; cast them once")
        if self.max_new < 1:
            raise LayoutError(f"max_new must be 1 or more, got {self.max_new}")

    @property
    def num_rows(self) -> int:
        return self.starts.numel() - 1


def scales_of(pool: Pool) -> tuple[Tensor, Tensor]:
    """A pool's scales; of bf16, where kernels read none, what stands in their place."""
    return (pool.keys, pool.values) if isinstance(pool, KvPool) else (pool.key_scales, pool.value_scales)


def check_decode(q: Tensor, pool: Pool, rows: PagedRows) -> int:
    """Raise LayoutError unless these fit each other; how many query heads share a head of keys."""
    _check_paged(pool, rows)
    sharers = _sharers(q, rows.num_rows, pool.num_kv_heads, "one query a row")
    _check_operand("q", q, rows.num_rows, q.shape[1], rows.table, "one token a row")
    return sharers


def check_append(keys: Tensor, values: Tensor, pool: Pool, rows: PagedRows) -> None:
    """Raise LayoutError unless these fit each other."""
    _check_paged(pool, rows)
    for name, tensor in (("keys", keys), ("values", values)):
        _check_operand(name, tensor, rows.num_rows, pool.num_kv_heads, rows.table, "one token a row")


def check_extend(q: Tensor, pool: Pool, rows: PagedRows, new: NewTokens, scale: float | None) -> int:
    """Raise LayoutError unless these fit each other; how many query heads share a head of keys."""
    _check_paged(pool, rows)
    _check_new(new, rows)
    positive_scale(scale)
    sharers = _sharers(q, _num_tokens(q), pool.num_kv_heads, _FLAT)
    _check_operand("q", q, _num_tokens(q), q.shape[1], rows.table, _FLAT)
    return sharers


def check_append_tokens(keys: Tensor, values: Tensor, pool: Pool, rows: PagedRows, new: NewTokens) -> None:
    """Raise LayoutError unless these fit each other."""
    _check_paged(pool, rows)
    _check_new(new, rows)
    for name, tensor in (("keys", keys), ("values", values)):
        _check_operand(name, tensor, _num_tokens(keys), pool.num_kv_heads, rows.table, _FLAT)


def check_prefill(q: Tensor, keys: Tensor, values: Tensor, new: NewTokens, scale: float | None = None) -> int:
    """Raise LayoutError unless these fit each other; how many query heads share a head of keys."""
    _check_new(new, None)
    positive_scale(scale)
    num_kv_heads = keys.shape[1] if keys.dim() == 3 else 0
    if num_kv_heads == 0:
        raise LayoutError(f"keys must be bfloat16 [T, kv heads, {HEAD}], got {keys.dtype} {list(keys.shape)}; {_FLAT}")
    for name, tensor in (("keys", keys), ("values", values)):
        _check_operand(name, tensor, _num_tokens(keys), num_kv_heads, new.starts, _FLAT)
    sharers = _sharers(q, _num_tokens(keys), num_kv_heads, _FLAT)
    _check_operand("q", q, _num_tokens(keys), q.shape[1], new.starts, _FLAT)
    return sharers


def positive_scale(scale: float | None) -> float:
    """What logits are multiplied by: 1 / sqrt(128) if None.  Raises LayoutError unless it is above 0 and finite."""
    if scale is not None and not 0.0 < scale < math.inf:
        raise LayoutError(f"scale must be above 0 and finite, got {scale}; give q its sign where it is made")
    return HEAD**-0.5 if scale is None else scale


def _num_tokens(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 0


def _sharers(q: Tensor, num_queries: int, num_kv_heads: int, what: str) -> int:
    num_heads = q.shape[1] if q.dim() == 3 else 0
    sharers = num_heads // num_kv_heads
    if num_heads == 0 or num_heads % num_kv_heads or sharers > MAX_SHARERS:
        raise LayoutError(
            f"q must be bfloat16 [{num_queries}, heads, {HEAD}] with 1 to {MAX_SHARERS} times {num_kv_heads} "
            f"heads, got {q.dtype} {list(q.shape)}; {what}, keys are not expanded"
        )
    return sharers


def _check_operand(name: str, tensor: Tensor, count: int, num_heads: int, beside: Tensor, what: str) -> None:
    """Of `count` tokens and so many heads, on the device of `beside`."""
    hint = f"{what}; make it contiguous in bf16 where it is produced"
    require(name, tensor, bfloat16, (count, num_heads, HEAD), hint)
    if tensor.device != beside.device:
        raise LayoutError(
            f"{name} is on {tensor.device} but the rows' tables and starts on {beside.device}; keep all on one device"
        )
    if not tensor.is_meta and tensor.data_ptr() % 16:
        raise LayoutError(f"{name} must start at a multiple of 16 bytes; was it sliced? clone it")
    if count * num_heads > _MAX_SLOTS:
        raise LayoutError(f"{name} has {count} tokens of {num_heads} heads, more than {_MAX_SLOTS}; divide the batch")


def _check_new(new: NewTokens, rows: PagedRows | None) -> None:
    if not isinstance(new, NewTokens):
        raise LayoutError(f"new must be NewTokens, got {type(new).__name__}; put starts and max_new into one")
    if rows is None:
        return
    if new.num_rows != rows.num_rows:
        raise LayoutError(
            f"starts must be int32 [{rows.num_rows + 1}], got [{new.num_rows + 1}]; one more than the table has rows"
        )
    if new.starts.device != rows.table.device:
        raise LayoutError(
            f"starts are on {new.starts.device} but the table on {rows.table.device}; keep all on one device"
        )


def _check_paged(pool: Pool, rows: PagedRows) -> None:
    if not isinstance(pool, Pool):
        raise LayoutError(f"pool must be a KvPool or an Fp8KvPool, got {type(pool).__name__}; make it with `zeros`")
    if not isinstance(rows, PagedRows):
        raise LayoutError(f"rows must be PagedRows, got {type(rows).__name__}; put table and lengths into one")
    if rows.max_length > rows.width * pool.page_size:
        raise LayoutError(
            f"max_length is {rows.max_length}, but {rows.width} pages of {pool.page_size} tokens a row hold "
            f"{rows.width * pool.page_size}; widen the table"
        )
    if pool.device != rows.table.device:
        raise LayoutError(f"the pool is on {pool.device} but the table on {rows.table.device}; keep all on one device")


def _check_sizes(pool: Any) -> None:
    if pool.page_size not in PAGE_SIZES:
        raise LayoutError(f"page_size must be one of {PAGE_SIZES}, got {pool.page_size}")
    if pool.num_pages < 1 or pool.num_kv_heads < 1:
        raise LayoutError(f"a pool has pages and heads, got {pool.num_pages} and {pool.num_kv_heads}")
    if pool.num_pages * pool.num_kv_heads * pool.page_size > _MAX_SLOTS:
        raise LayoutError(f"a pool has at most {_MAX_SLOTS} slots, got {pool.num_pages} pages; make one for each layer")


def _check_storage(pool: Any) -> None:
    for field in fields(pool):
        tensor = getattr(pool, field.name)
        if isinstance(tensor, Tensor) and tensor.device != pool.keys.device:
            raise LayoutError(f"keys are on {pool.keys.device} but {field.name} on {tensor.device}; make the pool anew")
    _require_aligned(pool)
