"""What tests of this room share: a micro voice, and a slow reference of the whole model.

The reference recomputes everything at each step, for one sequence, with no cache, no batch and no cut
head; it shares with the engine only the weights and the counter-based noise.  Not imported by the product.
"""

from collections import deque

import torch
from torch import Tensor

from slackwater_inference import sampler
from slackwater_inference.config import CodecConfig, ModelConfig, TransformerConfig
from slackwater_inference.core import Column, SamplingParams
from slackwater_inference.model.weights import FAST, SLOW, Weights

_NEVER = float("-inf")


def micro(
    *, n_layer: int = 2, heads: tuple[int, int] = (2, 1), num_codebooks: int = 3, fast_layers: int = 1, dim: int = 32
) -> ModelConfig:
    """A voice small enough for hundreds of steps in a test.  heads: query heads, key/value heads."""
    slow = TransformerConfig(
        vocab_size=304,
        n_layer=n_layer,
        dim=dim,
        n_head=heads[0],
        n_local_heads=heads[1],
        head_dim=16,
        intermediate_size=48,
        max_seq_len=512,
        attention_qk_norm=True,
    )
    fast = slow.model_copy(
        update={
            "vocab_size": 40,
            "n_layer": fast_layers,
            "attention_qk_norm": False,
            "max_seq_len": num_codebooks + 1,
        }
    )
    return ModelConfig(
        name="micro",
        text_config=slow,
        audio_decoder_config=fast,
        codec=CodecConfig(residual_codebook_size=24, latent_dim=8, rates=(4, 4), channels=(8, 4, 2)),
        num_codebooks=num_codebooks,
        im_start_id=256,
        im_end_id=257,
        voice_id=258,
        semantic_begin_id=264,
        stop_at_expected_length=True,
    )


def reference_draw(logits: Tensor, temperature: float, top_p: float, top_k: int, uniforms: Tensor) -> int:
    """One index of logits [v], by a full sort, as the published sampler is written.

    uniforms: one for each rank; ranks past them are past any top_k.
    """
    order = torch.argsort(logits, descending=True)
    mass = logits[order].softmax(0).cumsum(0)
    kept = [r for r in range(len(order)) if r == 0 or (mass[r] <= top_p and r < top_k)]
    scaled = logits[order[kept]] / max(temperature, 1e-5)
    race = scaled.softmax(0) / -uniforms[kept].log()
    return int(order[kept[int(race.argmax())]])


def reference_columns(
    weights: Weights, model: ModelConfig, prompt: tuple[Column, ...], sampling: SamplingParams, num_frames: int
) -> list[Column]:
    """The first `num_frames` columns (id and codes) that follow `prompt`; ends early at im_end."""
    stages = sampler.codebook_stage(model.num_codebooks)
    window: deque[Column] = deque([(0,) * model.column_width] * sampler.WINDOW_FRAMES, sampler.WINDOW_FRAMES)
    made: list[Column] = []
    for step in range(num_frames):
        hidden = _slow_hidden(weights, model, [*prompt, *made])
        uniforms = sampler.noise(torch.tensor([sampling.seed]), torch.tensor([step]), stages)[0]
        logits = weights[f"{SLOW}embeddings.weight"] @ hidden
        allowed = torch.full_like(logits, _NEVER)
        allowed[model.semantic_begin_id : model.semantic_begin_id + model.num_semantic] = 0.0
        allowed[model.im_end_id] = 0.0
        logits = logits + allowed
        token = reference_draw(logits, sampling.temperature, sampling.top_p, sampling.top_k, uniforms[0])
        if step > 0 and token != model.im_end_id and token in [column[0] for column in window]:
            token = reference_draw(logits, sampler.RAS_TEMPERATURE, sampler.RAS_TOP_P, sampling.top_k, uniforms[1])
        if token == model.im_end_id:
            break
        codes = [token - model.semantic_begin_id]
        for codebook in range(1, model.num_codebooks):
            fast_logits = _fast_logits(weights, model, hidden, codes)
            fast_logits[model.codec.residual_codebook_size :] = _NEVER
            u = uniforms[sampler.codebook_stage(codebook)]
            codes.append(reference_draw(fast_logits, sampling.temperature, sampling.top_p, sampling.top_k, u))
        made.append((token, *codes))
        if step > 0:
            window.append(made[-1])
    return made


