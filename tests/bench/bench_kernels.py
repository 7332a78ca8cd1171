"""The FP8 kernels on one GPU with cold weights, beside what else a user would run, each cell a process of its own.

A CUDA graph holds several launches, each on another copy of the weights, in all at least four times the L2 (60 MB), so
every weight comes from memory as it does in a model.  A figure is the median of 3 x 50 replays over the launches of a
graph; activations stay in the cache, as behind the layer in front.  Needs a Hopper GPU; on a machine that has the tree
without git: `python tests/bench/bench_kernels.py kernels.json COMMIT`.
"""

import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from attention_cell import CELLS, attention_rows, cell_attention
from run import Row
from torch import Tensor
from torch.nn.functional import linear, pad, silu

from slackwater_kernels import reference
from slackwater_kernels.block_layout import BlockWeights
from slackwater_kernels.dispatch import describe, describe_mlp, sources
from slackwater_kernels.gemm import Workspace, bsgemm, gate_up_swiglu, run_bsgemm
from slackwater_kernels.layout import Fp8Weight
from slackwater_kernels.mlp import MlpWeights, mlp
from slackwater_kernels.plan import Launch, Take
from slackwater_kernels.quantize import quantize_activations, swiglu_quantize

SHAPES = {"wqkv": (6144, 2560), "wo": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728)}
ROWS = (1, 4, 16, 64, 128)
COLD_BYTES = 240 << 20
ERROR = 0.08  # of the block against fp64 on the unquantised inputs; codes rounded by 2.6 % on average make 6.4 %
# docs/perf of fish-scales-ops 0.2.0 on an H200: its block-FP8 and, in its run, sglang 0.5.20's DeepGEMM.
PUBLISHED = {1: (32.61, 38.50), 4: (33.14, 38.66), 16: (33.44, 35.80), 64: (36.41, 34.64), 128: (41.31, 39.01)}
PUBLISHED_M1 = {"wqkv": 6.78, "wo": 6.15, "gate_up": 17.21, "down": 12.10}
PLAIN = "plain Triton"
UNTUNED = Launch(Take.ALL, 64, 16, 4, 3, tma=False, ahead=0, early=True)

Case = Callable[[int], Tensor]


def measure() -> list[Row]:
    """All rows; each cell in a process of its own."""
    [read] = run_cell("read")
    rows = [
        Row("read_tb_per_s", read["read"], "TB/s", note="a kernel that only reads 1 GiB, which all shares refer to")
    ]
    for m in ROWS:
        [cell] = run_cell("mlp", str(m))
        rows += rows_of(f"mlp_m{m}", cell, read["read"], published(PUBLISHED[m]))
        note = "the batch-invariant form: a row has the same bits at every M"
        rows.append(Row(f"mlp_launches_m{m}_us", cell["launches"], "µs", note=note))
    for name in SHAPES:
        for cell in run_cell("product", name):
            m = int(cell["m"])
            note = f"published: fish-scales-ops {PUBLISHED_M1[name]}" if m == 1 else ""
            rows += rows_of(f"{name}_m{m}", cell, read["read"], note)
    for cell in run_cell("parts"):
        rows += [Row(f"{key}_m{int(cell['m'])}_us", value, "µs") for key, value in cell.items() if key != "m"]
    for batch, form_of_kv in CELLS:
        [cell] = run_cell("attention", batch, form_of_kv)
        rows += attention_rows(batch, form_of_kv, cell, read["read"])
    return rows


def published(figures: tuple[float, float]) -> str:
    return f"published, not measured here: fish-scales-ops {figures[0]}, sglang DeepGEMM {figures[1]}"


