"""What a Fish S2-Pro checkpoint folder holds, by its small files and headers alone.

Owns which files must be there, and finds every fault that shows without reading a weight: of config.json,
tokenizer.json, the index, and the names, shapes and types of all tensors.  Loads nothing and needs no torch.
Called by `checkpoint`, which then loads, and by `budget`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from slackwater_inference.config import CodecConfig, ModelConfig, TransformerConfig
from slackwater_inference.config.published import PublishedConfig, Quantization
from slackwater_inference.core import PermanentError
from slackwater_inference.model.headers import Headers, read_folder
from slackwater_inference.model.scales import scale_faults, scale_name, stored_in_8_bits
from slackwater_inference.model.shapes import (
    IGNORED_PREFIXES,
    SLOW,
    shape_faults,
    stored_names,
    stored_shapes,
    weight_shapes,
)
from slackwater_inference.text.tokenizer import AUDIO_PAD, IM_END, PAD, SpecialIds, special_ids

_DTYPES: dict[str, Literal["float32", "bfloat16"]] = {"F32": "float32", "BF16": "bfloat16"}
_CODEC_FILES = ("codec.safetensors", "codec.pth")

# Never less than the published runaway guard, 12 frames a token, which then decides alone: a token is a byte at least.
# A tighter one would cut off what is spelt out: "FBI" has three bytes and is said as three words.
_LENGTH_MARGIN = 14.0


class BadCheckpoint(PermanentError):
    """A folder that cannot be loaded.  faults: what is wrong with it, all of it; the message is one line."""

    def __init__(self, folder: Path, faults: Sequence[str]) -> None:
        super().__init__(f"{folder} is not a usable checkpoint: {'; '.join(faults)}")
        self.faults = tuple(faults)


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder whose parts fit each other.

    headers: of the tensors that are to be loaded, by their stored names.   quantization: how the projections among
    them that are held in 8 bits are to be read; None if none is.
    """

    path: Path
    config: ModelConfig
    headers: Headers
    tokenizer: Mapping[str, Any]  # the parsed tokenizer.json
    codec_file: Path
    quantization: Quantization | None

    def bytes_in_8_bits(self) -> dict[str, int]:
        """Codes and scales of each weight that is stored so, by its S2 name."""
        small = stored_in_8_bits(self.headers)
        sizes = {}
        for name in weight_shapes(self.config.text_config, self.config.audio_decoder_config, self.config.num_codebooks):
            parts = stored_names(name, self.headers)
            if small.issuperset(parts):
                sizes[name] = sum(
                    self.headers[part].size_bytes + self.headers[scale_name(part)].size_bytes for part in parts
                )
        return sizes


def inspect(folder: Path) -> CheckpointFolder:
    """Read what is small and check everything against everything.  Raises BadCheckpoint naming every fault."""
    if not folder.is_dir():
        raise BadCheckpoint(folder, ["it must be a folder with config.json, weights, tokenizer.json and a codec"])
    faults: list[str] = []
    published = _published(folder, faults)
    codec = _codec_config(folder, faults)
    tokenizer = _json(folder / "tokenizer.json", faults)
    codec_file = next((folder / name for name in _CODEC_FILES if (folder / name).is_file()), None)
    if codec_file is None:
        faults.append(f"{' or '.join(_CODEC_FILES)} must be there")
    headers, header_faults = read_folder(folder)
    headers = {name: header for name, header in headers.items() if not name.startswith(IGNORED_PREFIXES)}
    faults += header_faults
    config = None
    if published is not None:
        slow, fast = _transformers(published, faults)
        if slow is not None and fast is not None:
            faults += _tensor_faults(headers, published, slow, fast, is_complete=not header_faults)
        ids = _special_ids(tokenizer, published, faults) if tokenizer is not None else None
        if slow is not None and fast is not None and codec is not None and ids is not None:
            config = _model_config(published, slow, fast, codec, ids, headers, faults)
    if faults or config is None or tokenizer is None or codec_file is None:
        raise BadCheckpoint(folder, faults)
    assert published is not None  # or there were a fault
    return CheckpointFolder(folder, config, headers, tokenizer, codec_file, published.quantization_config)


def _json(path: Path, faults: list[str]) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        faults.append(f"{path.name} must be there")
    except (OSError, ValueError, RecursionError) as error:  # the last one is that of a thousand brackets
        faults.append(f"{path.name} cannot be read: {error}")
    else:
        if isinstance(data, dict):
            return data
        faults.append(f"{path.name} must be a JSON object, got {type(data).__name__}")
    return None


def _published(folder: Path, faults: list[str]) -> PublishedConfig | None:
    data = _json(folder / "config.json", faults)
    if data is None:
        return None
    try:
        return PublishedConfig.model_validate(data)
    except ValidationError as error:
        faults += _lines("config.json", error)
    return None


