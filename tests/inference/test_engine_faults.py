"""The engine when it breaks, and when it is asked for what it cannot speak."""

import pytest

from slackwater_inference.core import BadRequest, EngineFailed, Speech, Stage
from slackwater_inference.testing.engine import TEXT, engine, is_empty, listen, num_frames, say

pytestmark = pytest.mark.usefixtures("one_thread")


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


def _refuse():
    raise BadRequest("planted")


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
