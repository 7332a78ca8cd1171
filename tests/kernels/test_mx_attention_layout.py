"""What MXFP8 attention refuses at every entry, what it says of itself, and its references against torch's attention."""

from dataclasses import replace

import pytest
import torch

from slackwater_kernels import dispatch
from slackwater_kernels import reference_mx_attention as reference
from slackwater_kernels.attention_layout import KvPool, NewTokens, PagedRows
from slackwater_kernels.core import LayoutError, UnsupportedError
from slackwater_kernels.gemm import Workspace
from slackwater_kernels.mx_attention import (
    DECODE,
    append_kv_mx,
    append_tokens_mx,
    decode_attention_mx,
    describe_mx_attention,
    extend_attention_mx,
    prefill_attention_mx,
    run_append_kv_mx,
    run_append_tokens_mx,
    run_decode_attention_mx,
    run_extend_attention_mx,
    run_prefill_attention_mx,
    run_quantize_tokens_mx,
)
from slackwater_kernels.mx_attention_layout import MxKvPool, MxTokens
from slackwater_kernels.numerics import from_e4m3
from slackwater_kernels.plan import attention_splits
from slackwater_kernels.reference import quantize_kv, quantize_mx
from slackwater_kernels.testing import ragged
from slackwater_kernels.testing_mx import heads_of_tokens, scattered_mx

POOL, BF16_POOL = MxKvPool.zeros(4, 2, 16, "cpu"), KvPool.zeros(4, 2, 16, "cpu")
ROWS = PagedRows(torch.zeros(3, 4, dtype=torch.int32), torch.ones(3, dtype=torch.int32), 64)
NEW = NewTokens(torch.tensor([0, 1, 2, 3], dtype=torch.int32), 1)
Q, KV, SPACE = heads_of_tokens(3, 8), heads_of_tokens(3, 2), Workspace("cpu")
TOKENS = MxTokens.empty(2, 5, "cpu")


def new_tokens(counts, **more) -> NewTokens:
    return ragged(counts, **more)[0]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        pytest.param(lambda: MxKvPool.zeros(4, 2, 24, "cpu"), "page_size must be one of", id="pages of 24"),
        pytest.param(lambda: MxKvPool.zeros(0, 2, 16, "cpu"), "has pages and heads", id="no pages"),
        pytest.param(lambda: MxKvPool.zeros(2**26, 2, 16, "meta"), "one for each layer", id="too many pages"),
        pytest.param(lambda: replace(POOL, keys=POOL.keys.view(torch.float8_e4m3fn)), "keys must be uint8", id="float"),
        pytest.param(lambda: replace(POOL, keys=BF16_POOL.keys), "keys must be uint8", id="bf16 keys"),
        pytest.param(lambda: replace(POOL, keys=POOL.keys.transpose(1, 2).contiguous()), "heads come before",
                     id="tokens before heads"),
        pytest.param(lambda: replace(POOL, values=POOL.values.transpose(1, 2).contiguous().transpose(1, 2)),
                     "row-major", id="tokens before heads by strides"),
        pytest.param(lambda: replace(POOL, values=POOL.values.transpose(2, 3).contiguous()), "values must be",
                     id="pages of values on their side"),
        pytest.param(lambda: replace(POOL, key_scales=POOL.key_scales.view(-1, 1).view(torch.uint8).view(4, 2, 16, 4)),
                     r"key_scales must be int32 \[4, 2, 16\], got uint8", id="bytes"),
        pytest.param(lambda: replace(POOL, key_scales=POOL.key_scales.transpose(0, 1).contiguous()),
                     r"int32 \[4, 2, 16\], got int32 \[2, 4, 16\]", id="words with heads before pages"),
        pytest.param(lambda: replace(POOL, key_scales=POOL.key_scales.transpose(0, 1).contiguous().transpose(0, 1)),
                     "row-major", id="words with heads before pages by strides"),
        pytest.param(lambda: replace(POOL, key_scales=POOL.key_scales.transpose(1, 2).contiguous().transpose(1, 2)),
                     "row-major", id="words of tokens before heads by strides"),
        pytest.param(lambda: replace(POOL, key_scales=POOL.key_scales.float()), "one word of four", id="fp32 words"),
        pytest.param(lambda: replace(POOL, key_scales=POOL.value_scales, value_scales=POOL.key_scales), "one word",
                     id="scales exchanged"),
        pytest.param(lambda: replace(POOL, value_scales=POOL.value_scales.to(torch.uint8)), "one scale a token",
                     id="exponents of values"),
        pytest.param(lambda: replace(POOL, value_scales=POOL.value_scales.transpose(1, 2).contiguous()),
                     r"float32 \[4, 2, 16\]", id="scales of tokens before heads"),
        pytest.param(lambda: replace(POOL, values=POOL.values.to("meta")), "the pool anew", id="two places"),
        pytest.param(lambda: replace(POOL, keys=torch.zeros(16385, dtype=torch.uint8)[1:].view(4, 2, 16, 128)),
                     "16 bytes", id="keys inside something else"),
        pytest.param(lambda: replace(TOKENS, keys=TOKENS.keys.transpose(0, 1).contiguous()), "heads come before tokens",
                     id="tokens before heads, without pages"),
        pytest.param(lambda: replace(TOKENS, key_scales=TOKENS.key_scales.T.contiguous().T), "row-major",
                     id="words by column"),
        pytest.param(lambda: replace(TOKENS, num_tokens=4), r"uint8 \[2, 4, 128\]", id="another number of tokens"),
    ],
)  # fmt: skip
def test_a_form_refuses_any_other(make, complaint):
    with pytest.raises(LayoutError, match=complaint):
        make()


