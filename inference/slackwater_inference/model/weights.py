"""Names and shapes of a DualAR's weights in the S2 layout, and seeded ones for the embedded voice.

Owns what a checkpoint must contain.  A loader for checkpoint files would return the same mapping
that `seeded_weights` does.  Called at start-up.
"""

import torch
from torch import Tensor

from slackwater_inference.config import ModelConfig, TransformerConfig

Weights = dict[str, Tensor]
SLOW = "text_model.model."
FAST = "audio_decoder."


def weight_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the two transformers, by its S2 name."""
    slow, fast = model.text_config, model.audio_decoder_config
    shapes: dict[str, tuple[int, ...]] = {f"{SLOW}embeddings.weight": (slow.vocab_size, slow.dim)}
    shapes |= _layer_shapes(SLOW, slow)
    shapes[f"{SLOW}norm.weight"] = (slow.dim,)
    shapes[f"{FAST}codebook_embeddings.weight"] = (model.num_codebooks * model.num_semantic, slow.dim)
    shapes[f"{FAST}embeddings.weight"] = (fast.vocab_size, fast.dim)
    shapes |= _layer_shapes(FAST, fast)
    shapes[f"{FAST}norm.weight"] = (fast.dim,)
    shapes[f"{FAST}output.weight"] = (fast.vocab_size, fast.dim)
    return shapes


def _layer_shapes(prefix: str, config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    q_width, kv_width = config.n_head * config.head_dim, config.n_local_heads * config.head_dim
    for i in range(config.n_layer):
        layer = f"{prefix}layers.{i}."
        shapes[f"{layer}attention.wqkv.weight"] = (q_width + 2 * kv_width, config.dim)
        shapes[f"{layer}attention.wo.weight"] = (config.dim, q_width)
        if config.attention_qk_norm:
            shapes[f"{layer}attention.q_norm.weight"] = (config.head_dim,)
            shapes[f"{layer}attention.k_norm.weight"] = (config.head_dim,)
        shapes[f"{layer}attention_norm.weight"] = (config.dim,)
        shapes[f"{layer}ffn_norm.weight"] = (config.dim,)
        shapes[f"{layer}feed_forward.w1.weight"] = (config.intermediate_size, config.dim)
        shapes[f"{layer}feed_forward.w3.weight"] = (config.intermediate_size, config.dim)
        shapes[f"{layer}feed_forward.w2.weight"] = (config.dim, config.intermediate_size)
    return shapes


def check_weights(weights: Weights, model: ModelConfig) -> None:
    """Raise ValueError naming each tensor that is missing, extra or of a wrong shape."""
    shapes = weight_shapes(model)
    faults = [f"missing {name}" for name in shapes.keys() - weights.keys()]
    faults += [f"extra {name}" for name in weights.keys() - shapes.keys()]
    faults += [
        f"{name} must be {list(shape)}, got {list(weights[name].shape)}"
        for name, shape in shapes.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    if faults:
        raise ValueError(f"the weights do not fit the model's config: {'; '.join(sorted(faults))}")


def seeded_weights(model: ModelConfig, seed: int) -> Weights:
    """Random weights that depend on `model` and `seed` only.

    Scaled so that every activation and logit stays near the size of a trained model's.
    """
    generator = torch.Generator().manual_seed(seed)
    # A normed hidden state against rows of this size gives logits of standard deviation 3:
    # peaked enough that top-p cuts, flat enough that the sound varies.
    row_std = 3.0 / model.text_config.dim**0.5
    weights: Weights = {}
    for name, shape in weight_shapes(model).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
        else:
            is_row_table = name.endswith(("embeddings.weight", "output.weight"))
            std = row_std if is_row_table else shape[1] ** -0.5
            weights[name] = torch.randn(shape, generator=generator) * std
    # The head is tied, so a zero row makes im_end's logit 0: far below the 30 best of random ones.
    weights[f"{SLOW}embeddings.weight"][model.im_end_id] = 0.0
    dtype = getattr(torch, model.weight_dtype)
    return {name: tensor.to(dtype) for name, tensor in weights.items()}