def _transformers(
    published: PublishedConfig, faults: list[str]
) -> tuple[TransformerConfig | None, TransformerConfig | None]:
    made: list[TransformerConfig | None] = []
    for key, build in (("text_config", published.slow), ("audio_decoder_config", published.fast)):
        try:
            made.append(build())
        except ValidationError as error:
            faults += _lines(f"config.json: {key}", error)
            made.append(None)
    text_dim, dim = published.audio_decoder_config.text_dim, published.text_config.dim
    if text_dim not in (None, dim):
        faults.append(f"config.json: audio_decoder_config.text_dim must be text_config.dim {dim}, got {text_dim}")
    return made[0], made[1]


def _codec_config(folder: Path, faults: list[str]) -> CodecConfig | None:
    """The published folder has no codec config, so its values are the default; a codec.json changes some."""
    if not (folder / "codec.json").exists():
        return CodecConfig()
    changes = _json(folder / "codec.json", faults)
    if changes is None:
        return None
    try:
        return CodecConfig.model_validate(changes)
    except ValidationError as error:
        faults += _lines("codec.json", error)
    return None


def _special_ids(tokenizer: Mapping[str, Any], published: PublishedConfig, faults: list[str]) -> SpecialIds | None:
    """The tokenizer's ids, which count; what config.json claims must agree with them."""
    num_semantic = published.audio_decoder_config.vocab_size
    try:
        ids = special_ids(tokenizer, num_semantic)
        last = max([*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])])
    except (KeyError, TypeError, AttributeError) as error:
        faults.append(f"tokenizer.json must have a BPE model with a vocab, and added_tokens: {error!r}")
        return None
    except ValueError as error:
        faults.append(f"tokenizer.json: {error}")
        return None
    if last >= published.text_config.vocab_size:
        faults.append(f"tokenizer.json has id {last}, past text_config.vocab_size {published.text_config.vocab_size}")
    for key, token, token_id in (
        ("eos_token_id", IM_END, ids.im_end),
        ("pad_token_id", PAD, ids.pad),
        ("audio_pad_token_id", AUDIO_PAD, ids.audio_pad),
        ("semantic_start_token_id", "the first semantic token", ids.semantic_begin),
        ("semantic_end_token_id", "the last semantic token", ids.semantic_begin + num_semantic - 1),
    ):
        claimed = getattr(published, key)
        if claimed is not None and claimed != token_id:
            faults.append(f"config.json: {key} must be {token_id} as the tokenizer has {token}, got {claimed}")
    return ids


def _tensor_faults(
    headers: Headers, published: PublishedConfig, slow: TransformerConfig, fast: TransformerConfig, *, is_complete: bool
) -> list[str]:
    expected = stored_shapes(slow, fast, published.audio_decoder_config.num_codebooks, headers)
    small = stored_in_8_bits(headers) if published.quantization_config else set()
    of_small = {scale_name(name) for name in small}
    faults = shape_faults(expected, {name: h.shape for name, h in headers.items() if name not in of_small})
    if published.quantization_config is not None:
        faults += scale_faults(headers, published.quantization_config.format)
        if not small and is_complete:
            faults.append("config.json: quantization_config says that weights are in 8 bits, but none is F8_E4M3")
    if not is_complete:  # what lies in an unreadable file is not missing
        faults = [fault for fault in faults if not fault.startswith("missing ")]
    if (embeddings := headers.get(f"{SLOW}embeddings.weight")) is None:
        return faults
    if embeddings.dtype not in _DTYPES:
        return [*faults, f"weights must be {' or '.join(_DTYPES)}, the embeddings are {embeddings.dtype}; convert them"]
    return faults + [
        f"{name} must be {embeddings.dtype} as the embeddings are, got {header.dtype}"
        for name, header in sorted(headers.items())
        if header.dtype != embeddings.dtype and name in expected and name not in small
    ]


def _model_config(
    published: PublishedConfig,
    slow: TransformerConfig,
    fast: TransformerConfig,
    codec: CodecConfig,
    ids: SpecialIds,
    headers: Headers,
    faults: list[str],
) -> ModelConfig | None:
    embeddings = headers.get(f"{SLOW}embeddings.weight")
    try:
        return ModelConfig(
            name="s2-pro",
            text_config=slow,
            audio_decoder_config=fast,
            codec=codec,
            num_codebooks=published.audio_decoder_config.num_codebooks,
            im_start_id=ids.im_start,
            im_end_id=ids.im_end,
            voice_id=ids.voice,
            semantic_begin_id=ids.semantic_begin,
            weight_dtype=_DTYPES.get(embeddings.dtype, "float32") if embeddings else "float32",
            length_margin=_LENGTH_MARGIN,
        )
    except ValidationError as error:
        faults += _lines("config.json", error)
    return None


def _lines(where: str, error: ValidationError) -> list[str]:
    lines = []
    for fault in error.errors(include_url=False):
        key = ".".join(str(part) for part in fault["loc"])
        came = "" if fault["type"] in ("missing", "value_error") else f", got {fault['input']!r}"
        lines.append(f"{where}: {key + ': ' if key else ''}{fault['msg']}{came}")
    return lines
