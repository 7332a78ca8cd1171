"""Turns a step's plan into tensors, runs the model and returns the frames.

Owns the memory: the paged KV cache, each slot's window, last column and sampling settings.  Decides
nothing about who runs.  Called by the engine, from one thread.
"""

import math
import time
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from slackwater_inference import sampler
from slackwater_inference.batch import PrefillChunk, Sequence, StepPlan
from slackwater_inference.config import ModelConfig
from slackwater_inference.core import Frame, StepResult
from slackwater_inference.model.fast import FastTransformer
from slackwater_inference.model.slow import PagedBatch, SlowTransformer
from slackwater_inference.model.weights import Weights, check_weights
from slackwater_kernels.prev_tokens import prev_tokens_shift_inplace


class ModelRunner:
    """The model with its caches, for up to `max_running_requests` sequences in slots."""

    def __init__(
        self, model: ModelConfig, weights: Weights, *, max_running_requests: int, num_kv_blocks: int, block_size: int
    ) -> None:
        check_weights(weights, model)
        self._model = model
        self._slow = SlowTransformer(weights, model)
        self._fast = FastTransformer(weights, model, max_running_requests)
        self._dtype = getattr(torch, model.weight_dtype)
        self._block_size = block_size
        config = model.text_config
        self._cache = torch.zeros(
            (config.n_layer, num_kv_blocks * block_size, 2, config.n_local_heads, config.head_dim), dtype=self._dtype
        )
        slots = max_running_requests
        self._block_table = torch.zeros((slots, math.ceil(config.max_seq_len / block_size)), dtype=torch.int64)
        self._window = torch.zeros((slots, sampler.WINDOW_FRAMES, model.column_width), dtype=torch.int32)
        self._last = torch.zeros((slots, model.column_width), dtype=torch.int32)
        # In the model's dtype, as in the reference: 0.7 in bf16 is 0.69921875.
        self._temperature = torch.zeros((slots, 1), dtype=self._dtype)
        self._top_p = torch.zeros((slots, 1), dtype=self._dtype)
        self._ras_top_p = float(torch.tensor(sampler.RAS_TOP_P, dtype=self._dtype))
        self._top_k = torch.zeros((slots, 1), dtype=torch.int64)
        self._seed = torch.zeros(slots, dtype=torch.int64)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Run one step: a frame for each sequence that decodes, and the first one of each whose prompt is complete."""
        began_s = time.perf_counter()
        first = [(c.sequence, h) for c, h in [(c, self._prefill(c)) for c in plan.prefill] if c.is_last]
        prefilled_s = time.perf_counter()
        hidden = [self._decode(plan.decode)] if plan.decode else []
        sequences = [*plan.decode, *(sequence for sequence, _ in first)]
        frames: list[Frame] = []
        if sequences:
            frames = self._make_frames(sequences, torch.cat([*hidden, *(h for _, h in first)]), num_new=len(first))
        return StepResult(frames, prefilled_s - began_s, time.perf_counter() - prefilled_s)

    def _prefill(self, chunk: PrefillChunk) -> Tensor:
        """Put a chunk of a prompt into the cache; returns the last position's hidden state, [1, dim]."""
        sequence = chunk.sequence
        if chunk.is_last:
            self._reset(sequence)
        columns = torch.tensor(sequence.request.prompt[chunk.start : chunk.stop])[None]  # [1, n, cw]
        positions = torch.arange(chunk.start, chunk.stop)[None]  # [1, n]
        num_blocks = math.ceil(chunk.stop / self._block_size)
        batch = self._paged_batch(torch.tensor(sequence.blocks[:num_blocks])[None], positions)
        return self._slow.forward(columns, batch, self._cache)[:, -1]

    def _decode(self, sequences: SequenceOf[Sequence]) -> Tensor:
        """Feed each sequence's last column; returns the hidden states, [b, dim]."""
        slots = torch.tensor([s.slot for s in sequences])
        for s in sequences:
            if s.num_frames == 1 or s.next_position % self._block_size == 0:  # its first frame, or a new block
                self._block_table[s.slot, : len(s.blocks)] = torch.tensor(s.blocks)
        last = torch.tensor([s.next_position for s in sequences])
        num_blocks = int(last.max()) // self._block_size + 1
        batch = self._paged_batch(self._block_table[slots, :num_blocks], last[:, None])
        return self._slow.forward(self._last[slots][:, None].long(), batch, self._cache)[:, 0]

    def _paged_batch(self, table: Tensor, positions: Tensor) -> PagedBatch:
        """Where `positions` int64 [b, n] lie, by rows of block numbers int64 [b, num_blocks]."""
        read = (table[:, :, None] * self._block_size + torch.arange(self._block_size)).flatten(1)  # [b, L]
        may_look = torch.arange(read.shape[1]) <= positions[:, :, None]  # [b, n, L]
        mask = torch.zeros(may_look.shape, dtype=self._dtype).masked_fill_(~may_look, float("-inf"))
        return PagedBatch(positions, read.gather(1, positions).flatten(), read, mask[:, None])

    def _make_frames(self, sequences: SequenceOf[Sequence], hidden: Tensor, num_new: int) -> list[Frame]:
        """Sample semantic tokens and residual codes for hidden [b, dim], whose last `num_new` rows are first frames."""
        num_codebooks, num_old = self._model.num_codebooks, len(sequences) - num_new
        slots = torch.tensor([s.slot for s in sequences])
        steps = torch.tensor([s.num_frames for s in sequences])
        temperature, top_p = self._temperature[slots].float(), self._top_p[slots].float()
        top_k = self._top_k[slots]
        noise = sampler.noise(self._seed[slots], steps, sampler.codebook_stage(num_codebooks))

        best = sampler.candidates(self._slow.logits(hidden))
        index = sampler.draw(best, temperature, top_p, top_k, noise[:, sampler.STAGE_NORMAL])
        high = sampler.draw(
            best,
            torch.full_like(temperature, sampler.RAS_TEMPERATURE),
            torch.full_like(top_p, self._ras_top_p),
            top_k,
            noise[:, sampler.STAGE_HIGH],
        )
        window = self._window[slots]  # a copy: [b, W, cw]
        again = sampler.repeats(self._slow.head_ids[index], window, index < self._model.num_semantic)
        again[num_old:] = False  # the first frame is drawn without a window
        index = torch.where(again, high, index)

        # im_end's index is the one past the codes; its row's fast codes are thrown away.
        code = index.clamp_max(self._model.num_semantic - 1)
        codes = [code]
        logits = self._fast.first_logits(hidden, code)
        for codebook in range(1, num_codebooks):
            uniforms = noise[:, sampler.codebook_stage(codebook)]
            codes.append(sampler.draw(sampler.candidates(logits), temperature, top_p, top_k, uniforms))
            if codebook + 1 < num_codebooks:
                logits = self._fast.next_logits(codes[-1], codebook)

        columns = torch.stack((self._slow.head_ids[index], *codes), dim=1).int()  # [b, cw]
        self._last[slots] = columns
        if num_old:  # the first frame is not put into the window either
            kept = window[:num_old]
            prev_tokens_shift_inplace(kept, columns[:num_old])
            self._window[slots[:num_old]] = kept
        im_end = self._model.im_end_id
        return [
            Frame(s.request.request_id, token_id, () if token_id == im_end else tuple(frame_codes))
            for s, (token_id, *frame_codes) in zip(sequences, columns.tolist(), strict=True)
        ]

    def _reset(self, sequence: Sequence) -> None:
        """Make a slot ready for its new sequence."""
        slot, sampling = sequence.slot, sequence.request.sampling
        self._window[slot] = 0
        self._block_table[slot] = 0
        self._temperature[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = sampling.top_k
        self._seed[slot] = sampling.seed
