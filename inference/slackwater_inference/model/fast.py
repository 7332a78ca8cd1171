"""The fast transformer: the residual codes of one frame, one position a codebook.

Owns its forward pass and its small static cache, which starts anew each frame.  Does not own the
choice of a code.  Called by the model runner, which samples between two positions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from slackwater_inference.config import ModelConfig
from slackwater_inference.model.layers import Layer, layers_of, rms_norm, rope_table
from slackwater_inference.model.weights import FAST, Weights


class FastTransformer:
    """The weights, and a cache for up to `max_batch` rows."""

    def __init__(self, weights: Weights, model: ModelConfig, max_batch: int) -> None:
        config = model.audio_decoder_config
        self._eps = config.norm_eps
        # Parts of equal width need no projection.
        self._project_in = (
            (weights[f"{FAST}project_in.weight"], weights[f"{FAST}project_in.bias"]) if model.has_project_in else None
        )
        self._embeddings = weights[f"{FAST}embeddings.weight"]
        self._layers = layers_of(weights, FAST, config)
        self._norm = weights[f"{FAST}norm.weight"]
        # A codec that holds fewer residual entries than the head has rows: the rest cannot be spoken.
        self._head = weights[f"{FAST}output.weight"][: model.codec.residual_codebook_size].contiguous()
        self._rope = rope_table(config)[:, None]  # [positions, 1, head_dim / 2]
        shape = (config.n_layer, 2, max_batch, model.num_codebooks, config.n_local_heads, config.head_dim)
        self._cache = torch.zeros(shape, dtype=self._embeddings.dtype)

    def first_logits(self, hidden: Tensor, semantic: Tensor) -> Tensor:
        """Logits of residual codebook 1, after positions 0 (the slow hidden state) and 1 (the semantic code).

        hidden: [b, slow dim].   semantic: int64 [b], codes.   Returns fp32 [b, residual_codebook_size].
        Both inputs are known at once, so they go in one pass.
        """
        if self._project_in is not None:
            hidden = F.linear(hidden, *self._project_in)
        x = torch.stack((hidden, F.embedding(semantic, self._embeddings)), dim=1)  # [b, 2, dim]
        return self._forward(x, start=0)

    def next_logits(self, code: Tensor, codebook: int) -> Tensor:
        """Logits of residual codebook `codebook` + 1, given `code` int64 [b] of `codebook`."""
        return self._forward(F.embedding(code, self._embeddings)[:, None], start=codebook + 1)

    def _forward(self, x: Tensor, start: int) -> Tensor:
        stop = start + x.shape[1]
        # The one pass with several queries starts at 0, where a causal mask is just a triangle.
        mask = torch.full((x.shape[1], stop), float("-inf"), dtype=x.dtype).triu(1) if x.shape[1] > 1 else None
        for layer, cache in zip(self._layers, self._cache, strict=True):
            x = x + self._attention(layer, cache[:, : x.shape[0]], x, start, stop, mask)
            x = x + layer.feed_forward(x)
        return F.linear(rms_norm(x[:, -1], self._norm, self._eps), self._head).float()

    def _attention(self, layer: Layer, cache: Tensor, x: Tensor, start: int, stop: int, mask: Tensor | None) -> Tensor:
        q, k, v = layer.project(x, self._rope[start:stop])
        cache[0, :, start:stop] = k
        cache[1, :, start:stop] = v
        # Positions past `stop` still hold an earlier frame's values; they are never read.
        return layer.attend(q, cache[0, :, :stop], cache[1, :, :stop], mask)
