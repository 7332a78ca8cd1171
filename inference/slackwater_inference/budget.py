"""How much memory a model will take, counted before anything is loaded.

Owns the arithmetic of `slackwater engine plan`.  Pure: no torch, no file.  What the code allocates is counted from
the same shapes; what only a GPU allocates is an estimate and says so.  Called by `commands.plan`.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from slackwater_inference.codec.shapes import decode_shapes, decode_state_size, encode_shapes
from slackwater_inference.config import EngineConfig, ModelConfig, TransformerConfig
from slackwater_inference.model.shapes import FAST, SLOW, Shape, weight_shapes

Dtype = Literal["float32", "bfloat16"]
_ITEM_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}
_FP32_BYTES, _COMPLEX64_BYTES = 4, 8
_NOTHING: Mapping[str, int] = {}

# Estimates of what a CUDA graph costs, to be replaced by measured ones once graphs are captured.
_LARGEST_GRAPH_BATCH = 64
_KERNELS_PER_LAYER = 12
_GRAPH_NODE_BYTES = 16 * 1024

# What stays free for the driver's context, libraries' workspaces and fragmentation.
_RESERVE_BYTES = 1024**3
MAX_SLOTS = 256  # of `EngineConfig.max_running_requests`

# A residual unit holds its input, the activated copy and a convolution's result at once.
_CODEC_COPIES = 3


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the plan.  note: how it comes about."""

    group: Literal["weights", "cache", "graphs", "codec"]
    name: str
    size_bytes: int
    note: str = ""
    is_estimate: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """What a model takes with so many slots of so many positions."""

    model: str
    dtype: Dtype
    slots: int
    length: int
    num_parameters: int  # of the two transformers; the codec has its own
    num_codec_parameters: int
    kv_bytes_per_token: int
    num_kv_blocks: int
    block_size: int
    items: tuple[Item, ...]

    @property
    def total_bytes(self) -> int:
        """Sum of all items."""
        return sum(item.size_bytes for item in self.items)


@dataclass(frozen=True, slots=True)
class Fit:
    """What a memory holds.  slots: of the plan's length, 0 if not one; kv_tokens: positions of that many slots."""

    memory_bytes: int
    reserve_bytes: int
    slots: int
    kv_tokens: int


def budget(
    model: ModelConfig, engine: EngineConfig, dtype: Dtype, bytes_in_8_bits: Mapping[str, int] = _NOTHING
) -> Budget:
    """Count everything that `engine` with `model` takes.

    bytes_in_8_bits: what the weights take that are kept as codes and scales, by name; the others are of `dtype`.
    Raises ValueError for sequences longer than the model can have.
    """
    slots, length = engine.max_running_requests, engine.longest(model)
    if engine.max_length is not None and engine.max_length > length:
        raise ValueError(f"length must be at most {length}, the model's max_seq_len, got {engine.max_length}")
    item_bytes = _ITEM_BYTES[dtype]
    slow, fast = model.text_config, model.audio_decoder_config
    shapes = weight_shapes(slow, fast, model.num_codebooks)
    kv_bytes_per_token = slow.n_layer * _kv_width(slow) * item_bytes
    num_blocks = engine.kv_blocks(model)
    codec = model.codec, model.num_codebooks, model.num_semantic
    num_decode, num_all = _count(decode_shapes(*codec)), _count(encode_shapes(*codec) | decode_shapes(*codec))
    items = (
        *_weight_items(model, shapes, item_bytes, bytes_in_8_bits),
        Item(
            "cache",
            "KV cache",
            num_blocks * engine.block_size * kv_bytes_per_token,
            f"{num_blocks} pages x {engine.block_size} positions x {kv_bytes_per_token:,} B",
        ),
        Item(
            "cache",
            "fast cache",
            slots * model.num_codebooks * fast.n_layer * _kv_width(fast) * item_bytes,
            f"{model.num_codebooks} positions a slot, anew each frame",
        ),
        Item(
            "cache",
            "attention workspace",
            num_blocks * engine.block_size * _kv_width(slow) * item_bytes,
            "one layer's context, gathered from its pages",
        ),
        _graphs(model, slots, item_bytes),
        Item("codec", "decoder weights", num_decode * _FP32_BYTES, "fp32"),
        Item("codec", "encoder weights", (num_all - num_decode) * _FP32_BYTES, "fp32; built at the first clone"),
        Item(
            "codec",
            "streaming state",
            slots * decode_state_size(model.codec) * _FP32_BYTES,
            f"{decode_state_size(model.codec) * _FP32_BYTES:,} B a stream",
        ),
        Item(
            "codec",
            "largest batch",
            engine.max_vocoder_frames * _activations_per_frame(model) * _FP32_BYTES,
            f"{engine.max_vocoder_frames} frames at the widest level x {_CODEC_COPIES}",
            is_estimate=True,
        ),
    )
    return Budget(
        model=model.name,
        dtype=dtype,
        slots=slots,
        length=length,
        num_parameters=_count(shapes),
        num_codec_parameters=num_all,
        kv_bytes_per_token=kv_bytes_per_token,
        num_kv_blocks=num_blocks,
        block_size=engine.block_size,
        items=items,
    )


