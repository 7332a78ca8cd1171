import base64
import json

import pytest

from slackwater_inference.api.testing import client_of, micro_services, running
from slackwater_inference.api.timestamps import align
from slackwater_inference.testing.model import micro

pytestmark = pytest.mark.usefixtures("one_thread")

CODEC = micro().codec
SENTENCE = "A sentence that is long enough to be one part of the text, all by itself, as can be seen."


async def events_of(services, **fields):
    """The answer and its events' data."""
    body = {"format": "pcm", "latency": "low", **fields}
    async with client_of(services) as client:
        answer = await client.post("/v1/tts/stream/with-timestamp", json=body)
    blocks = answer.text.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("event: message\ndata: {") for block in blocks), answer.text[:500]
    return answer, [json.loads(block.partition("data: ")[2]) for block in blocks]


def words(alignment):
    return [segment["text"] for segment in alignment["segments"]]


async def test_the_events_audio_in_order_is_the_whole_audio_and_each_part_ends_with_all_its_words():
    async with running(micro_services()) as services:
        answer, events = await events_of(services, text=f"{SENTENCE} And more.", chunk_length=100)
        frames = services.engine.status().frames_total

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"
    audio = b"".join(base64.b64decode(event["audio_base64"]) for event in events)
    assert len(audio) == 2 * frames * CODEC.frame_samples
    last = {event["chunk_seq"]: event for event in events}
    assert list(last) == [0, 1]
    assert last[0]["content"] == SENTENCE
    assert words(last[0]["alignment"]) == SENTENCE.split()
    assert words(last[1]["alignment"]) == ["And", "more."]
    # The second part begins where the first one's audio ends.
    assert last[0]["chunk_audio_offset_sec"] == 0
    assert last[1]["chunk_audio_offset_sec"] == pytest.approx(last[0]["alignment"]["audio_duration"], abs=0.002)
    total_s = last[1]["chunk_audio_offset_sec"] + last[1]["alignment"]["audio_duration"]
    assert total_s == pytest.approx(frames * CODEC.frame_samples / CODEC.sample_rate_hz, abs=0.002)


async def test_a_part_gives_several_snapshots_of_the_time_so_far():
    async with running(micro_services()) as services:
        _, events = await events_of(services, text=SENTENCE)

    durations = [event["alignment"]["audio_duration"] for event in events]
    assert len(events) > 3
    assert durations == sorted(durations)
    for event in events:
        segments = event["alignment"]["segments"]
        assert all(segment["start"] <= segment["end"] for segment in segments)
        assert all(segment["end"] <= event["alignment"]["audio_duration"] + 0.001 for segment in segments)


def test_words_share_the_time_in_proportion_to_their_length():
    whole = align("one three", 1.6, is_whole=True)

    assert [(s.text, s.start, s.end) for s in whole.segments] == [("one", 0.0, 0.6), ("three", 0.6, 1.6)]


def test_an_unfinished_part_shows_the_words_that_its_expected_length_has_reached():
    early = align("one two three four five six", 0.2, is_whole=False)

    assert [s.text for s in early.segments] == ["one", "two"]
    assert early.segments[-1].end == 0.2
    assert early.audio_duration == 0.2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("<|speaker:0|>Hi [laugh] there - you!", ["Hi", "there", "you!"], id="tags, cues and dashes"),
        pytest.param("今日は OK", ["今", "日", "は", "OK"], id="a script without spaces"),
        pytest.param("...", [], id="no word"),
    ],
)
def test_only_what_is_spoken_is_a_word(text, expected):
    assert [s.text for s in align(text, 1.0, is_whole=True).segments] == expected
