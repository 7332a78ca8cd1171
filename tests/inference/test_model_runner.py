from dataclasses import replace

import pytest
import torch

from slackwater_inference.core import FrameBudget, Request, SamplingParams
from slackwater_inference.model.weights import FAST, SLOW, seeded_weights
from slackwater_inference.model_runner import ModelRunner
from slackwater_inference.sampler import WINDOW_FRAMES
from slackwater_inference.scheduler import Limits, Scheduler
from slackwater_inference.testing.model import micro, reference_columns
from slackwater_inference.text.prompt import PromptBuilder
from slackwater_inference.text.tokenizer import ByteTokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = micro()
PREFIX = PromptBuilder(MODEL, ByteTokenizer()).prefix(None)


def request(name, text="some words", frames=20, model=MODEL, **sampling):
    prompt = PromptBuilder(model, ByteTokenizer()).prompt(text)
    return Request(name, prompt, FrameBudget(frames, frames), SamplingParams(**sampling))


class Bench:
    """A scheduler and a runner stepped by hand."""

    def __init__(self, model=MODEL, weights=None, slots=8, max_prefill_tokens=64, piece=64, num_blocks=512):
        self.scheduler = Scheduler(Limits(slots, 64, 4, num_blocks, max_prefill_tokens, min(piece, max_prefill_tokens)))
        self.runner = ModelRunner(
            model,
            weights or seeded_weights(model, 0),
            max_running_requests=slots,
            num_kv_blocks=num_blocks,
            block_size=4,
        )
        self.columns = {}

    def cached(self, sequence, num_positions):
        """Keys and values of a sequence's first positions."""
        positions = [block * 4 + i for block in sequence.blocks for i in range(4)][:num_positions]
        return self.runner._cache[:, positions].clone()

    def step(self):
        plan = self.scheduler.plan(0.0)
        result = self.runner.step(plan) if plan else None
        if result is not None:
            for frame in result.frames:
                if not frame.is_end:
                    self.columns.setdefault(frame.request_id, []).append((frame.token_id, *frame.codes))
            self.scheduler.commit(plan, result.frames, 0.0)
            self.scheduler.check()
        return plan

    def run(self, *requests):
        for each in requests:
            self.scheduler.add(each)
        while self.step():
            pass
        return self.columns


def test_agrees_with_the_plain_reference_when_it_samples():
    weights = seeded_weights(MODEL, 5)
    asked = request("a", "plain", 32, temperature=0.9, top_p=0.9, seed=5)

    made = Bench(weights=weights).run(asked)["a"]

    assert made == reference_columns(weights, MODEL, asked.prompt, asked.sampling, 32)


def test_a_request_makes_the_same_tokens_alone_and_among_63_others_that_come_and_go():
    watched = request("a", "the one we watch", 60, seed=7)
    alone = Bench(piece=16).run(watched)["a"]
    # 64 slots that are always full, fewer blocks than they could want, prompts in pieces, shared ones, aborts.
    bench = Bench(slots=64, max_prefill_tokens=64, piece=16, num_blocks=1600)
    others = iter(
        request(f"o{i}", "the one we " if i % 3 else "other " * (1 + i % 9), 30 + i % 40, seed=100 + i)
        for i in range(130)
    )
    for _ in range(70):
        bench.scheduler.add(next(others))
    while bench.scheduler.num_running < 64:
        bench.step()
    for name in ("o3", "o4"):
        bench.scheduler.abort(name)
    bench.scheduler.add(watched, goes_on=True)  # ahead of those who wait

    batches = []
    while plan := bench.step():
        batches.append(len(plan.decode))
        if bench.scheduler.num_waiting < 4 and (late := next(others, None)) is not None:
            bench.scheduler.add(late)
        if len(batches) % 9 == 0:
            bench.scheduler.abort(f"o{len(batches)}")

    assert bench.columns["a"] == alone
    assert len(alone) == 60
    assert sum(size >= 60 for size in batches) > 30


@pytest.mark.parametrize("common", [pytest.param(4, id="none"), pytest.param(20, id="one"), pytest.param(60, id="all")])
def test_a_prompt_found_in_the_cache_gives_the_tokens_of_one_that_is_computed(common):
    text = "long enough for several pieces of a prompt, as a voice has them"
    asked = request("a", text, 30, temperature=1.0, top_p=1.0, seed=3)
    cold, warm = Bench(piece=16), Bench(piece=16)
    warm.run(request("b", text[:common] + "!", 5, seed=9))

    num_computed, kept = [], []
    for bench in (cold, warm):
        sequence = bench.scheduler.add(asked)
        num_computed.append(0)
        while plan := bench.step():
            num_computed[-1] += sum(c.stop - c.start for c in plan.prefill)
            if sequence.is_prefilled and len(kept) < len(num_computed):
                kept.append(bench.cached(sequence, len(asked.prompt)))

    # Bit for bit, since the pieces have the same bounds either way.
    assert torch.equal(kept[0], kept[1])
    assert warm.columns["a"] == cold.columns["a"]
    assert num_computed[0] == len(asked.prompt)
    num_common = len(PREFIX) + common
    assert num_computed[1] == len(asked.prompt) - num_common // 16 * 16


