"""What tests of this room share: a micro voice, the model run by hand, and a slow reference of the whole model.

The reference recomputes everything at each step, for one sequence, with no cache, no batch and no cut
head; it shares with the engine only the weights and the counter-based noise.  Not imported by the product.
"""

import math

import torch
from torch import Tensor

from slackwater_inference import sampler
from slackwater_inference.batch import PrefillChunk, Sequence, StepPlan
from slackwater_inference.config import CodecConfig, ModelConfig, TransformerConfig
from slackwater_inference.config.codec import CodecTransformerConfig
from slackwater_inference.core import Column, Frame, FrameBudget, Request, SamplingParams
from slackwater_inference.model.weights import FAST, SLOW, Weights
from slackwater_inference.model_runner import ModelRunner

_NEVER = float("-inf")
_BLOCK_SIZE = 4
_PIECE = 32


def micro(
    *,
    n_layer: int = 2,
    heads: tuple[int, int] = (2, 1),
    head_dim: int = 16,
    dim: int = 32,
    intermediate_size: int = 48,
    num_codebooks: int = 3,
    qk_norm: tuple[bool, bool] = (True, False),
    fast_layers: int = 1,
    fast_heads: tuple[int, int] | None = None,
    fast_dim: int | None = None,
    residual_codebook_size: int = 24,
    rope_base: float = 1_000_000.0,
    norm_eps: float = 1e-6,
) -> ModelConfig:
    """A voice small enough for hundreds of steps in a test.

    heads: query heads, key/value heads.   qk_norm: slow, fast.   fast_heads, fast_dim: None takes the slow part's.
    """
    slow = TransformerConfig(
        vocab_size=304,
        n_layer=n_layer,
        dim=dim,
        n_head=heads[0],
        n_local_heads=heads[1],
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        max_seq_len=512,
        attention_qk_norm=qk_norm[0],
        rope_base=rope_base,
        norm_eps=norm_eps,
    )
    n_head, n_local_heads = fast_heads or heads
    fast = slow.model_copy(
        update={
            "vocab_size": 40,
            "n_layer": fast_layers,
            "dim": fast_dim or dim,
            "n_head": n_head,
            "n_local_heads": n_local_heads,
            "attention_qk_norm": qk_norm[1],
            "max_seq_len": num_codebooks + 1,
        }
    )
    return ModelConfig(
        name="micro",
        text_config=slow,
        audio_decoder_config=fast,
        codec=micro_codec(residual_codebook_size),
        num_codebooks=num_codebooks,
        im_start_id=256,
        im_end_id=257,
        voice_id=258,
        semantic_begin_id=264,
        stop_at_expected_length=True,
    )


def micro_codec(residual_codebook_size: int = 24) -> CodecConfig:
    """A codec of every part in miniature: 8 samples a frame."""
    module = CodecTransformerConfig(n_layer=1, n_head=2, head_dim=4, intermediate_size=16, window_size=4)
    return CodecConfig(
        latent_dim=8,
        encoder_dim=4,
        encoder_rates=(2, 2),
        encoder_transformers=(None, module),
        downsample_factors=(2,),
        pre_module=module,
        post_module=module,
        codebook_dim=4,
        residual_codebook_size=residual_codebook_size,
        decoder_dim=8,
        decoder_rates=(2, 2),
        dilations=(1, 3),
    )