def fit(
    model: ModelConfig,
    engine: EngineConfig,
    dtype: Dtype,
    memory_bytes: int,
    bytes_in_8_bits: Mapping[str, int] = _NOTHING,
) -> Fit:
    """The most slots, of as many as an engine may have, for which the whole budget stays within `memory_bytes`."""

    def takes(slots: int) -> int:
        with_slots = engine.model_copy(update={"max_running_requests": slots})
        return budget(model, with_slots, dtype, bytes_in_8_bits).total_bytes

    slots = bisect_right(range(1, MAX_SLOTS + 1), memory_bytes - _RESERVE_BYTES, key=takes)
    return Fit(memory_bytes, _RESERVE_BYTES, slots, slots * engine.longest(model))


def _weight_items(
    model: ModelConfig, shapes: dict[str, Shape], item_bytes: int, bytes_in_8_bits: Mapping[str, int]
) -> tuple[Item, ...]:
    slow, fast = model.text_config, model.audio_decoder_config
    tables = {name for name in shapes if name.endswith("embeddings.weight")}
    in_slow = {name for name in shapes if name.startswith(SLOW)} - tables
    in_fast = {name for name in shapes if name.startswith(FAST)} - tables

    def size(names: Iterable[str]) -> int:
        return sum(bytes_in_8_bits.get(name, math.prod(shapes[name]) * item_bytes) for name in names)

    def note(of: str, names: set[str]) -> str:
        small = names & bytes_in_8_bits.keys()
        return f"{of}; {len(small)} matrices in 8 bits with their scales" if small else of

    head_rows = model.num_semantic + 1
    rope = (slow.max_seq_len * slow.head_dim + fast.max_seq_len * fast.head_dim) // 2 * _COMPLEX64_BYTES
    return (
        Item("weights", "slow transformer", size(in_slow), note(f"{slow.n_layer} layers", in_slow)),
        Item("weights", "fast transformer", size(in_fast), note(f"{fast.n_layer} layers and head", in_fast)),
        Item("weights", "embeddings", size(tables), "tokens, codes, fast codes"),
        Item("weights", "cut head", head_rows * slow.dim * item_bytes, f"{head_rows} rows that can be sampled, copied"),
        Item("weights", "RoPE tables", rope, f"{slow.max_seq_len} positions"),
    )


def _graphs(model: ModelConfig, slots: int, item_bytes: int) -> Item:
    """CUDA graphs of one frame: nodes of every captured batch size, and the activations of the largest, shared."""
    slow, fast = model.text_config, model.audio_decoder_config
    largest = min(slots, _LARGEST_GRAPH_BATCH)
    num_graphs = sum(size <= largest for size in (1, 2, 4)) + largest // 8
    # Positions 0 and 1 of the fast part go in one pass.
    num_kernels = (slow.n_layer + (model.num_codebooks - 1) * fast.n_layer) * _KERNELS_PER_LAYER
    width = max(_activation_width(slow), 2 * _activation_width(fast))
    logits = (model.num_semantic + 1) * _FP32_BYTES
    size_bytes = num_graphs * num_kernels * _GRAPH_NODE_BYTES + largest * (width * item_bytes + logits)
    note = f"{num_graphs} batch sizes up to {largest}, {num_kernels} kernels each; only on a GPU"
    return Item("graphs", "CUDA graphs", size_bytes, note, is_estimate=True)


def _activation_width(config: TransformerConfig) -> int:
    """Numbers that one position of one layer holds at once: residual, normed, projections, SwiGLU."""
    return 2 * config.dim + config.n_head * config.head_dim + _kv_width(config) + 3 * config.intermediate_size


def _kv_width(config: TransformerConfig) -> int:
    """Numbers that one position leaves in one layer's cache."""
    return 2 * config.n_local_heads * config.head_dim


def _activations_per_frame(model: ModelConfig) -> int:
    """Numbers that one frame takes at the decoder's widest level."""
    codec = model.codec
    rate = math.prod(codec.downsample_factors)
    widest = rate * codec.decoder_dims[0]
    for factor, channels in zip(codec.decoder_rates, codec.decoder_dims[1:], strict=True):
        rate *= factor
        widest = max(widest, rate * channels)
    return widest * _CODEC_COPIES


def _count(shapes: dict[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
