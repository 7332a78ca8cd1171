"""The slow transformer: one semantic token a frame.

Owns its forward pass over a paged cache that the caller lends.  Does not own the cache's memory,
the block tables or the choice of a token.  Called by the model runner.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slackwater_inference.config import ModelConfig
from slackwater_inference.model.layers import layers_of, rms_norm, rope_table
from slackwater_inference.model.weights import FAST, SLOW, Weights

_WORKSPACE_STEP = 1024  # positions; contexts grow by the block, and not each is worth an allocation


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Where a batch of b rows x n new positions lives in the cache.

    positions: int64 [b, n].   write: int64 [b * n], flat cache positions of the new keys and values.
    read: int64 [b, L], flat cache positions of each row's context, new ones included, padded.
    mask: [b, 1, n, L], 0 where a query may look and -inf elsewhere (later positions, padding).
    """

    positions: Tensor
    write: Tensor
    read: Tensor
    mask: Tensor


class SlowTransformer:
    """The weights, and the forward pass on them."""

    def __init__(self, weights: Weights, model: ModelConfig) -> None:
        config = model.text_config
        self._eps = config.norm_eps
        self._embeddings = weights[f"{SLOW}embeddings.weight"]
        self._codebook_embeddings = weights[f"{FAST}codebook_embeddings.weight"]
        self._layers = layers_of(weights, SLOW, config)
        self._norm = weights[f"{SLOW}norm.weight"]
        self._rope = rope_table(config)
        self._semantic_begin, self._num_semantic = model.semantic_begin_id, model.num_semantic
        self._code_offsets = torch.arange(model.num_codebooks) * model.num_semantic
        self._workspace = torch.empty(0)  # one layer's context, as large as the largest batch so far
        self._code_scale = float(model.column_width) ** 0.5
        # Only semantic ids and im_end can be sampled, so only their rows of the tied head are kept.
        semantic = torch.arange(model.semantic_begin_id, model.semantic_begin_id + model.num_semantic)
        self.head_ids = torch.cat((semantic, torch.tensor([model.im_end_id])))
        self._head = self._embeddings[self.head_ids].contiguous()

    def embed(self, columns: Tensor) -> Tensor:
        """Input of columns int64 [b, n, cw]: [b, n, dim].

        At a semantic position the codes' embeddings are added and the sum divided by sqrt(cw); code 0
        is the semantic code, so it counts twice, by design.  Other positions are the plain token.
        """
        ids, codes = columns[..., 0], columns[..., 1:]
        tokens = F.embedding(ids, self._embeddings)
        summed = tokens + F.embedding(codes + self._code_offsets, self._codebook_embeddings).sum(dim=-2)
        is_semantic = (ids >= self._semantic_begin) & (ids < self._semantic_begin + self._num_semantic)
        return torch.where(is_semantic[..., None], summed / self._code_scale, tokens)

    def forward(self, columns: Tensor, batch: PagedBatch, cache: Tensor) -> Tensor:
        """Hidden states after the final norm, [b, n, dim]; keys and values go into `cache`.

        columns: int64 [b, n, cw].   cache: [n_layer, positions, 2, kv heads, head_dim], mutated at `batch.write`.
        """
        x = self.embed(columns)
        turns = self._rope[batch.positions][:, :, None]  # [b, n, 1, head_dim / 2]
        read = batch.read.flatten()
        for layer, layer_cache in zip(self._layers, cache, strict=True):
            q, k, v = layer.project(x, turns)
            layer_cache.index_copy_(0, batch.write, torch.stack((k, v), dim=2).flatten(0, 1))
            context = self._gather(layer_cache, read).view(*batch.read.shape, *layer_cache.shape[1:])
            # [b, L, 2, kv heads, head_dim]
            x = x + layer.attend(q, context[:, :, 0], context[:, :, 1], batch.mask)
            x = x + layer.feed_forward(x)
        return rms_norm(x, self._norm, self._eps)

    def _gather(self, layer_cache: Tensor, read: Tensor) -> Tensor:
        """The entries of `layer_cache` at `read`, until the next call; fresh memory would cost more than the copy."""
        if len(self._workspace) < len(read):
            num_positions = math.ceil(len(read) / _WORKSPACE_STEP) * _WORKSPACE_STEP
            self._workspace = layer_cache.new_empty((num_positions, *layer_cache.shape[1:]))
        return torch.index_select(layer_cache, 0, read, out=self._workspace[: len(read)])

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [..., num_semantic + 1] of hidden [..., dim]; `head_ids` maps an index to its token id."""
        return F.linear(hidden, self._head).float()