PAGED = [
    pytest.param(lambda q, kv, pool, rows: (q, kv, pool.keys, rows), "an MxKvPool, got Tensor", id="keys alone"),
    pytest.param(lambda q, kv, pool, rows: (q, kv, BF16_POOL, rows), "an MxKvPool, got KvPool", id="a pool in bf16"),
    pytest.param(lambda q, kv, pool, rows: (q, kv, pool, rows.table), "PagedRows, got Tensor", id="a table alone"),
    pytest.param(lambda q, kv, pool, rows: (q.float(), kv.float(), pool, rows), "must be bfloat16", id="fp32"),
    pytest.param(lambda q, kv, pool, rows: (q.view(3, -1), kv.view(3, -1), pool, rows), "must be bfloat16", id="flat"),
    pytest.param(lambda q, kv, pool, rows: (q[..., :64].clone(), kv[..., :64].clone(), pool, rows), "must be",
                 id="heads of 64"),
    pytest.param(lambda q, kv, pool, rows: (q[:, :4], kv[:, :1], pool, rows), "row-major|must be", id="some heads"),
    pytest.param(lambda q, kv, pool, rows: (q[:, :3].clone(), kv[:, :1].clone(), pool, rows), "1 to 16 times 2|must be",
                 id="half a head"),
    pytest.param(lambda q, kv, pool, rows: (q.repeat(1, 5, 1), q, pool, rows), "1 to 16 times|must be", id="too many"),
    pytest.param(lambda q, kv, pool, rows: (q.transpose(1, 2).contiguous().transpose(1, 2),
                                            kv.transpose(1, 2).contiguous().transpose(1, 2), pool, rows), "row-major",
                 id="by strides"),
    pytest.param(lambda q, kv, pool, rows: (q.to("meta"), kv.to("meta"), pool, rows), "is on meta", id="elsewhere"),
    pytest.param(lambda q, kv, pool, rows: (torch.zeros(3073, dtype=torch.bfloat16)[1:].view(3, 8, 128),
                                            torch.zeros(769, dtype=torch.bfloat16)[1:].view(3, 2, 128), pool, rows),
                 "16 bytes", id="inside something else"),
    pytest.param(lambda q, kv, pool, rows: (q, kv, pool, replace(rows, max_length=65)), "widen the table", id="long"),
    pytest.param(lambda q, kv, pool, rows: (q, kv, MxKvPool.zeros(4, 2, 16, "meta"), rows), "the pool is on meta",
                 id="pool elsewhere"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "complaint"), PAGED)
