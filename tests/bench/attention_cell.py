"""Attention over pages at length 1,024, beside torch's on contiguous keys and values, as `bench_kernels` measures.

One layer of S2-Pro: 32 query heads on 8 heads of keys.  Pools in rotation are in all at least four times the L2, so
keys and values come from memory.  The package's launch is what is reported; the others of the table are in the note.
"""

from collections.abc import Callable
from typing import Any

import torch
from run import Row
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slackwater_kernels import reference
from slackwater_kernels.attention import decode_attention, run_decode_attention
from slackwater_kernels.core import KvForm
from slackwater_kernels.dispatch import attention_sources, describe_attention, fp8_attention_sources
from slackwater_kernels.gemm import Workspace
from slackwater_kernels.plan import ATTENTION, AttentionLaunch
from slackwater_kernels.testing import scattered

KV_HEADS, HEADS, LENGTH, PAGE, SMALL_PAGE = 8, 32, 1024, 64, 16
# batch and form of keys and values
CELLS = (("64", "fp8"), ("64", "bf16"), ("1", "fp8"))
PEER = "torch scaled_dot_product_attention, bf16"
ERROR = 2.0**-8  # of the whole result against fp64 on the stored keys and values

Timer = Callable[[Callable[[int], Tensor], int], Any]


def cell_attention(batch: int, form: str, graph_us: Timer, timed: Timer, cold_bytes: int) -> list[dict[str, Any]]:
    """µs of each launch, of pages of 16 and of torch."""
    kv_form, fp8 = KvForm(form), form == "fp8"
    kernels = fp8_attention_sources() if fp8 else attention_sources()
    size = batch * KV_HEADS * LENGTH * 2 * (128 + 4 if fp8 else 256)
    copies = max(2, -(-cold_bytes // size))
    q, space = torch.randn(batch, HEADS, 128, device="cuda").bfloat16(), Workspace("cuda")

    def paged(page_size: int) -> list[Any]:
        more = {"num_kv_heads": KV_HEADS, "page_size": page_size, "fp8": fp8, "device": "cuda"}
        return [scattered([LENGTH] * batch, seed=i, **more) for i in range(copies)]

    pools = paged(PAGE)
    exact = reference.decode_attention(q, *pools[0])
    error = ((decode_attention(q, *pools[0], space).double() - exact).norm() / exact.norm()).item()
    assert error < ERROR, error

    def with_launch(launch: AttentionLaunch) -> Callable[[int], Tensor]:
        return lambda i: run_decode_attention(kernels, q, *pools[i], space, chosen=launch)

    first, *others = ATTENTION[kv_form]
    us = graph_us(lambda i: decode_attention(q, *pools[i], space), copies)
    tried = {text(launch): timed(with_launch(launch), copies) for launch in others}
    small = paged(SMALL_PAGE)
    small_us = timed(lambda i: decode_attention(q, *small[i], space), copies)
    contiguous = batch, KV_HEADS, LENGTH, 128
    keys = [tuple(torch.randn(contiguous, device="cuda").bfloat16() for _ in range(2)) for _ in range(copies)]
    query = q[:, :, None]  # [batch, heads, 1, 128]
    peer = timed(lambda i: scaled_dot_product_attention(query, *keys[i], enable_gqa=True), copies)
    return [
        {
            "us": us,
            "bytes": size,
            "first": text(first),
            "tried": tried,
            "small_us": small_us,
            "peer": peer,
            "error": error,
            "split": describe_attention(LENGTH, kv_form)["split"],
        }
    ]


def text(launch: AttentionLaunch) -> str:
    told = f"block {launch.block}, {launch.warps} warps, {launch.stages} stages, chunk {launch.chunk}"
    return f"{told}, {launch.registers} registers" if launch.registers else told


def attention_rows(batch: str, form: str, cell: dict[str, Any], read_tb_per_s: float) -> list[Row]:
    """The time against torch's, and for the large batch in FP8 the share of the read bandwidth that it means."""
    what = f"decode_attention_{'' if form == 'fp8' else f'{form}_'}b{batch}"
    ran = {name: us for name, us in cell["tried"].items() if isinstance(us, float)}
    failed = [f"{name} does not run: {us}" for name, us in cell["tried"].items() if not isinstance(us, float)]
    best = min(ran, key=lambda name: ran[name])
    pages = cell["small_us"] if isinstance(cell["small_us"], str) else f"{cell['small_us']:.1f}"
    told = [f"{cell['first']}, split {cell['split']}", f"best other launch: {best}: {ran[best]:.1f}"]
    told += [f"{name} {us:.1f}" for name, us in sorted(ran.items(), key=lambda item: item[1]) if name != best]
    told += [*failed, f"pages of {SMALL_PAGE}: {pages}", f"error against fp64 {cell['error']:.2%}"]
    peer = cell["peer"] if isinstance(cell["peer"], float) else None
    told += [] if peer else [f"{PEER} does not run: {cell['peer']}"]
    rows = [Row(f"{what}_us", cell["us"], "µs", PEER if peer else None, peer, "; ".join(told))]
    if (batch, form) == CELLS[0]:
        share = cell["bytes"] / cell["us"] / 1e6 / read_tb_per_s
        note = f"{cell['bytes'] / 1e6:.1f} MB of keys, values and scales; batch {batch}, length {LENGTH}, FP8"
        rows.append(Row("decode_attention_read_ratio", share, "ratio", note=note))
    return rows
