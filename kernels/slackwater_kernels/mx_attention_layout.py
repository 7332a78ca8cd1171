"""Where MXFP8 keys and values lie, in pages or one after the other: the handles that Blackwell's attention takes.

Owns the two forms and every check of what goes with them.  Owns no arithmetic and hands out no page.  Checks read
metadata alone: they are safe while a CUDA graph is captured.

Keys have an exponent per 32 values of a head, the four of a token in one word: what the product with the queries sums
over lies in one head.  The product with the weights sums over tokens, so exponents per 32 of those would change with
each token that comes.  A token's values have one scale instead, which goes into its weight before the weights are
quantised: exact, and nothing is ever quantised anew.  It is fp32, as in `Fp8KvPool`: a block's scales come ahead in
copies of 4 bytes, and an exponent of 1 byte could not.  A token's 128 values lie side by side, as its keys do, though
the instruction wants tokens side by side: pairs of values are turned on the way from shared memory, one more
instruction for each that multiplies.  With pages on their side appending a token would write single bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, float32, int32, uint8

from slackwater_kernels.attention_layout import (
    _FLAT,
    HEAD,
    NewTokens,
    PagedRows,
    _check_new,
    _check_operand,
    _check_sizes,
    _check_storage,
    _num_tokens,
    _sharers,
)
from slackwater_kernels.core import LayoutError
from slackwater_kernels.layout import _Handle, require


@dataclass(frozen=True, slots=True, eq=False)
class MxKvPool(_Handle):
    """Keys in MXFP8 and values in FP8 with one scale a token and head, in pages.

    keys, values: uint8 [pages, kv heads, page size, 128], E4M3 by bits.   key_scales: int32 [pages, kv heads, page
    size], the E8M0 bytes of a token's four blocks of 32, lowest byte first.   value_scales: fp32 [pages, kv heads,
    page size]; a value is code times scale.  A token with a NaN among its values has the scale NaN and codes 0, so that
    a weight of 0 makes nothing NaN.
    """

    num_pages: int
    num_kv_heads: int
    page_size: int
    keys: Tensor
    key_scales: Tensor
    values: Tensor
    value_scales: Tensor

    def __post_init__(self) -> None:
        _check_sizes(self)
        shape = self.num_pages, self.num_kv_heads, self.page_size
        _check_parts(self, shape, "make the pool with `MxKvPool.zeros(...)`; heads come before the tokens of a page")

    @property
    def device(self) -> torch.device:
        return self.keys.device

    @classmethod
    def zeros(cls, num_pages: int, num_kv_heads: int, page_size: int, device: torch.device | str) -> "MxKvPool":
        """A pool of zeros."""
        shape = num_pages, num_kv_heads, page_size
        keys, values = (torch.zeros(*shape, HEAD, dtype=uint8, device=device) for _ in range(2))
        key_scales = torch.zeros(shape, dtype=int32, device=device)
        return cls(*shape, keys, key_scales, values, torch.zeros(shape, dtype=float32, device=device))


@dataclass(frozen=True, slots=True, eq=False)
class MxTokens(_Handle):
    """Keys and values of a flat batch in the same form, a head's tokens one after the other.

    keys, values: uint8 [kv heads, tokens, 128].   key_scales: int32 [kv heads, tokens].   value_scales: fp32 [kv heads,
    tokens].   Made by the quantiser alone.
    """

    num_kv_heads: int
    num_tokens: int
    keys: Tensor
    key_scales: Tensor
    values: Tensor
    value_scales: Tensor

    def __post_init__(self) -> None:
        _check_parts(self, (self.num_kv_heads, self.num_tokens), "heads come before tokens")

    @property
    def device(self) -> torch.device:
        return self.keys.device

    @classmethod
    def empty(cls, num_kv_heads: int, num_tokens: int, device: torch.device | str) -> "MxTokens":
        """A handle whose bytes a kernel is about to write."""
        shape = num_kv_heads, num_tokens
        keys, values = (torch.empty(*shape, HEAD, dtype=uint8, device=device) for _ in range(2))
        key_scales = torch.empty(shape, dtype=int32, device=device)
        return cls(*shape, keys, key_scales, values, torch.empty(shape, dtype=float32, device=device))


def check_decode_mx(q: Tensor, pool: MxKvPool, rows: PagedRows) -> int:
    """Raise LayoutError unless these fit each other; how many query heads share a head of keys."""
    _check_paged(pool, rows)
    return _check_queries(q, pool, rows, rows.num_rows, "one query a row")


def check_append_mx(keys: Tensor, values: Tensor, pool: MxKvPool, rows: PagedRows) -> None:
    """Raise LayoutError unless these fit each other."""
    _check_paged(pool, rows)
    for name, tensor in (("keys", keys), ("values", values)):
        _check_operand(name, tensor, rows.num_rows, pool.num_kv_heads, rows.table, "one token a row")


def check_append_tokens_mx(keys: Tensor, values: Tensor, pool: MxKvPool, rows: PagedRows, new: NewTokens) -> None:
    """Raise LayoutError unless these fit each other."""
    _check_paged(pool, rows)
    _check_new(new, rows)
    for name, tensor in (("keys", keys), ("values", values)):
        _check_operand(name, tensor, _num_tokens(keys), pool.num_kv_heads, rows.table, _FLAT)


def check_extend_mx(q: Tensor, pool: MxKvPool, rows: PagedRows, new: NewTokens) -> int:
    """Raise LayoutError unless these fit each other; how many query heads share a head of keys."""
    _check_paged(pool, rows)
    _check_new(new, rows)
    return _check_queries(q, pool, rows, _num_tokens(q), _FLAT)


def check_tokens_mx(keys: Tensor, values: Tensor) -> None:
    """Raise LayoutError unless these are keys and values of one flat batch."""
    num_kv_heads = keys.shape[1] if keys.dim() == 3 else 0
    if num_kv_heads == 0:
        raise LayoutError(f"keys must be bfloat16 [T, kv heads, {HEAD}], got {keys.dtype} {list(keys.shape)}; {_FLAT}")
    for name, tensor in (("keys", keys), ("values", values)):
        _check_operand(name, tensor, _num_tokens(keys), num_kv_heads, keys, _FLAT)


def _check_queries(q: Tensor, pool: MxKvPool, rows: PagedRows, count: int, what: str) -> int:
    sharers = _sharers(q, count, pool.num_kv_heads, what)
    _check_operand("q", q, count, q.shape[1], rows.table, what)
    return sharers


def _check_paged(pool: MxKvPool, rows: PagedRows) -> None:
    if not isinstance(pool, MxKvPool):
        raise LayoutError(f"pool must be an MxKvPool, got {type(pool).__name__}; make it with `zeros`")
    if not isinstance(rows, PagedRows):
        raise LayoutError(f"rows must be PagedRows, got {type(rows).__name__}; put table and lengths into one")
    if rows.max_length > rows.width * pool.page_size:
        raise LayoutError(
            f"max_length is {rows.max_length}, but {rows.width} pages of {pool.page_size} tokens a row hold "
            f"{rows.width * pool.page_size}; widen the table"
        )
    if pool.device != rows.table.device:
        raise LayoutError(f"the pool is on {pool.device} but the table on {rows.table.device}; keep all on one device")


def _check_parts(handle: "MxKvPool | MxTokens", shape: tuple[int, ...], hint: str) -> None:
    for name in ("keys", "values"):
        require(name, getattr(handle, name), uint8, (*shape, HEAD), hint)
    require("key_scales", handle.key_scales, int32, shape, f"one word of four E8M0 bytes a token and head; {hint}")
    require("value_scales", handle.value_scales, float32, shape, f"one scale a token and head; {hint}")
    _check_storage(handle)
