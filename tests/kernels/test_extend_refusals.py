"""What attention of many queries a row refuses, at every entry, and what it says then."""

from dataclasses import replace

import pytest
import torch

from slackwater_kernels import reference
from slackwater_kernels.attention_layout import Fp8KvPool, KvPool, NewTokens, PagedRows
from slackwater_kernels.core import LayoutError, UnsupportedError
from slackwater_kernels.extend import (
    append_tokens,
    extend_attention,
    prefill_attention,
    run_append_tokens,
    run_extend_attention,
    run_prefill_attention,
)
from slackwater_kernels.testing import ragged

POOL, FP8 = KvPool.zeros(4, 2, 16, "cpu"), Fp8KvPool.zeros(4, 2, 16, "cpu")
ROWS = PagedRows(torch.zeros(3, 4, dtype=torch.int32), torch.full((3,), 9, dtype=torch.int32), 64)
NEW, TOKENS = ragged((3, 2, 1))
Q, KV = torch.ones(TOKENS, 8, 128).bfloat16(), torch.ones(TOKENS, 2, 128).bfloat16()


def inside(x):
    """The same values one element behind a multiple of 16 bytes."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        pytest.param(lambda: NewTokens(NEW.starts.long(), 3), "starts must be int32", id="int64 starts"),
        pytest.param(lambda: NewTokens(NEW.starts[None], 3), "one more than rows", id="starts of two dimensions"),
        pytest.param(lambda: NewTokens(NEW.starts[:1], 3), "one more than rows", id="no row"),
        pytest.param(lambda: NewTokens(NEW.starts.repeat(2)[::2], 3), "row-major", id="starts by strides"),
        pytest.param(lambda: NewTokens(NEW.starts, 0), "max_new must be 1", id="no new token"),
    ],
)
def test_new_tokens_refuse_any_other_form(make, complaint):
    with pytest.raises(LayoutError, match=complaint):
        make()


QUERIES = [
    pytest.param(lambda q: q.float(), "q must be bfloat16", id="fp32 queries"),
    pytest.param(lambda q: q.view(TOKENS, -1), "of all rows, one after the other", id="flat queries"),
    pytest.param(lambda q: q[:, :3].clone(), "1 to 16 times 2", id="half a head"),
    pytest.param(lambda q: q.repeat(1, 5, 1), "1 to 16 times 2", id="too many sharers"),
    pytest.param(lambda q: q[:, :4], "row-major", id="a slice of heads"),
    pytest.param(lambda q: q[..., :64].clone(), "q must be", id="heads of 64"),
    pytest.param(lambda q: q.transpose(0, 1).contiguous().transpose(0, 1), "row-major", id="heads before tokens"),
    pytest.param(lambda q: q.to("meta"), "q is on meta", id="queries elsewhere"),
    pytest.param(inside, "16 bytes", id="queries inside something else"),
]
PAGED = [
    pytest.param(lambda p, r, n: (p.keys, r, n), "pool must be a KvPool or an Fp8KvPool, got Tensor", id="keys alone"),
    pytest.param(lambda p, r, n: (p, r.table, n), "PagedRows, got Tensor", id="a table alone"),
    pytest.param(lambda p, r, n: (p, r, n.starts), "NewTokens, got Tensor", id="starts alone"),
    pytest.param(lambda p, r, n: (p, r, ragged((3, 3))[0]), r"starts must be int32 \[4\], got \[3\]", id="few starts"),
    pytest.param(lambda p, r, n: (p, replace(r, max_length=65), n), "widen the table", id="too long"),
    pytest.param(
        lambda p, r, n: (p, r, NewTokens(n.starts.to("meta"), 3)), "starts are on meta", id="starts elsewhere"
    ),
    pytest.param(lambda p, r, n: (KvPool.zeros(4, 2, 16, "meta"), r, n), "the pool is on meta", id="a pool elsewhere"),
]
TOKEN_KV = [
    pytest.param(lambda kv: (kv.float(), kv), "keys must be bfloat16", id="fp32 keys"),
    pytest.param(lambda kv: (kv, kv.half()), "values must be bfloat16", id="f16 values"),
    pytest.param(lambda kv: (kv, kv[:2]), r"values must be bfloat16 \[6, 2, 128\]", id="few values"),
    pytest.param(lambda kv: (kv, kv.repeat(1, 2, 1)), r"values must be bfloat16 \[6, 2, 128\]", id="expanded values"),
    pytest.param(lambda kv: (kv.transpose(0, 1).contiguous().transpose(0, 1), kv), "row-major", id="heads first"),
    pytest.param(lambda kv: (kv, kv.to("meta")), "values is on meta", id="values elsewhere"),
    pytest.param(lambda kv: (kv[:, None], kv), "keys must be", id="a token's dimension"),
    pytest.param(lambda kv: (inside(kv), kv), "keys must start at a multiple of 16 bytes", id="inside something else"),
]


def extensions():
    return (extend_attention, reference.extend_attention, lambda *given: run_extend_attention(None, *given))


def prefills():
    return (prefill_attention, reference.prefill_attention, lambda *given: run_prefill_attention(None, *given))


def appends():
    return (append_tokens, reference.append_tokens, lambda *given: run_append_tokens(None, *given))


@pytest.mark.parametrize(("change", "complaint"), QUERIES)
def test_queries_are_refused_that_would_have_to_be_cast_or_guessed(change, complaint):
    for attend in extensions():
        for pool in (POOL, FP8):
            with pytest.raises(LayoutError, match=complaint):
                attend(change(Q), pool, ROWS, NEW)
    for attend in prefills():
        with pytest.raises(LayoutError, match=complaint):
            attend(change(Q), KV, KV, NEW)


@pytest.mark.parametrize(("change", "complaint"), PAGED)
def test_pages_and_rows_are_refused_that_do_not_fit(change, complaint):
    for attend in extensions():
        with pytest.raises(LayoutError, match=complaint):
            attend(Q, *change(FP8, ROWS, NEW))
    for append in appends():
        with pytest.raises(LayoutError, match=complaint):
            append(KV, KV, *change(FP8, ROWS, NEW))


@pytest.mark.parametrize(("change", "complaint"), TOKEN_KV)
def test_keys_and_values_are_refused_that_would_have_to_be_cast_or_guessed(change, complaint):
    for append in appends():
        with pytest.raises(LayoutError, match=complaint):
            append(*change(KV), FP8, ROWS, NEW)
    for attend in prefills():
        with pytest.raises(LayoutError, match=complaint):
            attend(Q, *change(KV), NEW)


def test_prefill_refuses_starts_alone_and_another_number_of_queries():
    for attend in prefills():
        with pytest.raises(LayoutError, match="NewTokens, got Tensor"):
            attend(Q, KV, KV, NEW.starts)
        with pytest.raises(LayoutError, match=r"q must be bfloat16 \[6, 8, 128\]"):
            attend(Q[:5].clone(), KV, KV, NEW)


@pytest.mark.parametrize("scale", [0.0, -0.1, torch.inf, torch.nan])
def test_a_scale_that_would_turn_the_order_of_logits_is_refused(scale):
    for attend in extensions():
        with pytest.raises(LayoutError, match="scale must be above 0"):
            attend(Q, POOL, ROWS, NEW, scale)
    for attend in prefills():
        with pytest.raises(LayoutError, match="scale must be above 0"):
            attend(Q, KV, KV, NEW, scale)


def test_a_cpu_is_refused_by_name_with_the_alternative():
    for call, instead in (
        (lambda: append_tokens(KV, KV, POOL, ROWS, NEW), "reference.append_tokens"),
        (lambda: extend_attention(Q, POOL, ROWS, NEW), "reference.extend_attention"),
        (lambda: prefill_attention(Q, KV, KV, NEW), "reference.prefill_attention, or torch.*enable_gqa"),
    ):
        with pytest.raises(UnsupportedError, match=f"no kernel for cpu: it runs on sm_90; use .*{instead}"):
            call()
