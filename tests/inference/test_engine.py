import asyncio
import contextlib
import time

import pytest
import torch

from slackwater_inference.checkpoint import Loaded
from slackwater_inference.codec.weights import seeded_codec_weights
from slackwater_inference.config import EngineConfig
from slackwater_inference.core import (
    BadRequest,
    Draining,
    EngineFailed,
    Frame,
    QueueFull,
    Reference,
    SamplingParams,
    Speech,
    Stage,
    StepResult,
    Voice,
)
from slackwater_inference.engine import Engine
from slackwater_inference.model.weights import seeded_weights
from slackwater_inference.testing.model import micro
from slackwater_inference.text.tokenizer import ByteTokenizer

MODEL = micro()
TEXT = "a text of some forty characters, or so.."  # 40 bytes: 38 frames
VOICE = Voice("v1", (Reference("what it says", tuple((i % 40, i % 24, i % 7) for i in range(50))),))
CODEC_WEIGHTS = seeded_codec_weights(MODEL.codec, MODEL.num_codebooks, MODEL.num_semantic, 0)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def new_engine(model=MODEL, **settings):
    loaded = Loaded(model, seeded_weights(model, 0), CODEC_WEIGHTS, ByteTokenizer(), "memory")
    return Engine(EngineConfig(**{"max_running_requests": 2, "max_queued": 2, **settings}), loaded)


@contextlib.contextmanager
def engine(model=MODEL, **settings):
    built = new_engine(model, **settings)
    built.start()
    try:
        yield built
    finally:
        built.stop()


def seeded(seed, **fields):
    return Speech(sampling=SamplingParams(seed=seed), **fields)


def say(built, *parts, speech=None, end=True):
    stream = built.open(speech or Speech())
    for part in parts:
        stream.say(part)
    if end:
        stream.end()
    return stream


async def listen(stream):
    try:
        return [chunk async for chunk in stream]
    finally:
        stream.close()


async def read(stream, num_frames):
    """Read until so many frames have come."""
    chunks = []
    while sum(chunk.num_frames for chunk in chunks) < num_frames:
        chunks.append(await anext(stream))
    return chunks


def samples(chunks):
    return torch.frombuffer(bytearray(b"".join(c.samples for c in chunks)), dtype=torch.float32)


def num_frames(chunks):
    return sum(chunk.num_frames for chunk in chunks)


def recorded(built):
    """The codes that the engine makes from now on, by part."""
    codes = {}
    add_frame = type(built._jobs)._add_frame.__get__(built._jobs)

    def record(job, part, frame):
        codes.setdefault(part.index, []).append(frame)
        add_frame(job, part, frame)

    built._jobs._add_frame = record
    return codes


async def codes_of(built, parts, speech):
    codes = recorded(built)
    await listen(say(built, *parts, speech=speech))
    return codes


def assert_same_sound(one, other):
    # Tokens are equal; a codec batch of another size may round differently.
    torch.testing.assert_close(samples(one), samples(other), atol=1e-5, rtol=0)


