"""The engine with streams of one part: their audio, and what is counted."""

import asyncio

import pytest

from slackwater_inference.core import Speech
from slackwater_inference.testing.engine import (
    MODEL,
    TEXT,
    assert_same_sound,
    engine,
    is_empty,
    listen,
    metric,
    new_engine,
    num_frames,
    say,
    seeded,
    until,
)

pytestmark = pytest.mark.usefixtures("one_thread")


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
