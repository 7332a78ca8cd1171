"""What one voice model needs, brought into host memory: the embedded voice, or a Fish S2-Pro checkpoint folder.

Owns reading weights from files and joining what older files hold apart.  Does not own what a folder must hold
(`folder`), names and shapes (`model.shapes`, `codec.weights`) or where tensors go afterwards.  Called by the server
at start-up.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open

from slackwater_inference.codec.weights import load_codec, seeded_codec_weights
from slackwater_inference.config import ModelConfig, tiny
from slackwater_inference.folder import BadCheckpoint, CheckpointFolder, inspect
from slackwater_inference.model.eight_bit import (
    Canonical,
    Handle,
    canonical,
    joined,
    prepared,
    runs_on,
    value_fault,
    widened,
)
from slackwater_inference.model.scales import scale_name, stored_in_8_bits
from slackwater_inference.model.shapes import stored_names, weight_shapes
from slackwater_inference.model.weights import Weights, seeded_weights
from slackwater_inference.text.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer
from slackwater_kernels.core import CanaryError, LayoutError

__all__ = ["BadCheckpoint", "Loaded", "embedded", "load"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A voice model in host memory.  source: where it came from, as `tts_model_load_seconds` calls it.

    handles: the weights that are not among `weights`, because they lie on the model's device as its kernels take them.
    """

    config: ModelConfig
    weights: Weights
    codec_weights: Weights
    tokenizer: Tokenizer
    source: Literal["memory", "folder"]
    handles: Mapping[str, Handle] = field(default_factory=dict)


def embedded(seed: int) -> Loaded:
    """The `tiny` voice with weights that depend on `seed` only."""
    model = tiny()
    return Loaded(
        config=model,
        weights=seeded_weights(model, seed),
        codec_weights=seeded_codec_weights(model.codec, model.num_codebooks, model.num_semantic, seed),
        tokenizer=ByteTokenizer(),
        source="memory",
    )


def load(folder: Path, device: torch.device | str = "cpu") -> Loaded:
    """A Fish S2-Pro checkpoint folder: config.json, safetensors weights, tokenizer.json, codec.

    The weights are mapped, not copied: their pages come from the files when they are first used, and the system may
    drop them again.  Projections in 8 bits become handles where `device`, on which the model is to run, has a kernel
    for them, each proven there by a product of its own; elsewhere they are widened to the other weights' type, which
    takes its memory and says so.
    Raises BadCheckpoint, first with every fault that headers show, then with those of the contents.
    """
    found = inspect(folder)
    weights, handles = _read_weights(found, torch.device(device))
    tokenizer, faults = _tokenizer(found)
    codec_weights, more_faults = _codec(found)
    if tokenizer is None or codec_weights is None:
        raise BadCheckpoint(folder, faults + more_faults)
    tensors = len(weights) + len(handles)
    logger.info("loaded folder=%s dtype=%s tensors=%d", folder, found.config.weight_dtype, tensors)
    return Loaded(found.config, weights, codec_weights, tokenizer, "folder", handles)


def _tokenizer(found: CheckpointFolder) -> tuple[Tokenizer | None, list[str]]:
    try:
        return BpeTokenizer(found.tokenizer), []
    except ValueError as error:
        return None, [f"tokenizer.json: {error}"]


def _codec(found: CheckpointFolder) -> tuple[Weights | None, list[str]]:
    model = found.config
    try:
        return load_codec(found.codec_file, model.codec, model.num_codebooks, model.num_semantic), []
    except ValueError as error:
        return None, [f"{found.codec_file.name}: {error}"]


def _read_weights(found: CheckpointFolder, device: torch.device) -> tuple[Weights, dict[str, Handle]]:
    stored: Weights = {}
    for file in sorted({header.file for header in found.headers.values()}):
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                stored |= {name: tensors.get_tensor(name) for name, h in found.headers.items() if h.file == file}
        except (OSError, SafetensorError) as error:
            raise BadCheckpoint(found.path, [f"{file.name} cannot be read: {error}"]) from error
    model = found.config
    small = _in_8_bits(found, stored)
    weights: Weights = {}
    handles: dict[str, Handle] = {}
    num_widened = 0
    for name in weight_shapes(model.text_config, model.audio_decoder_config, model.num_codebooks):
        names = stored_names(name, found.headers)
        parts = [small.pop(part, None) for part in names]
        handle = _handle(found, name, parts, device)
        if handle is not None:
            handles[name] = handle
            continue
        num_widened += any(parts)
        dtype = getattr(torch, model.weight_dtype)
        tensors = [widened(part, dtype) if part else stored.pop(n) for n, part in zip(names, parts, strict=True)]
        weights[name] = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    if num_widened and found.quantization is not None:
        logger.warning(
            "widened tensors=%d from=%s to=%s: no kernel multiplies them in 8 bits on %s",
            num_widened,
            found.quantization.format,
            model.weight_dtype,
            device,
        )
    return weights, handles


def _in_8_bits(found: CheckpointFolder, stored: Weights) -> dict[str, Canonical]:
    """The projections that `stored` holds as codes and scales, taken out of it and judged by their numbers."""
    if found.quantization is None:
        return {}
    small: dict[str, Canonical] = {}
    faults = []
    for name in sorted(stored_in_8_bits(found.headers)):
        try:
            small[name] = canonical(stored.pop(name), stored.pop(scale_name(name)), found.quantization)
        except LayoutError as error:
            faults.append(f"{name}: {error}")
            continue
        if (fault := value_fault(small[name])) is not None:
            faults.append(f"{name} {fault}")
    if faults:
        raise BadCheckpoint(found.path, faults)
    return small


def _handle(found: CheckpointFolder, name: str, parts: list[Canonical | None], device: torch.device) -> Handle | None:
    """The weight as its kernel on `device` takes it, or None where there is none."""
    there = [part for part in parts if part is not None]
    if found.quantization is None or len(there) < len(parts) or not runs_on(device, found.quantization.format):
        return None
    whole = joined(there)
    if whole is None:
        return None
    try:
        return prepared(whole, device)
    except CanaryError as error:
        raise BadCheckpoint(found.path, [f"{name}: {error}"]) from error