def test_sequences_that_share_a_prompt_as_it_is_computed_make_the_tokens_of_each_alone():
    asked = [request(f"r{i}", "the same words for all of them", 12, seed=i) for i in range(5)]
    alone = {each.request_id: Bench(piece=16).run(each)[each.request_id] for each in asked}
    together = Bench(max_prefill_tokens=32, piece=16)

    assert together.run(*asked) == alone


def test_a_frame_that_waited_for_a_block_is_the_frame_it_would_have_been():
    asked = [replace(request(f"r{i}", "x", 30, seed=i), budget=FrameBudget(1, 30)) for i in range(3)]
    alone = {each.request_id: Bench().run(each)[each.request_id] for each in asked}
    crowded = Bench(num_blocks=34)  # each needs 13 for its prompt and up to 21 in all
    for each in asked:
        crowded.scheduler.add(each)

    num_kept_waiting = 0
    while plan := crowded.step():
        num_kept_waiting += plan.num_kept_waiting

    assert crowded.columns == alone
    assert num_kept_waiting > 0


def test_the_seed_decides_the_tokens():
    made = Bench().run(request("a", seed=1), request("b", seed=1), request("c", seed=2))

    assert made["a"] == made["b"]
    assert made["a"] != made["c"]


def test_a_prompt_in_chunks_gives_the_tokens_of_a_prompt_at_once():
    text = "long enough for several chunks of a prompt"

    whole = Bench(max_prefill_tokens=512).run(request("a", text))["a"]

    assert Bench(max_prefill_tokens=16).run(request("a", text))["a"] == whole


def test_the_window_holds_the_last_frames_but_never_the_first_one():
    bench = Bench(slots=2, max_prefill_tokens=512)
    bench.scheduler.add(request("a", frames=16, seed=3))
    bench.scheduler.add(request("b", "longer than the other one", frames=16, seed=4))
    windows = {name: [(0,) * MODEL.column_width] * WINDOW_FRAMES for name in "ab"}

    for _ in range(15):
        bench.step()
        for name, slot in (("a", 0), ("b", 1)):
            expected = (windows[name] + bench.columns[name][1:])[-WINDOW_FRAMES:]
            assert [tuple(column) for column in bench.runner._window[slot].tolist()] == expected


def test_a_slot_remembers_nothing_of_its_last_sequence():
    fresh = Bench(slots=1).run(request("b", seed=5))["b"]

    reused = Bench(slots=1).run(request("a", "someone else", 30, seed=4), request("b", seed=5))["b"]

    assert reused == fresh


def test_the_sequence_ends_at_im_end_and_that_is_no_frame():
    weights = seeded_weights(MODEL, 0)
    im_end = f"{SLOW}embeddings.weight", MODEL.im_end_id
    asked = request("a", "until it stops", 40, temperature=0.0)
    # Without im_end in the prompt, its row can be changed without changing what comes before it.
    asked = replace(asked, prompt=tuple(c for c in asked.prompt if c[0] != MODEL.im_end_id))
    endless = Bench(weights=weights).run(asked)["a"]
    # The head is tied: with three times the row of a token that comes up, im_end wins where that would.
    weights[im_end[0]][im_end[1]] = 3 * weights[im_end[0]][endless[6][0]]
    bench = Bench(weights=weights)
    bench.scheduler.add(asked)

    num_steps = 0
    while bench.step():
        num_steps += 1

    made = bench.columns.get("a", [])
    num_prompt_steps = -(-len(asked.prompt) // 64)
    assert made == reference_columns(weights, MODEL, asked.prompt, asked.sampling, 40)
    assert len(made) <= 6
    assert num_steps == num_prompt_steps + len(made)


def test_residual_codes_stay_within_what_the_codec_holds():
    weights = seeded_weights(MODEL, 0)
    weights[f"{FAST}output.weight"][MODEL.codec.residual_codebook_size :] *= 100.0

    made = Bench(weights=weights).run(request("a", frames=30))["a"]

    assert max(code for _, _, *residual in made for code in residual) < MODEL.codec.residual_codebook_size


def test_runs_in_bfloat16_with_temperature_and_top_p_in_that_type():
    model = MODEL.model_copy(update={"weight_dtype": "bfloat16"})
    bench = Bench(model)

    made = bench.run(request("a", model=model, frames=12, temperature=0.7))["a"]

    assert len(made) == 12
    assert bench.runner._temperature[0].float().item() == 0.69921875
    assert bench.runner._ras_top_p == 0.8984375


def test_refuses_weights_that_do_not_fit_and_names_each():
    weights = seeded_weights(MODEL, 0)
    del weights[f"{FAST}norm.weight"]
    weights["stray"] = torch.zeros(1)
    weights[f"{SLOW}norm.weight"] = torch.ones(31)

    with pytest.raises(ValueError, match=r"extra stray; missing audio_decoder.norm.weight; .* must be \[32\]"):
        Bench(weights=weights)
