"""A DualAR's weights as tensors: the check at the engine's door, and seeded ones for the embedded voice.

Owns no name or shape (`shapes`) and reads no file (`checkpoint`).  Called at start-up.
"""

import torch
from torch import Tensor

from slackwater_inference.config import ModelConfig
from slackwater_inference.model.shapes import FAST, SLOW, Shape, shape_faults, weight_shapes

__all__ = ["FAST", "SLOW", "Weights", "check_weights", "seeded_weights"]

Weights = dict[str, Tensor]


def check_weights(weights: Weights, model: ModelConfig) -> None:
    """Raise ValueError naming each tensor that is missing, extra or of a wrong shape or dtype."""
    dtype = getattr(torch, model.weight_dtype)
    faults = shape_faults(_shapes(model), {name: tuple(tensor.shape) for name, tensor in weights.items()})
    faults += [
        f"{name} must be {dtype}, got {tensor.dtype}" for name, tensor in weights.items() if tensor.dtype != dtype
    ]
    if faults:
        raise ValueError(f"the weights do not fit the model's config: {'; '.join(faults)}")


def seeded_weights(model: ModelConfig, seed: int) -> Weights:
    """Random weights that depend on `model` and `seed` only.

    Scaled so that every activation and logit stays near the size of a trained model's.
    """
    generator = torch.Generator().manual_seed(seed)
    # A normed hidden state against rows of this size gives logits of standard deviation 3:
    # peaked enough that top-p cuts, flat enough that the sound varies.
    row_std = 3.0 / model.text_config.dim**0.5
    weights: Weights = {}
    for name, shape in _shapes(model).items():
        if len(shape) == 1:
            weights[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        else:
            is_row_table = name.endswith(("embeddings.weight", "output.weight"))
            std = row_std if is_row_table else shape[1] ** -0.5
            weights[name] = torch.randn(shape, generator=generator) * std
    # The head is tied, so a zero row makes im_end's logit 0: far below the 30 best of random ones.
    weights[f"{SLOW}embeddings.weight"][model.im_end_id] = 0.0
    dtype = getattr(torch, model.weight_dtype)
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def _shapes(model: ModelConfig) -> dict[str, Shape]:
    return weight_shapes(model.text_config, model.audio_decoder_config, model.num_codebooks)
