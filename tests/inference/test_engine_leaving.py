"""The engine when too many come, when callers leave, and when it leaves itself."""

import asyncio

import pytest

from slackwater_inference.core import Draining, QueueFull, Speech, Stage
from slackwater_inference.testing.engine import (
    TEXT,
    VOICE,
    assert_same_sound,
    engine,
    is_empty,
    listen,
    metric,
    num_frames,
    read,
    say,
    seeded,
    until,
)

pytestmark = pytest.mark.usefixtures("one_thread")


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