def test_every_entry_refuses_what_it_would_have_to_cast_or_guess(call, complaint):
    q, kv, pool, rows = call(Q, KV, POOL, ROWS)
    for attend in (
        lambda: decode_attention_mx(q, pool, rows, SPACE),
        lambda: run_decode_attention_mx(None, q, pool, rows, SPACE),
        lambda: reference.decode_attention(q, pool, rows),
        lambda: extend_attention_mx(q, pool, rows, NEW),
        lambda: run_extend_attention_mx(None, q, pool, rows, NEW),
        lambda: reference.extend_attention(q, pool, rows, NEW),
        lambda: append_kv_mx(kv, kv, pool, rows),
        lambda: run_append_kv_mx(None, kv, kv, pool, rows),
        lambda: reference.append_kv_mx(kv, kv, pool, rows),
        lambda: append_tokens_mx(kv, kv, pool, rows, NEW),
        lambda: run_append_tokens_mx(None, kv, kv, pool, rows, NEW),
        lambda: reference.append_tokens_mx(kv, kv, pool, rows, NEW),
    ):
        with pytest.raises(LayoutError, match=complaint):
            attend()


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        pytest.param(lambda new: new.starts, "NewTokens, got Tensor", id="starts alone"),
        pytest.param(lambda new: new_tokens([1, 1]), r"int32 \[4\], got \[3\]", id="few rows"),
        pytest.param(lambda new: NewTokens(new.starts.to("meta"), 1), "starts are on meta", id="elsewhere"),
    ],
)
def test_other_rows_than_the_tables_are_refused(call, complaint):
    new = call(NEW)
    for attend in (
        lambda: extend_attention_mx(Q, POOL, ROWS, new),
        lambda: run_extend_attention_mx(None, Q, POOL, ROWS, new),
        lambda: reference.extend_attention(Q, POOL, ROWS, new),
        lambda: append_tokens_mx(KV, KV, POOL, ROWS, new),
        lambda: run_append_tokens_mx(None, KV, KV, POOL, ROWS, new),
        lambda: reference.append_tokens_mx(KV, KV, POOL, ROWS, new),
    ):
        with pytest.raises(LayoutError, match=complaint):
            attend()


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        pytest.param(lambda q, kv, new: (q.float(), kv, kv, new), "q must be bfloat16", id="fp32 queries"),
        pytest.param(lambda q, kv, new: (q, kv.half(), kv, new), "keys must be bfloat16", id="f16 keys"),
        pytest.param(lambda q, kv, new: (q, kv, kv[:2], new), "values must be bfloat16", id="few values"),
        pytest.param(lambda q, kv, new: (q[:2], kv, kv, new), "q must be bfloat16", id="few queries"),
        pytest.param(lambda q, kv, new: (q, kv.view(3, -1), kv, new), "keys must be bfloat16", id="flat keys"),
        pytest.param(lambda q, kv, new: (q, kv.transpose(0, 1).contiguous().transpose(0, 1), kv, new), "row-major",
                     id="heads before tokens by strides"),
        pytest.param(lambda q, kv, new: (q[:, :3].clone(), kv, kv, new), "1 to 16 times 2", id="half a head"),
        pytest.param(lambda q, kv, new: (q, kv, kv.to("meta"), new), "values is on meta", id="values elsewhere"),
        pytest.param(lambda q, kv, new: (q, kv, kv, ROWS), "NewTokens, got PagedRows", id="a table"),
    ],
)  # fmt: skip
def test_prefill_refuses_what_it_would_have_to_cast_or_guess(call, complaint):
    given = call(Q, KV, NEW)
    for attend in (prefill_attention_mx, reference.prefill_attention, lambda *x: run_prefill_attention_mx(None, *x)):
        with pytest.raises(LayoutError, match=complaint):
            attend(*given)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        pytest.param(lambda kv: (kv.float(), kv), "keys must be bfloat16", id="fp32 keys"),
        pytest.param(lambda kv: (kv, kv[:2]), r"values must be bfloat16 \[3, 2, 128\]", id="few values"),
        pytest.param(lambda kv: (kv.view(3, -1), kv), "keys must be bfloat16", id="flat keys"),
        pytest.param(lambda kv: (kv, kv.transpose(0, 1).contiguous().transpose(0, 1)), "row-major", id="by strides"),
        pytest.param(lambda kv: (kv, kv.to("meta")), "values is on meta", id="values elsewhere"),
    ],
)
def test_the_quantiser_of_tokens_refuses_what_it_would_have_to_cast_or_guess(call, complaint):
    with pytest.raises(LayoutError, match=complaint):
        run_quantize_tokens_mx(None, *call(KV))


@pytest.mark.parametrize("scale", [0.0, -0.1, float("inf"), float("nan")])
def test_a_scale_that_is_not_above_zero_is_refused(scale):
    for attend in (
        lambda: run_decode_attention_mx(None, Q, POOL, ROWS, SPACE, scale),
        lambda: run_extend_attention_mx(None, Q, POOL, ROWS, NEW, scale),
        lambda: reference.decode_attention(Q, POOL, ROWS, scale),
        lambda: reference.prefill_attention(Q, KV, KV, NEW, scale),
    ):
        with pytest.raises(LayoutError, match="scale must be above 0"):
            attend()


def test_a_workspace_elsewhere_is_refused():
    with pytest.raises(LayoutError, match="workspace on meta"):
        run_decode_attention_mx(None, Q, POOL, ROWS, Workspace("meta"))


