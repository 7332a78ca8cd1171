"""What attention of one query a row refuses, at every entry, and what it says then."""

from dataclasses import replace

import pytest
import torch

from slackwater_kernels import reference
from slackwater_kernels.attention import (
    append_kv,
    decode_attention,
    decode_attention_quantize,
    run_append_kv,
    run_decode_attention,
    run_decode_attention_quantize,
)
from slackwater_kernels.attention_layout import Fp8KvPool, KvPool, PagedRows
from slackwater_kernels.core import LayoutError, UnsupportedError
from slackwater_kernels.gemm import Workspace

POOL, FP8 = KvPool.zeros(4, 2, 16, "cpu"), Fp8KvPool.zeros(4, 2, 16, "cpu")
TABLE, LENGTHS = torch.zeros(3, 4, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
ROWS = PagedRows(TABLE, LENGTHS, 64)
Q, KV, SPACE = torch.ones(3, 8, 128).bfloat16(), torch.ones(3, 2, 128).bfloat16(), Workspace("cpu")


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        pytest.param(lambda: KvPool.zeros(4, 2, 24, "cpu"), "page_size must be one of", id="pages of 24"),
        pytest.param(lambda: KvPool.zeros(0, 2, 16, "cpu"), "has pages and heads", id="no pages"),
        pytest.param(lambda: KvPool.zeros(2**26, 2, 16, "meta"), "one for each layer", id="too many pages"),
        pytest.param(
            lambda: KvPool(4, 2, 16, POOL.keys.transpose(1, 2).contiguous(), POOL.values), "heads come before",
            id="tokens before heads",
        ),
        pytest.param(
            lambda: KvPool(4, 2, 16, POOL.keys.transpose(1, 2).contiguous().transpose(1, 2), POOL.values), "row-major",
            id="tokens before heads by strides",
        ),
        pytest.param(lambda: KvPool(4, 2, 16, POOL.keys.half(), POOL.values), "keys must be bfloat16", id="f16 keys"),
        pytest.param(
            lambda: KvPool(4, 2, 16, POOL.keys, POOL.values.transpose(2, 3).contiguous()), "values must be",
            id="transposed values",
        ),
        pytest.param(lambda: KvPool(4, 2, 16, POOL.keys, POOL.values.to("meta")), "the pool anew", id="two places"),
        pytest.param(
            lambda: KvPool(4, 2, 16, torch.zeros(16385, dtype=torch.bfloat16)[1:].view(4, 2, 16, 128), POOL.values),
            "16 bytes", id="keys inside something else",
        ),
        pytest.param(lambda: replace(FP8, keys=FP8.keys.view(torch.float8_e4m3fn)), "uint8", id="float codes"),
        pytest.param(
            lambda: replace(FP8, key_scales=FP8.key_scales.transpose(1, 2)), r"float32 \[4, 2, 16\]",
            id="scales of tokens before heads",
        ),
        pytest.param(lambda: replace(FP8, value_scales=FP8.value_scales.double()), "float32", id="fp64 scales"),
        pytest.param(lambda: replace(FP8, value_scales=torch.zeros(2, 16, 4).permute(2, 0, 1)), "row-major",
                     id="scales by strides"),
        pytest.param(lambda: Fp8KvPool.zeros(4, 2, 24, "cpu"), "page_size must be one of", id="FP8 pages of 24"),
        pytest.param(lambda: replace(FP8, keys=FP8.keys.flatten(2)), "keys must be", id="turned keys"),
        pytest.param(
            lambda: replace(FP8, values=FP8.values.view(4, 2, 16, 128)), "values are turned", id="values by token"
        ),
        pytest.param(lambda: replace(FP8, values=FP8.turned), "values are turned", id="values with a page's dimension"),
        pytest.param(lambda: replace(FP8, values=FP8.values.view(4, 256, 16)), "values must be", id="heads gone"),
        pytest.param(lambda: replace(FP8, values=FP8.values.view(torch.int8)), "values must be uint8", id="signed"),
        pytest.param(
            lambda: replace(FP8, values=FP8.values.transpose(0, 1).contiguous().transpose(0, 1)), "row-major",
            id="heads before pages by strides",
        ),
        pytest.param(lambda: replace(FP8, key_scales=FP8.key_scales.to("meta")), "the pool anew", id="scales apart"),
        pytest.param(lambda: PagedRows(TABLE.long(), LENGTHS, 64), "table must be int32", id="int64 table"),
        pytest.param(lambda: PagedRows(TABLE[0], LENGTHS, 64), "one row of pages", id="a table of one dimension"),
        pytest.param(lambda: PagedRows(TABLE[:, :0], LENGTHS, 64), "one row of pages", id="a table of no width"),
        pytest.param(lambda: PagedRows(TABLE[:, :3], LENGTHS, 64), "row-major", id="a slice of a table"),
        pytest.param(lambda: PagedRows(TABLE, LENGTHS.long(), 64), "lengths must be int32", id="int64 lengths"),
        pytest.param(lambda: PagedRows(TABLE, LENGTHS[:2], 64), r"lengths must be int32 \[3\]", id="few lengths"),
        pytest.param(lambda: PagedRows(TABLE, LENGTHS.to("meta"), 64), "keep them together", id="lengths elsewhere"),
        pytest.param(lambda: PagedRows(TABLE, LENGTHS, 0), "max_length must be 1", id="no length"),
    ],
)  # fmt: skip
def test_a_form_refuses_any_other(make, complaint):
    with pytest.raises(LayoutError, match=complaint):
        make()


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        pytest.param(lambda q, pool, rows: (q, pool.keys, rows), "or an Fp8KvPool, got Tensor", id="keys alone"),
        pytest.param(lambda q, pool, rows: (q, pool, rows.table), "PagedRows, got Tensor", id="a table alone"),
        pytest.param(lambda q, pool, rows: (q.float(), pool, rows), "q must be bfloat16", id="fp32 queries"),
        pytest.param(lambda q, pool, rows: (q.view(3, -1), pool, rows), "one query a row", id="flat queries"),
        pytest.param(lambda q, pool, rows: (q[:2], pool, rows), r"\[3, 8, 128\]", id="few rows"),
        pytest.param(lambda q, pool, rows: (q[:, :3].clone(), pool, rows), "1 to 16 times 2", id="half a head"),
        pytest.param(lambda q, pool, rows: (q.repeat(1, 5, 1), pool, rows), "1 to 16 times 2", id="too many sharers"),
        pytest.param(lambda q, pool, rows: (q[:, :4], pool, rows), "row-major", id="a slice of heads"),
        pytest.param(lambda q, pool, rows: (q[..., :64].clone(), pool, rows), "q must be", id="heads of 64"),
        pytest.param(
            lambda q, pool, rows: (q.transpose(1, 2).contiguous().transpose(1, 2), pool, rows), "row-major",
            id="queries by strides",
        ),
        pytest.param(lambda q, pool, rows: (q.to("meta"), pool, rows), "q is on meta", id="queries elsewhere"),
        pytest.param(
            lambda q, pool, rows: (torch.zeros(3073, dtype=torch.bfloat16)[1:].view(3, 8, 128), pool, rows), "16 bytes",
            id="queries inside something else",
        ),
        pytest.param(lambda q, pool, rows: (q, pool, replace(rows, max_length=65)), "widen the table", id="too long"),
        pytest.param(
            lambda q, pool, rows: (q, KvPool.zeros(4, 2, 16, "meta"), rows), "the pool is on meta", id="elsewhere"
        ),
    ],
)  # fmt: skip
def test_attention_refuses_what_it_would_have_to_cast_or_guess(call, complaint):
    for pool in (POOL, FP8):
        q, other, rows = call(Q, pool, ROWS)
        for attend in (
            lambda: decode_attention(q, other, rows, SPACE),  # noqa: B023 - called in this turn of the loop
            lambda: decode_attention_quantize(q, other, rows, SPACE),  # noqa: B023
            lambda: run_decode_attention(None, q, other, rows, SPACE),  # noqa: B023
            lambda: run_decode_attention_quantize(None, q, other, rows, SPACE),  # noqa: B023
            lambda: reference.decode_attention(q, other, rows),  # noqa: B023
        ):
            with pytest.raises(LayoutError, match=complaint):
                attend()


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        pytest.param(lambda kv: (kv.float(), kv), "keys must be bfloat16", id="fp32 keys"),
        pytest.param(lambda kv: (kv, kv.half()), "values must be bfloat16", id="f16 values"),
        pytest.param(lambda kv: (kv, kv[:2]), r"values must be bfloat16 \[3, 2, 128\]", id="few rows"),
        pytest.param(lambda kv: (Q, kv), r"keys must be bfloat16 \[3, 2, 128\]", id="expanded keys"),
        pytest.param(lambda kv: (kv.transpose(0, 1).contiguous().transpose(0, 1), kv), "row-major", id="by strides"),
        pytest.param(lambda kv: (kv, kv.to("meta")), "values is on meta", id="values elsewhere"),
        pytest.param(lambda kv: (kv[:, None], kv), "keys must be", id="a token's dimension"),
    ],
)
def test_append_refuses_what_it_would_have_to_cast_or_guess(call, complaint):
    for append in (append_kv, reference.append_kv, lambda *given: run_append_kv(None, *given)):
        with pytest.raises(LayoutError, match=complaint):
            append(*call(KV), POOL, ROWS)


def test_a_workspace_elsewhere_is_refused():
    with pytest.raises(LayoutError, match="workspace on meta"):
        run_decode_attention(None, Q, FP8, ROWS, Workspace("meta"))


@pytest.mark.parametrize(
    "take", [lambda: torch.add(POOL, 1), lambda: torch.zeros(3).copy_(FP8), lambda: torch.cat((FP8, FP8))]
)
def test_a_pool_is_no_tensor(take):
    with pytest.raises((LayoutError, TypeError)):
        take()


def test_a_cpu_is_refused_by_name_with_the_alternative():
    for call, instead in (
        (lambda: decode_attention(Q, POOL, ROWS, SPACE), "reference.decode_attention, or torch.*enable_gqa"),
        (lambda: decode_attention_quantize(Q, FP8, ROWS, SPACE), "reference.decode_attention and quantize_activations"),
        (lambda: append_kv(KV, KV, FP8, ROWS), "reference.append_kv"),
    ):
        with pytest.raises(UnsupportedError, match=f"no kernel for cpu: it runs on sm_90; use .*{instead}"):
            call()
