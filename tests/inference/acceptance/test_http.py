"""The API as a program without a client library uses it: plain httpx, as the announcement shows it."""

import base64
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import ormsgpack
import pytest

TEXT = "One two three four five six seven eight nine ten."
LONG = "A long text takes a while to be spoken, and nobody should wait for its end. " * 5


def test_json_streams_pcm_whose_first_piece_comes_long_before_the_last(
    url: str, service: Any, hear: Callable[..., Any], spoken_s: Any
) -> None:
    headers = {**service.headers, "model": "s2.1-pro-free"}
    pieces, came_s, began_s = [], [], time.monotonic()
    with httpx.stream("POST", f"{url}/v1/tts", json={"text": LONG, "format": "pcm"}, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in answer.headers
        for piece in answer.iter_raw():
            pieces.append(piece)
            came_s.append(time.monotonic() - began_s)

    sound = hear(b"".join(pieces), pcm_rate_hz=44_100)
    assert sound.duration_s == pytest.approx(spoken_s(LONG), rel=0.2)
    assert len(pieces) > 10
    assert came_s[0] < 0.5 * came_s[-1]


def test_msgpack_with_references_speaks(
    url: str, service: Any, hear: Callable[..., Any], spoken_s: Any, recording: bytes, reference_text: str
) -> None:
    body = {"text": TEXT, "references": [{"audio": recording, "text": reference_text}], "format": "wav"}
    headers = {**service.headers, "content-type": "application/msgpack"}

    answer = httpx.post(f"{url}/v1/tts", content=ormsgpack.packb(body), headers=headers, timeout=60)

    assert answer.status_code == 200, answer.text
    assert hear(answer.content).duration_s == pytest.approx(spoken_s(TEXT), rel=0.15)


def test_two_speakers_of_two_recordings_each(service: Any, tone: Callable[..., bytes], reference_text: str) -> None:
    ones = [{"audio": tone(level=level), "text": reference_text} for level in (0.3, 0.4)]
    others = [{"audio": tone(level=level), "text": reference_text} for level in (0.6, 0.7)]
    body = {"text": "<|speaker:0|>I ask. <|speaker:1|>And I answer.", "references": [ones, others]}
    headers = {**service.headers, "content-type": "application/msgpack"}

    answer = httpx.post(f"{service.url}/v1/tts", content=ormsgpack.packb(body), headers=headers, timeout=60)

    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("header", [None, "", "no-such-model", "s1", "s2-pro", "s2.1-pro", "s2.1-pro-free"])
def test_any_model_header_speaks(service: Any, header: str | None) -> None:
    headers = service.headers if header is None else {**service.headers, "model": header}

    answer = httpx.post(f"{service.url}/v1/tts", json={"text": "Yes."}, headers=headers, timeout=60)

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "audio/mpeg"


def test_a_stream_of_events_carries_audio_and_its_times(
    url: str, service: Any, hear: Callable[..., Any], spoken_s: Any
) -> None:
    events = []
    with httpx.stream(
        "POST",
        f"{url}/v1/tts/stream/with-timestamp",
        json={"text": TEXT, "format": "wav"},
        headers=service.headers,
        timeout=60,
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data:"):
                events.append(json.loads(line.removeprefix("data:")))

    sound = hear(b"".join(base64.b64decode(event["audio_base64"]) for event in events))
    assert sound.duration_s == pytest.approx(spoken_s(TEXT), rel=0.15)
    alignment = [event["alignment"] for event in events if event["alignment"]][-1]
    assert [segment["text"] for segment in alignment["segments"]] == TEXT.split()
    ends = [segment["end"] for segment in alignment["segments"]]
    assert ends == sorted(ends)
    assert ends[-1] == pytest.approx(sound.duration_s, abs=0.2)


def test_the_same_request_at_temperature_0_sounds_the_same(service: Any) -> None:
    body = {"text": TEXT, "temperature": 0, "format": "pcm"}

    first, second = (
        httpx.post(f"{service.url}/v1/tts", json=body, headers=service.headers, timeout=60).content for _ in range(2)
    )

    assert first == second


def test_the_log_names_requests_and_never_their_texts_or_keys(service: Any) -> None:
    secret = "A secret that must not be found in any log"
    headers = {**service.headers, "x-request-id": "request-of-this-test"}

    httpx.post(f"{service.gateway.url}/v1/tts", json={"text": secret}, headers=headers, timeout=60)

    deadline_s = time.monotonic() + 30
    while "request-of-this-test" not in service.engine.log:  # it is written once the last byte has been sent
        assert time.monotonic() < deadline_s, service.engine.log
        time.sleep(0.05)
    for log in (service.engine.log, service.gateway.log):
        assert "secret" not in log
        assert service.owner not in log


def test_the_page_and_its_description_need_nothing_from_elsewhere(service: Any) -> None:
    page = httpx.get(f"{service.url}/", headers={"accept": "text/html"})

    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    for remote in ('src="http', 'href="http', "@import", 'src="//', 'href="//'):
        assert remote not in page.text