def _slow_hidden(weights: Weights, model: ModelConfig, columns: list[Column]) -> Tensor:
    """Hidden state [dim] after the last of `columns`."""
    ids, codes = torch.tensor(columns)[:, 0], torch.tensor(columns)[:, 1:]
    x = weights[f"{SLOW}embeddings.weight"][ids]
    summed = x.clone()
    for i in range(model.num_codebooks):
        summed += weights[f"{FAST}codebook_embeddings.weight"][codes[:, i] + i * model.num_semantic]
    is_semantic = (ids >= model.semantic_begin_id) & (ids < model.semantic_begin_id + model.num_semantic)
    x[is_semantic] = summed[is_semantic] / (model.num_codebooks + 1) ** 0.5
    return _transformer(weights, SLOW, model.text_config, x)[-1]


def _fast_logits(weights: Weights, model: ModelConfig, hidden: Tensor, codes: list[int]) -> Tensor:
    rows = [hidden, *(weights[f"{FAST}embeddings.weight"][code] for code in codes)]
    last = _transformer(weights, FAST, model.audio_decoder_config, torch.stack(rows))[-1]
    return weights[f"{FAST}output.weight"] @ last


def _transformer(weights: Weights, prefix: str, config: TransformerConfig, x: Tensor) -> Tensor:
    """x [n, dim] through all layers and the final norm."""
    q_width, kv_width = config.n_head * config.head_dim, config.n_local_heads * config.head_dim
    for i in range(config.n_layer):

        def w(name: str, i: int = i) -> Tensor:
            return weights[f"{prefix}layers.{i}.{name}.weight"]

        qkv = _norm(x, w("attention_norm"), config) @ w("attention.wqkv").T
        q, k, v = torch.split(qkv, [q_width, kv_width, kv_width], dim=1)
        outs = []
        for head in range(config.n_head):
            shared = head * config.n_local_heads // config.n_head
            qh, kh, vh = (
                t[:, h * config.head_dim : (h + 1) * config.head_dim] for t, h in ((q, head), (k, shared), (v, shared))
            )
            if config.attention_qk_norm:
                qh, kh = _norm(qh, w("attention.q_norm"), config), _norm(kh, w("attention.k_norm"), config)
            scores = _rotated(qh, config) @ _rotated(kh, config).T / config.head_dim**0.5
            future = torch.ones_like(scores).triu(1).bool()
            outs.append(scores.masked_fill(future, _NEVER).softmax(1) @ vh)
        x = x + torch.cat(outs, dim=1) @ w("attention.wo").T
        normed = _norm(x, w("ffn_norm"), config)
        gate = normed @ w("feed_forward.w1").T
        x = x + (gate * gate.sigmoid() * (normed @ w("feed_forward.w3").T)) @ w("feed_forward.w2").T
    return _norm(x, weights[f"{prefix}norm.weight"], config)


def _norm(x: Tensor, weight: Tensor, config: TransformerConfig) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight


def _rotated(x: Tensor, config: TransformerConfig) -> Tensor:
    """Pairs (0, 1), (2, 3), ... of x [n, head_dim] turned by position times frequency, table in bf16."""
    frequencies = torch.tensor([config.rope_base ** -(i / config.head_dim) for i in range(0, config.head_dim, 2)])
    angles = torch.arange(len(x))[:, None] * frequencies
    cos, sin = angles.cos().bfloat16().float(), angles.sin().bfloat16().float()
    out = torch.empty_like(x)
    out[:, 0::2] = x[:, 0::2] * cos - x[:, 1::2] * sin
    out[:, 1::2] = x[:, 0::2] * sin + x[:, 1::2] * cos
    return out