def generate(
    model: ModelConfig, weights: Weights, prompt: tuple[Column, ...], sampling: SamplingParams, num_frames: int
) -> list[Column]:
    """The columns that the model runner makes for one sequence, in small pieces and with its pages in reverse."""
    num_blocks = math.ceil((len(prompt) + num_frames) / _BLOCK_SIZE)
    runner = ModelRunner(model, weights, max_running_requests=2, num_kv_blocks=num_blocks, block_size=_BLOCK_SIZE)
    request = Request("alone", prompt, FrameBudget(num_frames, num_frames), sampling)
    sequence = Sequence(request, slot=1, blocks=list(reversed(range(num_blocks))))
    frames: list[Frame] = []
    for start in range(0, len(prompt), _PIECE):
        stop = min(start + _PIECE, len(prompt))
        frames += runner.step(StepPlan(prefill=(PrefillChunk(sequence, start, stop),))).frames
        sequence.num_prefilled = stop
    while len(frames) < num_frames and not frames[-1].is_end:
        sequence.num_frames = len(frames)
        frames += runner.step(StepPlan(decode=(sequence,))).frames
    return [(frame.token_id, *frame.codes) for frame in frames if not frame.is_end]


def reference_draw(logits: Tensor, temperature: float, top_p: float, top_k: int, uniforms: Tensor) -> int:
    """One index of logits [v], by a full sort, as the published sampler is written.

    uniforms: one for each rank; ranks past them are past any top_k.
    """
    order = torch.argsort(logits, descending=True)
    mass = logits[order].softmax(0).cumsum(0).tolist()
    kept = [r for r in range(len(order)) if r == 0 or (mass[r] <= top_p and r < top_k)]
    scaled = logits[order[kept]] / max(temperature, 1e-5)
    race = scaled.softmax(0) / -uniforms[kept].log()
    return int(order[kept[int(race.argmax())]])


@torch.inference_mode()
def reference_columns(
    weights: Weights, model: ModelConfig, prompt: tuple[Column, ...], sampling: SamplingParams, num_frames: int
) -> list[Column]:
    """The first `num_frames` columns (id and codes) that follow `prompt`; ends early at im_end."""
    made: list[Column] = []
    while len(made) < num_frames:
        hidden = _slow_hidden(weights, model, [*prompt, *made])[-1]
        column = _next_column(weights, model, hidden, made, sampling)
        if column is None:
            break
        made.append(column)
    return made


@torch.inference_mode()
def reference_choices(
    weights: Weights, model: ModelConfig, prompt: tuple[Column, ...], sampling: SamplingParams, made: list[Column]
) -> list[Column | None]:
    """What the reference makes after the prompt and each beginning of `made`; None for im_end.

    It equals `made` if and only if `reference_columns` does, and takes one pass over the columns, not one for each.
    """
    hidden = _slow_hidden(weights, model, [*prompt, *made])[len(prompt) - 1 :]
    return [_next_column(weights, model, hidden[i], made[:i], sampling) for i in range(len(made))]


def _next_column(
    weights: Weights, model: ModelConfig, hidden: Tensor, made: list[Column], sampling: SamplingParams
) -> Column | None:
    """The column after `made`, whose last one (or the prompt's) left the slow part in state `hidden`."""
    stages = sampler.codebook_stage(model.num_codebooks)
    uniforms = sampler.noise(torch.tensor([sampling.seed]), torch.tensor([len(made)]), stages)[0]
    window = [column[0] for column in made[1:][-sampler.WINDOW_FRAMES :]]  # the first one is never in it
    logits = weights[f"{SLOW}embeddings.weight"] @ hidden
    allowed = torch.full_like(logits, _NEVER)
    allowed[model.semantic_begin_id : model.semantic_begin_id + model.num_semantic] = 0.0
    allowed[model.im_end_id] = 0.0
    logits = logits + allowed
    token = reference_draw(logits, sampling.temperature, sampling.top_p, sampling.top_k, uniforms[0])
    if token != model.im_end_id and token in window:
        token = reference_draw(logits, sampler.RAS_TEMPERATURE, sampler.RAS_TOP_P, sampling.top_k, uniforms[1])
    if token == model.im_end_id:
        return None
    codes = [token - model.semantic_begin_id]
    for codebook in range(1, model.num_codebooks):
        fast_logits = _fast_logits(weights, model, hidden, codes)
        fast_logits[model.codec.residual_codebook_size :] = _NEVER
        u = uniforms[sampler.codebook_stage(codebook)]
        codes.append(reference_draw(fast_logits, sampling.temperature, sampling.top_p, sampling.top_k, u))
    return token, *codes


