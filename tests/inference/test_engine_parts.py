"""The engine with streams of several parts: their order, what one says to the next, when they wait."""

import pytest
import torch

from slackwater_inference.core import Frame, QueueFull, Speech, StepResult
from slackwater_inference.testing.engine import (
    TEXT,
    codes_of,
    engine,
    is_empty,
    listen,
    metric,
    num_frames,
    read,
    recorded,
    samples,
    say,
    seeded,
    until,
)
from slackwater_inference.testing.model import micro

pytestmark = pytest.mark.usefixtures("one_thread")


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
    with engine() as built, recorded(built) as codes:
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


# A model that repeats itself


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