def rows_of(what: str, cell: dict[str, Any], read_tb_per_s: float, note: str) -> list[Row]:
    """The time against the best peer of the same run, and the share of the read bandwidth that it means."""
    peers = {name: us for name, us in cell["peers"].items() if isinstance(us, float)}
    best = min(peers, key=lambda name: peers[name])
    others = [f"{name} {us:.1f}" for name, us in sorted(peers.items(), key=lambda item: item[1]) if name != best]
    failed = [f"{name} does not run: {us}" for name, us in cell["peers"].items() if not isinstance(us, float)]
    told = "; ".join(filter(None, [", ".join(others), *failed, note, cell.get("note", "")]))
    share = cell["bytes"] / cell["us"] / 1e6 / read_tb_per_s
    return [
        Row(f"{what}_us", cell["us"], "µs", best, peers[best], told),
        Row(f"{what}_read_ratio", share, "ratio", note=f"{cell['bytes'] / 1e6:.1f} MB of weights and scales"),
    ]


def run_cell(*cell: str) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, __file__, "--cell", *cell], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"cell {' '.join(cell)} failed:\n{done.stderr[-3000:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def graph_us(case: Case, copies: int) -> float:
    """µs a launch, as this file's docstring says."""
    for i in range(copies):
        case(i)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(copies):
            case(i)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    launches = copies * max(1, 8 // copies)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [case(i % copies) for i in range(launches)]  # alive until the graph is: no two write one place
    medians = []
    for _ in range(3):
        times = []
        for _ in range(50):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / launches)
        medians.append(statistics.median(times))
    assert all(out.isfinite().all() for out in kept if out.is_floating_point())
    return statistics.median(medians)


def timed(case: Case, copies: int) -> float | str:
    """A peer's µs, or why it does not run here."""
    try:
        return graph_us(case, copies)
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result
        torch.cuda.synchronize()
        return f"{type(error).__name__} {str(error)[:120]}".splitlines()[0]