def _slow_hidden(weights: Weights, model: ModelConfig, columns: list[Column]) -> Tensor:
    """Hidden states [n, dim] after each of `columns`."""
    table = torch.tensor(columns)
    ids, codes = table[:, 0], table[:, 1:]
    x = weights[f"{SLOW}embeddings.weight"][ids]
    summed = x.clone()
    for i in range(model.num_codebooks):
        summed += weights[f"{FAST}codebook_embeddings.weight"][codes[:, i] + i * model.num_semantic]
    is_semantic = (ids >= model.semantic_begin_id) & (ids < model.semantic_begin_id + model.num_semantic)
    x[is_semantic] = summed[is_semantic] / (model.num_codebooks + 1) ** 0.5
    return _transformer(weights, SLOW, model.text_config, x)


def _fast_logits(weights: Weights, model: ModelConfig, hidden: Tensor, codes: list[int]) -> Tensor:
    if model.has_project_in:
        hidden = weights[f"{FAST}project_in.weight"] @ hidden + weights[f"{FAST}project_in.bias"]
    rows = [hidden, *(weights[f"{FAST}embeddings.weight"][code] for code in codes)]
    last = _transformer(weights, FAST, model.audio_decoder_config, torch.stack(rows))[-1]
    return weights[f"{FAST}output.weight"] @ last


def _transformer(weights: Weights, prefix: str, config: TransformerConfig, x: Tensor) -> Tensor:
    """x [n, dim] through all layers and the final norm."""
    q_width, kv_width = config.n_head * config.head_dim, config.n_local_heads * config.head_dim
    future = torch.ones(len(x), len(x)).triu(1).bool()
    for i in range(config.n_layer):

        def w(name: str, i: int = i) -> Tensor:
            return weights[f"{prefix}layers.{i}.{name}.weight"]

        qkv = _norm(x, w("attention_norm"), config) @ w("attention.wqkv").T
        heads = [part.view(len(x), -1, config.head_dim) for part in torch.split(qkv, [q_width, kv_width, kv_width], 1)]
        q, k, v = (part.transpose(0, 1) for part in heads)  # [heads, n, head_dim]
        if config.attention_qk_norm:
            q, k = _norm(q, w("attention.q_norm"), config), _norm(k, w("attention.k_norm"), config)
        # Neighbouring query heads share a key and value head.
        shared = torch.arange(config.n_head) * config.n_local_heads // config.n_head
        scores = _rotated(q, config) @ _rotated(k, config)[shared].transpose(1, 2) / config.head_dim**0.5
        out = scores.masked_fill(future, _NEVER).softmax(2) @ v[shared]  # [heads, n, head_dim]
        x = x + out.transpose(0, 1).flatten(1) @ w("attention.wo").T
        normed = _norm(x, w("ffn_norm"), config)
        gate = normed @ w("feed_forward.w1").T
        x = x + (gate * gate.sigmoid() * (normed @ w("feed_forward.w3").T)) @ w("feed_forward.w2").T
    return _norm(x, weights[f"{prefix}norm.weight"], config)


def _norm(x: Tensor, weight: Tensor, config: TransformerConfig) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight


def _rotated(x: Tensor, config: TransformerConfig) -> Tensor:
    """Pairs (0, 1), (2, 3), ... of x [heads, n, head_dim] turned by position times frequency, table in bf16."""
    # In fp32 throughout, as the published table is made: in double precision a few of its bf16 entries differ.
    exponents = torch.tensor([i / config.head_dim for i in range(0, config.head_dim, 2)])
    frequencies = 1.0 / torch.tensor(config.rope_base) ** exponents
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    cos, sin = angles.cos().bfloat16().float(), angles.sin().bfloat16().float()
    out = torch.empty_like(x)
    out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
    return out