@pytest.mark.parametrize("take", [lambda: torch.add(POOL, 1), lambda: torch.zeros(3).copy_(TOKENS)])
def test_a_pool_is_no_tensor(take):
    with pytest.raises((LayoutError, TypeError)):
        take()


@pytest.mark.parametrize("arch", ["cpu", "sm_90", "sm_103"])
def test_other_hardware_is_refused_by_name_with_what_to_use_there(monkeypatch, arch):
    monkeypatch.setattr(dispatch, "arch", lambda device: arch)

    for call, instead in (
        (lambda: append_kv_mx(KV, KV, POOL, ROWS), "append_kv_mx, or append_kv on sm_90"),
        (lambda: append_tokens_mx(KV, KV, POOL, ROWS, NEW), "append_tokens_mx, or append_tokens on sm_90"),
        (lambda: decode_attention_mx(Q, POOL, ROWS, SPACE), "decode_attention, or decode_attention on sm_90"),
        (lambda: extend_attention_mx(Q, POOL, ROWS, NEW), "extend_attention, or extend_attention on sm_90"),
        (lambda: prefill_attention_mx(Q, KV, KV, NEW), "prefill_attention, or prefill_attention on sm_90"),
    ):
        with pytest.raises(UnsupportedError, match=f"no kernel for {arch}: it runs on sm_120; use .*{instead}"):
            call()


def test_describe_says_how_tokens_are_divided_and_that_a_batch_does_not_matter():
    decoded, extended = describe_mx_attention(1024), describe_mx_attention(1024, 512)

    assert decoded["split"] == attention_splits(1024, DECODE)
    assert describe_mx_attention(4096)["sum"] == decoded["sum"]
    assert decoded["batch_invariant"] is extended["batch_invariant"] is True
    assert (extended["split"], describe_mx_attention(9999, 7)["sum"]) == (1, extended["sum"])


def test_references_equal_the_product_of_torch_over_the_stored_values():
    pool, rows = scattered_mx((45,), num_kv_heads=2, page_size=16)
    q, new = heads_of_tokens(20, 8), new_tokens([20])
    stored = reference._stored(pool, rows, 0, 45)
    mask = torch.arange(45) <= torch.arange(25, 45)[:, None]

    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.double().transpose(0, 1)[None], stored.keys[None], (stored.codes * stored.scales[..., None])[None],
        attn_mask=mask, enable_gqa=True,
    )[0].transpose(0, 1)  # fmt: skip

    assert torch.allclose(reference.extend_attention(q, pool, rows, new), wanted, rtol=1e-12)
    assert torch.allclose(reference.decode_attention(q[19:].clone(), pool, rows), wanted[19:], rtol=1e-12)
    keys, values = heads_of_tokens(20, 2, seed=1), heads_of_tokens(20, 2, seed=2)
    ours = MxKvPool.zeros(2, 2, 16, "cpu")
    paged = PagedRows(torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32), 32)
    reference.append_tokens_mx(keys, values, ours, paged, new)
    extended = reference.extend_attention(q, ours, paged, new)
    assert torch.equal(reference.prefill_attention(q, keys, values, new), extended)


def test_the_steps_of_a_kernel_stay_within_the_bound_of_what_quantising_may_move():
    pool, rows = scattered_mx((300,), num_kv_heads=2, page_size=16)
    q = heads_of_tokens(1, 8)

    exact, bound = reference.decode_bounded(q, pool, rows)

    for steps in (reference.Steps(64, 256), reference.Steps(32, 64), reference.Steps(64)):
        moved, slack = reference.decode_bounded(q, pool, rows, steps=steps)
        assert ((moved - exact).abs() <= bound).all()
        assert slack.mean() < bound.mean() / 10


def test_keys_are_stored_as_mxfp8_and_values_with_one_scale_each():
    keys, values = heads_of_tokens(5, 3, seed=1), heads_of_tokens(5, 3, seed=2)
    values[2, 1, 77] = torch.nan

    codes, words, value_codes, value_scales = reference.quantize_kv_mx(keys, values)

    mx = quantize_mx(keys.view(15, 128))
    assert torch.equal(codes.view(15, 128), mx.codes)
    low, *higher = mx.scales[7].tolist()
    assert words[2, 1].item() & 0xFFFFFFFF == low | higher[0] << 8 | higher[1] << 16 | higher[2] << 24
    is_nan = value_scales.isnan()
    assert is_nan.nonzero().tolist() == [[2, 1]]
    assert (value_codes[is_nan] == 0).all()
    stored = from_e4m3(value_codes) * value_scales[..., None]
    again, scales = quantize_kv(values)
    assert torch.equal(stored[~is_nan], (from_e4m3(again) * scales[..., None])[~is_nan])