class Weights:
    """Copies of one weight in each form that something here takes."""

    def __init__(self, name: str, copies: int | None = None) -> None:
        n, k = SHAPES[name]
        self.copies = copies or max(2, -(-COLD_BYTES // (n * k)))
        generator = torch.Generator("cuda").manual_seed(n + k)
        self.bf16 = [
            (torch.randn(n, k, device="cuda", generator=generator) / k**0.5).bfloat16() for _ in range(self.copies)
        ]
        self.canonical = [reference.quantize_weight(w) for w in self.bf16]
        self.handles = [Fp8Weight.prepare(c, "cuda") for c in self.canonical]
        self.codes = [c.codes.view(torch.float8_e4m3fn).T for c in self.canonical]
        self.scales = [c.scales.T for c in self.canonical]  # K / 128 is a multiple of 4 in all shapes here
        self.bytes = n * k + self.canonical[0].scales.numel() * 4


def scaled_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """What a user writes in front of torch's block-scaled product."""
    groups = x.float().view(x.shape[0], -1, 128)
    multiplier = 448.0 / groups.abs().amax(-1, keepdim=True).clamp(min=1e-10)
    codes = (groups * multiplier).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(x.shape)
    return codes, multiplier.squeeze(-1).reciprocal().T.contiguous().T


def scaled_mm(x: tuple[Tensor, Tensor], codes: Tensor, scales: Tensor) -> Tensor:
    return torch._scaled_mm(x[0], codes, scale_a=x[1], scale_b=scales, out_dtype=torch.bfloat16)


@triton.jit
def reader(data, out, SIZE: tl.constexpr):
    values = tl.load(data + tl.program_id(0) * SIZE + tl.arange(0, SIZE))
    if tl.max(values, axis=0) < 0:
        tl.store(out, 1)


def cell_read() -> list[dict[str, Any]]:
    """TB/s of a kernel that only reads."""
    data = torch.randint(0, 1 << 30, (1 << 28,), dtype=torch.int32, device="cuda")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")

    def case(_: int) -> Tensor:
        reader[(data.numel() // 8192,)](data, out, SIZE=8192, num_warps=8)
        return out

    return [{"read": data.numel() * 4 / graph_us(case, 1) / 1e6}]


def cell_product(name: str) -> list[dict[str, Any]]:
    """One product at each number of rows."""
    n, k = SHAPES[name]
    weights = Weights(name)
    humming = humming_layers([(name, weights)])
    return [product_at(m, n, k, weights, humming[0]) for m in ROWS]


def product_at(m: int, n: int, k: int, weights: Weights, humming: Any) -> dict[str, Any]:
    workspace, x = Workspace("cuda"), torch.randn(m, k, device="cuda").bfloat16()
    quantised = quantize_activations(x)
    exact = reference.bsgemm(quantised, weights.canonical[0])
    got = bsgemm(quantised, weights.handles[0], workspace)
    assert ((got.double() - exact).norm() / exact.norm()).item() < 2.0**-8
    wide = scaled_quantize(pad(x, (0, 0, 0, -m % 4)))
    peers = {
        "torch bf16": timed(lambda i: linear(x, weights.bf16[i]), weights.copies),
        "torch scaled_mm, quantised before": timed(
            lambda i: scaled_mm(wide, weights.codes[i], weights.scales[i]), weights.copies
        ),
        PLAIN: timed(lambda i: plain(quantised, weights.handles[i], workspace), weights.copies),
        "humming W8A16": timed(lambda i: humming[i](x), weights.copies),
    }
    us = graph_us(lambda i: bsgemm(quantised, weights.handles[i], workspace), weights.copies)
    return {"m": m, "us": us, "bytes": weights.bytes, "peers": peers, "note": form(n, k, m)}


def form(n: int, k: int, m: int) -> str:
    told = describe(n, k, m)
    return f"a CTA takes {told['takes']}, split {told['split']}"


def plain(x: Any, weight: Fp8Weight, workspace: Workspace) -> Tensor:
    """Our product as one would first write it: no split, no dependent launch, one tile size."""
    return run_bsgemm(sources(), x, weight, workspace, pdl=False, chosen=UNTUNED)


def cell_mlp(m: int) -> list[dict[str, Any]]:
    """The block at one number of rows: bf16 in, bf16 out."""
    copies = 4
    gate_up, down, workspace = Weights("gate_up", copies), Weights("down", copies), Workspace("cuda")
    launches = [MlpWeights(g, d) for g, d in zip(gate_up.handles, down.handles, strict=True)]
    blocks = [
        MlpWeights(weights.gate_up, weights.down, BlockWeights.prepare(g, d, "cuda"))
        for weights, g, d in zip(launches, gate_up.canonical, down.canonical, strict=True)
    ]
    x = torch.randn(m, SHAPES["gate_up"][1], device="cuda").bfloat16()
    rows = pad(x, (0, 0, 0, -m % 4))

    def bf16(x: Tensor, up: Tensor, out: Tensor) -> Tensor:
        gate, value = linear(x, up).chunk(2, -1)
        return linear(silu(gate) * value, out)

    def scaled(x: Tensor, up: Tensor, up_scales: Tensor, out: Tensor, out_scales: Tensor) -> Tensor:
        gate, value = scaled_mm(scaled_quantize(x), up, up_scales).chunk(2, -1)
        return scaled_mm(scaled_quantize(silu(gate) * value), out, out_scales)

    def scaled_case(function: Callable[..., Tensor]) -> Case:
        return lambda i: function(rows, gate_up.codes[i], gate_up.scales[i], down.codes[i], down.scales[i])

    def plain_case(i: int) -> Tensor:
        h = swiglu_quantize(plain(quantize_activations(x), gate_up.handles[i], workspace))
        return plain(h, down.handles[i], workspace)

    def two_step(i: int) -> Tensor:
        h = swiglu_quantize(bsgemm(quantize_activations(x), gate_up.handles[i], workspace))
        return bsgemm(h, down.handles[i], workspace)

    exact = bf16(x.double(), gate_up.bf16[0].double(), down.bf16[0].double())
    error = max(
        ((mlp(x, weights, workspace).double() - exact).norm() / exact.norm()).item()
        for weights in (blocks[0], launches[0])
    )
    assert error < ERROR, error
    assert torch.equal(mlp(x, launches[0], workspace), two_step(0))
    humming = humming_layers([("gate_up", gate_up), ("down", down)])

    def humming_case(i: int) -> Tensor:
        gate, value = humming[0][i](x).chunk(2, -1)
        return humming[1][i](silu(gate) * value)

    bf16_compiled, scaled_compiled = torch.compile(bf16), torch.compile(scaled)
    peers = {
        "torch bf16": timed(lambda i: bf16(x, gate_up.bf16[i], down.bf16[i]), copies),
        "torch bf16 compiled": timed(lambda i: bf16_compiled(x, gate_up.bf16[i], down.bf16[i]), copies),
        "torch scaled_mm": timed(scaled_case(scaled), copies),
        "torch scaled_mm compiled": timed(scaled_case(scaled_compiled), copies),
        PLAIN: timed(plain_case, copies),
        "humming W8A16": timed(humming_case, copies),
    }
    us = graph_us(lambda i: mlp(x, blocks[i], workspace), copies)
    separate = graph_us(lambda i: mlp(x, launches[i], workspace), copies)
    unfused = graph_us(two_step, copies)
    told = describe_mlp(m, block=True)
    form = f"form: {told['form']}, launches: {told['launches']}"
    note = f"{form}; own kernels without SwiGLU in gate_up {unfused:.1f}; error against fp64 {error:.1%}"
    return [{"us": us, "launches": separate, "bytes": gate_up.bytes + down.bytes, "peers": peers, "note": note}]


def cell_parts() -> list[dict[str, Any]]:
    """The small operations alone; what a graph's node costs is in them."""
    gate_up = Weights("gate_up")
    return [parts_at(m, gate_up) for m in ROWS]


def parts_at(m: int, gate_up: Weights) -> dict[str, Any]:
    workspace = Workspace("cuda")
    x = torch.randn(m, 2560, device="cuda").bfloat16()
    hidden = torch.randn(m, 19456, device="cuda").bfloat16()
    quantised = quantize_activations(x)
    return {
        "m": m,
        "quantize": graph_us(lambda _: quantize_activations(x).scales, 8),
        "swiglu_quantize": graph_us(lambda _: swiglu_quantize(hidden).scales, 8),
        "gate_up_swiglu": graph_us(
            lambda i: gate_up_swiglu(quantised, gate_up.handles[i], workspace).scales, gate_up.copies
        ),
    }


def humming_layers(weights: list[tuple[str, Weights]]) -> list[Any]:
    """humming's layers for these weights, where it is installed: FP8 weights, bf16 activations."""
    try:
        from humming.layer import HummingLayer
    except ImportError as error:
        return [Absent(error)] * len(weights)
    form = {"dtype": "float8e4m3", "weight_scale_group_size": 128, "weight_scale_group_size_n": 128}
    made = []
    for name, weight in weights:
        layers = []
        try:
            for w in weight.bf16:
                n, k = SHAPES[name]
                config = form | {"weight_scale_type": "block"}
                layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=torch.bfloat16).cuda()
                layer.load_from_unquantized(w)
                layer.transform()
                layers.append(layer)
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result
            made.append(Absent(error))
            continue
        made.append(layers)
    return made


class Absent:
    """Stands for the layers of a peer that is not here: using it says why."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getitem__(self, _: int) -> Any:
        raise self.error


def record(path: Path, commit: str) -> None:
    """The result as tests/bench/run.py writes it, on a machine that has the tree without git."""
    gpu = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    document = {
        "bench": "kernels",
        "command": "make bench NAME=kernels",
        "machine": f"{platform.system()} {platform.machine()}, {len(gpu)} x {gpu[0]}",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "triton")},
        "commit": commit,
        "rows": [asdict(row) for row in measure()],
    }
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--cell":
        kind, *which = sys.argv[2:]
        if kind == "attention":
            result = cell_attention(int(which[0]), which[1], graph_us, timed, COLD_BYTES)
        else:
            run = {"read": cell_read, "parts": cell_parts, "product": cell_product}.get(kind)
            result = cell_mlp(int(which[0])) if run is None else run(*which)
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        record(Path(sys.argv[1]), sys.argv[2])
