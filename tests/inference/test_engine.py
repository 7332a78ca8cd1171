import asyncio
import contextlib
import time

import pytest
import torch

from slackwater_inference.config import EngineConfig
from slackwater_inference.core import BadRequest, Draining, EngineFailed, QueueFull, Stage
from slackwater_inference.engine import Engine
from slackwater_inference.testing import micro

MODEL = micro()
TEXT = "a text of some forty characters, or so.."  # 40 bytes: 38 frames


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextlib.contextmanager
def engine(model=MODEL, **settings):
    built = Engine(EngineConfig(**{"max_running_requests": 2, "max_queued": 2, **settings}), model)
    built.start()
    try:
        yield built
    finally:
        built.stop()


async def listen(stream):
    return [chunk async for chunk in stream]


def assert_same_sound(one, other):
    a, b = (torch.frombuffer(bytearray(b"".join(c.pcm for c in chunks)), dtype=torch.int16) for chunks in (one, other))
    # Tokens are equal; a codec batch of another size may round a sample the other way.
    torch.testing.assert_close(a, b, atol=1, rtol=0)


async def until(condition, timeout_s=20.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        await asyncio.sleep(0.005)


def is_empty(built):
    status = built.status()
    return (status.running, status.waiting, status.kv_used_ratio) == (0, 0, 0.0) and built.is_idle


async def test_a_text_becomes_chunks_of_its_expected_length():
    with engine() as built:
        chunks = await listen(built.submit(TEXT, seed=1))

    sizes = [chunk.num_frames for chunk in chunks]
    assert sizes[0] == 4  # first audio
    assert sum(sizes) == 38
    assert max(sizes) <= 16
    assert all(len(chunk.pcm) == chunk.num_frames * MODEL.codec.frame_samples * 2 for chunk in chunks)
    assert is_empty(built)


async def test_the_same_seed_gives_the_same_sound_alone_or_in_a_crowd():
    with engine(max_running_requests=4) as built:
        alone = await listen(built.submit(TEXT, seed=1))
        crowd = [built.submit(TEXT * (2 - i % 2), seed=i) for i in range(4)]
        heard = await asyncio.gather(*map(listen, crowd))

    assert_same_sound(heard[1], alone)
    with pytest.raises(AssertionError):
        assert_same_sound(heard[3], alone)


async def test_warming_up_changes_nothing_that_can_be_heard_or_seen():
    with engine() as cold:
        expected = await listen(cold.submit(TEXT, seed=1))
    warm = Engine(EngineConfig(max_running_requests=2), MODEL)
    warm.warm_up()
    assert is_empty(warm)
    assert warm.status().frames_total == 0

    warm.start()
    try:
        assert_same_sound(await listen(warm.submit(TEXT, seed=1)), expected)
    finally:
        warm.stop()


async def test_every_request_is_served_when_they_exceed_the_slots():
    with engine(max_running_requests=2, max_queued=6) as built:
        heard = await asyncio.gather(*(listen(built.submit(TEXT)) for _ in range(8)))

    assert [sum(c.num_frames for c in chunks) for chunks in heard] == [38] * 8


async def test_a_full_queue_refuses_and_says_when_to_come_back():
    # One frame in ten seconds after the burst: nothing ends during this test.
    with engine(max_running_requests=1, max_queued=1, pace_frames_per_s=0.1) as built:
        running, waiting = built.submit(TEXT), built.submit(TEXT)

        with pytest.raises(QueueFull) as refused:
            built.submit(TEXT)

        # 38 frames at 0.1 frames/s for each of the two ahead, capped at a minute.
        assert refused.value.retry_after_s == 60
        waiting.close()
        built.submit(TEXT).close()
        running.close()
        await until(lambda: is_empty(built))


async def test_the_retry_delay_follows_the_measured_service_rate():
    with engine(max_running_requests=1, max_queued=0) as built:
        await listen(built.submit(TEXT))
        built.submit(TEXT * 3)

        with pytest.raises(QueueFull) as refused:
            built.submit(TEXT)

    assert 1 <= refused.value.retry_after_s <= 10  # one request took well under ten seconds


async def test_closing_a_stream_frees_its_slot_for_the_next_one():
    with engine(max_running_requests=1, max_queued=1, pace_frames_per_s=0.1) as built:
        first = built.submit(TEXT)
        await anext(first)
        second = built.submit(TEXT)

        first.close()
        chunk = await anext(second)
        second.close()

        assert chunk.num_frames == 4
        await until(lambda: is_empty(built))
        aborts = built.metrics.registry.get_sample_value("tts_client_aborts_total", {"phase": "streaming"})
        assert aborts == 2
        first.close()  # again: nothing happens


async def test_a_request_that_waits_can_be_closed():
    with engine(max_running_requests=1, pace_frames_per_s=0.1) as built:
        running, waiting = built.submit(TEXT), built.submit(TEXT)
        await anext(running)

        waiting.close()

        assert built.status().waiting == 0
        assert built.metrics.registry.get_sample_value("tts_client_aborts_total", {"phase": "queued"}) == 1


async def test_closing_streams_at_random_moments_leaves_nothing_behind():
    with engine(max_running_requests=3, max_queued=40) as built:

        async def leave_early(stream, num_chunks):
            for _ in range(num_chunks):
                await anext(stream)
            await asyncio.sleep(0.002 * num_chunks)
            stream.close()

        streams = [built.submit(TEXT * 3, seed=i) for i in range(20)]
        watched = built.submit(TEXT, seed=1)
        _, heard = await asyncio.gather(
            asyncio.gather(*(leave_early(s, i % 4) for i, s in enumerate(streams))), listen(watched)
        )
        alone = await listen(built.submit(TEXT, seed=1))

        await until(lambda: is_empty(built))
        assert_same_sound(heard, alone)


async def test_draining_refuses_the_new_and_finishes_the_accepted():
    with engine(max_running_requests=1) as built:
        streams = [built.submit(TEXT), built.submit(TEXT)]

        built.drain()

        assert built.status().stage is Stage.DRAINING
        with pytest.raises(Draining):
            built.submit(TEXT)
        heard = await asyncio.gather(*map(listen, streams))
        assert [sum(c.num_frames for c in chunks) for chunks in heard] == [38, 38]
        await until(lambda: built.is_idle)


class BrokenRunner:
    def step(self, plan):
        raise RuntimeError("planted")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the planted error
async def test_a_failure_breaks_open_streams_and_is_said_to_new_ones():
    with engine(pace_frames_per_s=0.1) as built:
        stream = built.submit(TEXT)
        await anext(stream)
        built._runner = BrokenRunner()
        other = built.submit(TEXT)

        for broken in (stream, other):
            with pytest.raises(EngineFailed):
                await listen(broken)

        assert built.status().stage is Stage.FAILED
        with pytest.raises(EngineFailed):
            built.submit(TEXT)


async def test_stopping_breaks_open_streams():
    with engine(pace_frames_per_s=0.1) as built:
        stream = built.submit(TEXT)
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
async def test_refuses_a_text_it_cannot_speak(text, complaint):
    with engine(max_text_bytes=200) as built, pytest.raises(BadRequest, match=complaint):
        built.submit(text)


async def test_refuses_a_text_whose_audio_does_not_fit_the_model():
    with engine(max_text_bytes=400) as built, pytest.raises(BadRequest, match="the model has 512"):
        built.submit("x" * 300)


async def test_counts_what_it_did():
    with engine() as built:
        await listen(built.submit(TEXT))
        await until(lambda: is_empty(built))
        value = built.metrics.registry.get_sample_value

        on_cpu = {"model": "micro", "gpu_model": "cpu"}
        assert value("tts_tokens_total", {**on_cpu, "kind": "semantic"}) == 38
        assert value("tts_tokens_total", {**on_cpu, "kind": "codebook"}) == 76
        assert value("tts_audio_seconds_total", on_cpu) == pytest.approx(38 / MODEL.codec.frame_rate_hz)
        assert value("tts_first_audio_seconds_count", {**on_cpu, "tier": "default"}) == 1
        assert value("tts_request_seconds_count", {"model": "micro", "tier": "default"}) == 1
        assert value("tts_queue_seconds_count", {"model": "micro", "tier": "default"}) == 1
        assert value("tts_slots", {"model": "micro"}) == 2
        assert value("tts_step_seconds_count", {"phase": "decode", "batch_bucket": "1"}) == 37
        assert built.status().frames_total == 38
        assert built.status().step_s > 0
