"""What one voice model needs, brought into host memory: the embedded voice, or a Fish S2-Pro checkpoint folder.

Owns reading weights from files and joining what older files hold apart.  Does not own what a folder must hold
(`folder`), names and shapes (`model.shapes`, `codec.weights`) or where tensors go afterwards.  Called by the server
at start-up.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slackwater_inference.codec.weights import load_codec, seeded_codec_weights
from slackwater_inference.config import ModelConfig, tiny
from slackwater_inference.folder import BadCheckpoint, CheckpointFolder, inspect
from slackwater_inference.model.shapes import split_name, weight_shapes
from slackwater_inference.model.weights import Weights, seeded_weights
from slackwater_inference.text.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer

__all__ = ["BadCheckpoint", "Loaded", "embedded", "load"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A voice model in host memory.  source: where it came from, as `tts_model_load_seconds` calls it."""

    config: ModelConfig
    weights: Weights
    codec_weights: Weights
    tokenizer: Tokenizer
    source: Literal["memory", "folder"]


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


def load(folder: Path) -> Loaded:
    """A Fish S2-Pro checkpoint folder: config.json, safetensors weights, tokenizer.json, codec.

    The weights are mapped, not copied: their pages come from the files when they are first used, and the system may
    drop them again.   Raises BadCheckpoint, first with every fault that headers show, then with those of the contents.
    """
    found = inspect(folder)
    weights = _read_weights(found)
    tokenizer, faults = _tokenizer(found)
    codec_weights, more_faults = _codec(found)
    if tokenizer is None or codec_weights is None:
        raise BadCheckpoint(folder, faults + more_faults)
    logger.info("loaded folder=%s dtype=%s tensors=%d", folder, found.config.weight_dtype, len(weights))
    return Loaded(found.config, weights, codec_weights, tokenizer, "folder")


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


def _read_weights(found: CheckpointFolder) -> Weights:
    stored: Weights = {}
    for file in sorted({header.file for header in found.headers.values()}):
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                stored |= {name: tensors.get_tensor(name) for name, h in found.headers.items() if h.file == file}
        except (OSError, SafetensorError) as error:
            raise BadCheckpoint(found.path, [f"{file.name} cannot be read: {error}"]) from error
    model = found.config
    return {
        name: _take(stored, name)
        for name in weight_shapes(model.text_config, model.audio_decoder_config, model.num_codebooks)
    }


def _take(stored: Weights, name: str) -> Tensor:
    """A tensor by its S2 name, out of `stored`; one that lies there in three is joined, which copies it."""
    split = split_name(name)
    if split is None or name in stored:
        return stored.pop(name)
    return torch.cat([stored.pop(part) for part in split])