async def until(condition, timeout_s=20.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        await asyncio.sleep(0.005)


def is_empty(built):
    status = built.status()
    return (status.running, status.waiting, status.kv_used_ratio) == (0, 0, 0.0) and built.is_idle


def metric(built, name, **labels):
    return built.metrics.registry.get_sample_value(name, labels)


# One part


async def test_a_text_becomes_chunks_of_its_expected_length():
    with engine() as built:
        chunks = await listen(say(built, TEXT))

    sizes = [chunk.num_frames for chunk in chunks]
    assert sizes[0] == 4  # first audio
    assert sum(sizes) == 38
    assert max(sizes) <= 16
    assert all(len(chunk.samples) == chunk.num_frames * MODEL.codec.frame_samples * 4 for chunk in chunks)
    assert is_empty(built)


async def test_a_caller_may_want_more_frames_before_the_first_audio():
    with engine(pace_frames_per_s=40.0) as built:
        stream = say(built, TEXT, speech=Speech(min_chunk_frames=8))

        assert (await anext(stream)).num_frames == 8
        stream.close()


async def test_the_caller_can_bound_the_frames_of_each_part():
    with engine() as built:
        chunks = await listen(say(built, TEXT, TEXT, speech=Speech(max_new_tokens=5)))

    assert [sum(c.num_frames for c in chunks if c.part == part) for part in (0, 1)] == [5, 5]


async def test_the_same_seed_gives_the_same_sound_alone_or_in_a_crowd():
    with engine(max_running_requests=4) as built:
        alone = await listen(say(built, TEXT, speech=seeded(1)))
        crowd = [say(built, TEXT * (2 - i % 2), speech=seeded(i)) for i in range(4)]
        heard = await asyncio.gather(*map(listen, crowd))

    assert_same_sound(heard[1], alone)
    with pytest.raises(AssertionError):
        assert_same_sound(heard[3], alone)


async def test_without_settings_every_stream_has_a_seed_of_its_own():
    with engine() as built:
        one, other = [await listen(say(built, TEXT)) for _ in range(2)]

    with pytest.raises(AssertionError):
        assert_same_sound(one, other)


async def test_warming_up_changes_nothing_that_can_be_heard_or_seen():
    with engine() as cold:
        expected = await listen(say(cold, TEXT, speech=seeded(1)))
    warm = new_engine()
    warm.warm_up()
    assert is_empty(warm)
    assert warm.status().frames_total == 0

    warm.start()
    try:
        assert_same_sound(await listen(say(warm, TEXT, speech=seeded(1))), expected)
    finally:
        warm.stop()


async def test_every_stream_is_served_when_they_exceed_the_slots():
    with engine(max_running_requests=2, max_queued=6) as built:
        heard = await asyncio.gather(*(listen(say(built, TEXT)) for _ in range(8)))

    assert [num_frames(chunks) for chunks in heard] == [38] * 8


# Several parts


async def test_parts_are_spoken_in_order_and_every_chunk_says_whose_it_is():
    with engine() as built:
        stream = built.open(Speech())
        assert [stream.say(text) for text in ("first part", TEXT, "last")] == [0, 1, 2]
        stream.end()
        chunks = await listen(stream)

    parts = [chunk.part for chunk in chunks]
    assert parts == sorted(parts)
    assert [sum(c.num_frames for c in chunks if c.part == part) for part in range(3)] == [10, 38, 8]
    assert is_empty(built)


async def test_all_parts_share_one_codec_stream_so_nothing_clicks_between_them():
    with engine() as built:
        codes = recorded(built)
        chunks = await listen(say(built, TEXT, TEXT))

    at_once, _ = built.codec.decode(torch.tensor(codes[0] + codes[1]).T[None], [built.codec.new_state()])
    torch.testing.assert_close(samples(chunks), at_once.flatten(), atol=1e-5, rtol=0)


async def test_a_part_of_its_own_sounds_the_same_whatever_came_before_it():
    """Without conditioning; the first part's noise is not that of the second."""
    with engine() as built:
        speech = seeded(5, condition_on_previous_parts=False)
        one = await codes_of(built, [TEXT, TEXT], speech)
        other = await codes_of(built, ["something else", TEXT], speech)

    assert one[1] == other[1]
    assert one[0] != one[1]


async def test_a_part_is_conditioned_on_the_one_before_it_if_asked():
    with engine() as built:
        after_one = await codes_of(built, ["one thing was said", TEXT], seeded(5))
        after_other = await codes_of(built, ["and another thing.", TEXT], seeded(5))

    assert after_one[1] != after_other[1]


async def test_the_part_before_is_left_out_where_it_would_not_fit():
    with engine(max_length=200) as built:  # prompt and audio of TEXT take 156, with the part before it 260
        chunks = await listen(say(built, TEXT, TEXT, TEXT))

    assert num_frames(chunks) == 3 * 38


async def test_a_stream_can_go_on_after_everything_was_spoken_and_holds_no_slot_meanwhile():
    with engine() as built:
        stream = say(built, TEXT, end=False)
        first = await read(stream, 38)
        await until(lambda: built.status().running == 0)
        assert not built.is_idle

        stream.say("again")
        stream.end()
        rest = await listen(stream)

    assert num_frames(first) == 38
    assert {chunk.part for chunk in rest} == {1}
    assert is_empty(built)


async def test_a_stream_that_is_listened_to_goes_ahead_of_the_queue():
    # A part of one letter has 8 frames; the second one has 6 within the burst, and then keeps its slot.
    with engine(max_running_requests=1, max_queued=1, pace_frames_per_s=0.1, burst_frames=14) as built:
        stream = say(built, "x", end=False)
        await read(stream, 8)
        other = say(built, TEXT)
        await anext(other)
        waiting = say(built, TEXT)
        with pytest.raises(QueueFull):
            say(built, TEXT)

        stream.say("y")  # finds a place nevertheless
        assert built.status().waiting == 2
        other.close()

        assert (await anext(stream)).part == 1
        assert built.status().waiting == 1
        waiting.close()
        stream.close()
        await until(lambda: built.status().running == 0)


async def test_a_reader_who_does_not_read_keeps_no_slot_and_little_memory():
    with engine(max_unread_frames=50) as built:
        slow = say(built, *[TEXT] * 6)

        await until(lambda: built.status().running == built.status().waiting == 0 and built.status().frames_total)
        made = built.status().frames_total
        heard = await listen(slow)

    assert made == 2 * 38  # the first part with more than 50 frames unread was the last one to begin
    assert num_frames(heard) == 6 * 38
    assert is_empty(built)


async def test_an_ended_stream_without_text_ends_cleanly():
    with engine() as built:
        stream = built.open(Speech())
        stream.end()

        assert await listen(stream) == []
        assert await listen(stream) == []  # the end stays the end
        assert is_empty(built)


@pytest.mark.parametrize("last", ["end", "close"])
async def test_nothing_can_be_said_after_the_end(last):
    with engine() as built:
        stream = built.open(Speech())
        getattr(stream, last)()

        with pytest.raises(ValueError, match="say must come before end and close"):
            stream.say(TEXT)


# Voices


async def test_a_voice_is_heard_and_its_prefix_is_computed_once():
    with engine(prefill_piece=16) as built:
        speech = seeded(1, voice=VOICE)
        without = await codes_of(built, [TEXT], seeded(1))
        first = await codes_of(built, [TEXT], speech)
        spared = metric(built, "tts_prefix_hit_tokens_total")
        again = await codes_of(built, [TEXT], speech)
        other_tenant = await codes_of(built, [TEXT], seeded(1, voice=VOICE, tenant="t"))

        assert first == again == other_tenant
        assert first != without
        # All of the prompt but its last piece, for the same tenant only.
        num_prompt = len(built._jobs._prompts.prompt(TEXT, VOICE))
        assert metric(built, "tts_prefix_hit_tokens_total") - spared == (num_prompt - 1) // 16 * 16


async def test_a_held_prefix_is_computed_before_the_text_comes_and_kept_until_the_stream_closes():
    with engine(prefill_piece=16) as built:
        stream = built.open(Speech(voice=VOICE), hold_prefix=True)
        await until(lambda: metric(built, "tts_step_seconds_count", phase="prefill", batch_bucket="16") == 1)
        held = built.status().kv_used_ratio

        stream.say(TEXT)
        stream.end()
        heard = await listen(stream)

        assert held > 0
        assert built.status().running == 0
        num_prefix = len(built._jobs._prompts.prefix(VOICE))
        assert metric(built, "tts_prefix_hit_tokens_total") == num_prefix // 16 * 16
        assert num_frames(heard) == 38
        await until(lambda: is_empty(built))


async def test_refuses_a_voice_that_the_model_cannot_read():
    foreign = Voice("v2", (Reference("words", ((1, 2),)),))
    long = Voice("v3", (Reference("words", ((1, 2, 3),) * 600),))
    with engine() as built:
        for voice, complaint in ((foreign, "cannot read this voice: a frame must be 3 codes"), (long, "at most 512")):
            with pytest.raises(BadRequest, match=complaint):
                built.open(Speech(voice=voice), hold_prefix=True)
            with pytest.raises(BadRequest, match=complaint):
                say(built, TEXT, speech=Speech(voice=voice)).close()
        for job in built._jobs.all():
            job.stream.close()
        assert is_empty(built)


# Full queues, closed streams, drain, faults


async def test_a_full_queue_refuses_and_says_when_to_come_back():
    # One frame in ten seconds after the burst: nothing ends during this test.
    with engine(max_running_requests=1, max_queued=1, pace_frames_per_s=0.1) as built:
        running, waiting = say(built, TEXT), say(built, TEXT)
        refused = built.open(Speech())

        with pytest.raises(QueueFull) as error:
            refused.say(TEXT)

        # 38 frames at 0.1 frames/s for each of the two ahead, capped at a minute.
        assert error.value.retry_after_s == 60
        waiting.close()
        assert refused.say(TEXT) == 0  # it may try again
        refused.close()
        running.close()
        await until(lambda: is_empty(built))


async def test_the_retry_delay_follows_the_measured_service_rate():
    with engine(max_running_requests=1, max_queued=0) as built:
        await listen(say(built, TEXT))
        say(built, TEXT * 3)

        with pytest.raises(QueueFull) as refused:
            say(built, TEXT)

    assert 1 <= refused.value.retry_after_s <= 10  # one request took well under ten seconds


async def test_closing_a_stream_frees_its_slot_for_the_next_one():
    with engine(max_running_requests=1, max_queued=1, pace_frames_per_s=0.1) as built:
        first = say(built, TEXT, TEXT)
        await anext(first)
        second = say(built, TEXT)

        first.close()
        chunk = await anext(second)
        second.close()

        assert chunk.num_frames == 4
        await until(lambda: is_empty(built))
        assert metric(built, "tts_client_aborts_total", phase="streaming") == 2
        first.close()  # again: nothing happens


async def test_a_request_that_waits_can_be_closed():
    with engine(max_running_requests=1, pace_frames_per_s=0.1) as built:
        running, waiting = say(built, TEXT), say(built, TEXT)
        await anext(running)
        assert 0 < metric(built, "tts_queue_age_seconds", model="micro") < 20

        waiting.close()

        assert built.status().waiting == 0
        assert metric(built, "tts_queue_age_seconds", model="micro") == 0
        assert metric(built, "tts_client_aborts_total", phase="queued") == 1


async def test_closing_streams_at_random_moments_leaves_nothing_behind():
    with engine(max_running_requests=3, max_queued=40) as built:

        async def leave_early(stream, num_chunks):
            for _ in range(num_chunks):
                await anext(stream)
            await asyncio.sleep(0.002 * num_chunks)
            stream.close()

        speeches = [seeded(i, voice=VOICE if i % 2 else None) for i in range(20)]
        streams = [say(built, TEXT, TEXT, speech=speech, end=i % 3 > 0) for i, speech in enumerate(speeches)]
        watched = say(built, TEXT, speech=seeded(1))
        _, heard = await asyncio.gather(
            asyncio.gather(*(leave_early(s, i % 4) for i, s in enumerate(streams))), listen(watched)
        )
        alone = await listen(say(built, TEXT, speech=seeded(1)))

        await until(lambda: is_empty(built))
        assert_same_sound(heard, alone)


async def test_is_not_idle_while_a_caller_has_not_closed_its_stream():
    with engine() as built:
        stream = say(built, TEXT)
        await read(stream, 38)
        await until(lambda: built.status().running == 0)
        assert not built.is_idle

        stream.close()

        assert built.is_idle
        assert metric(built, "tts_client_aborts_total", phase="streaming") is None


async def test_draining_opens_no_stream_and_lets_the_open_ones_go_on():
    with engine(max_running_requests=1) as built:
        streams = [say(built, TEXT, end=False), say(built, TEXT)]

        built.drain()

        assert built.status().stage is Stage.DRAINING
        with pytest.raises(Draining):
            built.open(Speech())
        streams[0].say("more")
        streams[0].end()
        heard = await asyncio.gather(*map(listen, streams))
        assert [num_frames(chunks) for chunks in heard] == [38 + 8, 38]
        assert is_empty(built)


class BrokenRunner:
    def step(self, plan):
        raise RuntimeError("planted")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the planted error
async def test_a_failure_breaks_open_streams_and_is_said_to_new_ones():
    with engine(pace_frames_per_s=0.1) as built:
        stream = say(built, TEXT)
        await anext(stream)
        silent = built.open(Speech())
        built._runner = BrokenRunner()
        other = say(built, TEXT)

        for broken in (stream, other, silent):
            with pytest.raises(EngineFailed):
                await listen(broken)

        assert built.status().stage is Stage.FAILED
        with pytest.raises(EngineFailed):
            built.open(Speech())
        with pytest.raises(EngineFailed):
            silent.say(TEXT)


async def test_stopping_breaks_open_streams():
    with engine(pace_frames_per_s=0.1) as built:
        stream = say(built, TEXT)
        await anext(stream)

        built.stop()

        with pytest.raises(EngineFailed):
            await listen(stream)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param("", "text is empty", id="empty"),
        pytest.param(" \n\t", "text is empty", id="blank"),
        pytest.param("x" * 201, "at most 200 UTF-8 bytes, got 201", id="too many bytes"),
        pytest.param("é" * 101, "at most 200 UTF-8 bytes, got 202", id="bytes, not letters"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
async def test_refuses_a_text_it_cannot_speak_and_speaks_the_others(text, complaint, is_first):
    with engine(max_text_bytes=200) as built:
        stream = built.open(Speech())
        if not is_first:
            stream.say(TEXT)
        with pytest.raises(BadRequest, match=complaint):
            stream.say(text)
        stream.say("fine")
        stream.end()

        assert num_frames(await listen(stream)) == 8 + 38 * (not is_first)


@pytest.mark.parametrize("is_first", [True, False])
async def test_refuses_a_text_whose_audio_does_not_fit_when_it_comes(is_first):
    with engine(max_text_bytes=400) as built:
        stream = say(built, *[] if is_first else [TEXT, TEXT], end=False)
        most = 512 - len(built._jobs._prompts.prompt(""))

        with pytest.raises(BadRequest, match="need 513 positions, at most 512 are kept"):
            stream.say("x" * (100 * most // 193 + 1))
        stream.say("x" * (100 * most // 193))

        stream.close()


async def test_refuses_a_bound_that_leaves_no_frame():
    with engine() as built:
        stream = built.open(Speech(max_new_tokens=0))

        with pytest.raises(BadRequest, match="at least 1, got 0"):
            stream.say(TEXT)
        stream.close()


async def test_a_fault_of_a_later_part_breaks_its_stream_and_no_other():
    with engine() as built:
        stream, other = say(built, TEXT, TEXT), say(built, TEXT)
        request_of = built._jobs.request
        built._jobs.request = lambda request_id, *rest: (
            _refuse() if request_id == f"{stream.request_id}.1" else request_of(request_id, *rest)
        )

        with pytest.raises(BadRequest, match="planted"):
            await listen(stream)

        assert num_frames(await listen(other)) == 38
        assert is_empty(built)


def _refuse():
    raise BadRequest("planted")


# What is counted


async def test_counts_what_it_did():
    with engine() as built:
        await listen(say(built, TEXT))
        await until(lambda: is_empty(built))
        on_cpu = {"model": "micro", "gpu_model": "cpu"}
        by_tier = {"model": "micro", "tier": "default"}

        assert metric(built, "tts_tokens_total", **on_cpu, kind="semantic") == 38
        assert metric(built, "tts_tokens_total", **on_cpu, kind="codebook") == 76
        assert metric(built, "tts_audio_seconds_total", **on_cpu) == pytest.approx(38 / MODEL.codec.frame_rate_hz)
        assert metric(built, "tts_first_audio_seconds_count", **on_cpu, tier="default") == 1
        assert metric(built, "tts_first_audio_from_text_seconds_count", **on_cpu, tier="default") == 1
        assert metric(built, "tts_request_seconds_count", **by_tier) == 1
        assert metric(built, "tts_queue_seconds_count", **by_tier) == 1
        assert metric(built, "tts_realtime_ratio_count", **on_cpu) == 1
        assert metric(built, "tts_stream_gap_seconds_count", model="micro") == 1
        assert metric(built, "tts_parts_total", reason="length") == 1
        assert metric(built, "tts_slots", model="micro") == 2
        assert metric(built, "tts_step_seconds_count", phase="decode", batch_bucket="1") == 37
        assert built.status().frames_total == 38
        assert built.status().step_s > 0


async def test_counts_each_tier_apart_and_the_time_from_the_first_text():
    with engine() as built:
        stream = built.open(Speech(tier="elevated"))
        await asyncio.sleep(0.2)
        stream.say(TEXT)
        stream.end()
        await listen(stream)
        labels = {"model": "micro", "gpu_model": "cpu", "tier": "elevated"}

        from_opening = metric(built, "tts_first_audio_seconds_sum", **labels)
        assert from_opening - metric(built, "tts_first_audio_from_text_seconds_sum", **labels) >= 0.2


class Parrot:
    """A model that says one thing only."""

    def step(self, plan):
        made = [*plan.decode, *(chunk.sequence for chunk in plan.prefill if chunk.is_last)]
        return StepResult([Frame(each.request.request_id, 264, (1, 2, 3)) for each in made], 0.0, 0.0)


async def test_a_loop_ends_the_part_and_the_next_one_does_not_go_on_from_it():
    model = micro().model_copy(update={"stop_at_expected_length": False})
    with engine(model) as built:
        built._runner = Parrot()
        asked = []
        request_of = built._jobs.request
        built._jobs.request = lambda *args: asked.append(args) or request_of(*args)

        chunks = await listen(say(built, TEXT, TEXT))

        assert [sum(c.num_frames for c in chunks if c.part == part) for part in (0, 1)] == [43, 43]
        assert metric(built, "tts_parts_total", reason="loop") == 2
        assert all(args[4] is None for args in asked if len(args) > 4)


async def test_the_loop_guard_is_off_for_seeded_voices():
    with engine() as built:
        built._runner = Parrot()

        assert num_frames(await listen(say(built, TEXT * 2))) == 75
