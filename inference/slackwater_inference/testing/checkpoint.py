"""Writes a miniature of a Fish S2-Pro checkpoint folder, for tests that load one.

Owns the folder's layout as a writer sees it: config.json, safetensors weights (one file, or shards with an index), a
real byte-level BPE tokenizer, the codec.  Not imported by the product.
"""

import functools
import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from slackwater_inference.codec.weights import seeded_codec_weights
from slackwater_inference.config import ModelConfig, TransformerConfig
from slackwater_inference.model.headers import INDEX, SINGLE
from slackwater_inference.model.weights import Weights, seeded_weights
from slackwater_inference.testing.model import micro

# In the order of the published tokenizer; the semantic tokens follow.
_SPECIAL = (
    "endoftext im_start im_end pad phoneme_start phoneme_end text voice interleave audio_start audio_end audio_pad"
)
_CORPUS = ("convert the provided text to speech reference to the following", "system user assistant Text Speech") * 4
_NUM_BPE = 300
_NUM_UNUSED_ROWS = 2  # the published table has a few more rows than the tokenizer has ids


@functools.cache
def bpe_tokenizer(num_semantic: int) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of 300 ids with S2's special tokens behind them."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_NUM_BPE, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([f"<|{name}|>" for name in _SPECIAL.split()])
    tokenizer.add_special_tokens([f"<|semantic:{code}|>" for code in range(num_semantic)])
    return tokenizer


def with_tokenizer(model: ModelConfig, tokenizer: tokenizers.Tokenizer) -> ModelConfig:
    """`model` with the ids of `tokenizer`, and rows for all of them."""
    vocab_size = tokenizer.get_vocab_size() + _NUM_UNUSED_ROWS
    return ModelConfig.model_validate(
        model.model_dump()
        | {
            "text_config": model.text_config.model_dump() | {"vocab_size": vocab_size},
            "im_start_id": tokenizer.token_to_id("<|im_start|>"),
            "im_end_id": tokenizer.token_to_id("<|im_end|>"),
            "voice_id": tokenizer.token_to_id("<|voice|>"),
            "semantic_begin_id": tokenizer.token_to_id("<|semantic:0|>"),
        }
    )


def write_checkpoint(
    folder: Path, model: ModelConfig | None = None, *, num_shards: int = 1, seed: int = 0
) -> tuple[ModelConfig, Weights]:
    """Write a whole folder.  Returns the config that its model has, and its weights.

    model: what it is like; None is `micro()`.  Its ids are replaced by the tokenizer's.
    """
    base = model or micro()
    tokenizer = bpe_tokenizer(base.num_semantic)
    written = with_tokenizer(base, tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", published_config(written, tokenizer))
    write_json(folder / "codec.json", written.codec.model_dump(mode="json"))
    codec = seeded_codec_weights(written.codec, written.num_codebooks, written.num_semantic, seed)
    save_file(codec, folder / "codec.safetensors")
    weights = seeded_weights(written, seed)
    write_weights(folder, weights, num_shards)
    return written, weights


def write_weights(folder: Path, weights: Weights, num_shards: int = 1) -> None:
    """The weights as one file, or as shards with an index, tensors dealt out in turn."""
    if num_shards == 1:
        save_file(weights, folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        dealt = dict(list(weights.items())[shard::num_shards])
        save_file(dealt, folder / name)
        weight_map |= dict.fromkeys(dealt, name)
    size_bytes = sum(tensor.nbytes for tensor in weights.values())
    write_json(folder / INDEX, {"metadata": {"total_size": size_bytes}, "weight_map": weight_map})


def published_config(model: ModelConfig, tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """config.json as Fish writes it, with keys that we do not read."""
    last = model.semantic_begin_id + model.num_semantic - 1
    return {
        "model_type": "fish_qwen3_omni",
        "architectures": ["FishQwen3OmniForCausalLM"],
        "dtype": model.weight_dtype,
        "text_config": _transformer(model.text_config) | {"model_type": "fish_qwen3", "tie_word_embeddings": True},
        "audio_decoder_config": _transformer(model.audio_decoder_config)
        | {
            "model_type": "fish_qwen3_audio_decoder",
            "tie_word_embeddings": False,
            "num_codebooks": model.num_codebooks,
            "text_dim": model.text_config.dim,
        },
        "eos_token_id": model.im_end_id,
        "pad_token_id": tokenizer.token_to_id("<|pad|>"),
        "audio_pad_token_id": tokenizer.token_to_id("<|audio_pad|>"),
        "semantic_start_token_id": model.semantic_begin_id,
        "semantic_end_token_id": last,
    }


def write_json(path: Path, data: object) -> None:
    """`data` as a file."""
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")


def split_projections(weights: Weights, model: ModelConfig) -> Weights:
    """`weights` as older checkpoints hold them: wq, wk and wv apart."""
    apart: Weights = {}
    for name, tensor in weights.items():
        if "attention.wqkv." not in name:
            apart[name] = tensor
            continue
        config = model.text_config if name.startswith("text_model.") else model.audio_decoder_config
        kv_width = config.n_local_heads * config.head_dim
        parts = torch.split(tensor, [tensor.shape[0] - 2 * kv_width, kv_width, kv_width])
        apart |= {name.replace("wqkv", w): part.clone() for w, part in zip(("wq", "wk", "wv"), parts, strict=True)}
    return apart


def _transformer(config: TransformerConfig) -> dict[str, Any]:
    unread = {"dropout": 0.0, "initializer_range": 0.02, "use_gradient_checkpointing": True, "use_moe": False}
    return config.model_dump() | unread | {"attention_qkv_bias": False, "attention_o_bias": False}
