"""The websocket without a client library: events of the contract, and what a server must do while it is busy."""

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import httpx_ws
import ormsgpack
import pytest
import wsproto

TEXT = "One two three four five six seven eight nine ten. "
LONG = "A long text takes a while to be spoken, and nobody should wait for its end. " * 5


START = {"event": "start", "request": {"text": ""}}


class Live:
    """One session, in the contract's events."""

    def __init__(self, session: httpx_ws.WebSocketSession) -> None:
        self.session = session

    def send(self, event: str, **fields: Any) -> None:
        self.session.send_bytes(ormsgpack.packb({"event": event, **fields}))

    def start(self, **fields: Any) -> None:
        self.send("start", request={"text": "", "format": "pcm", **fields})

    def receive(self, timeout_s: float = 60) -> dict[str, Any]:
        event: dict[str, Any] = ormsgpack.unpackb(self.session.receive_bytes(timeout=timeout_s))
        return event

    def rest(self) -> tuple[bytes, dict[str, Any]]:
        """All the audio, and how it ended."""
        audio = b""
        while (event := self.receive())["event"] == "audio":
            audio += event["audio"]
        return audio, event


@contextmanager
def opened(url: str, service: Any, **options: Any) -> Iterator[Live]:
    with (
        httpx.Client(headers=service.headers, timeout=60) as client,
        httpx_ws.connect_ws(f"{url}/v1/tts/live", client, **options) as session,
    ):
        yield Live(session)


def test_start_text_flush_stop(url: str, service: Any, hear: Callable[..., Any], spoken_s: Any) -> None:
    with opened(url, service) as live:
        live.start()
        live.send("text", text=TEXT)
        live.send("flush")
        first = live.receive()
        live.send("text", text=TEXT)
        live.send("stop")
        audio, end = live.rest()

        assert (first["event"], end) == ("audio", {"event": "finish", "reason": "stop"})
        sound = hear(first["audio"] + audio, pcm_rate_hz=44_100)
        assert sound.duration_s == pytest.approx(2 * spoken_s(TEXT.strip()), rel=0.15)
        with pytest.raises(httpx_ws.WebSocketDisconnect) as closed:
            live.session.receive_bytes(timeout=10)
        assert closed.value.code == 1000


def test_a_fragment_waits_for_flush(service: Any) -> None:
    with opened(service.url, service) as live:
        live.start()
        live.send("text", text="A fragment ")
        with pytest.raises(queue.Empty):
            live.receive(timeout_s=0.5)

        live.send("flush")

        assert live.receive()["event"] == "audio"
        live.send("stop")
        assert live.rest()[1]["reason"] == "stop"


def test_a_full_part_is_spoken_without_flush_while_text_still_comes(url: str, service: Any) -> None:
    with opened(url, service) as live:
        live.start(chunk_length=100)
        live.send("text", text=LONG)

        assert live.receive()["event"] == "audio"
        live.send("stop")
        assert live.rest()[1]["reason"] == "stop"


def test_a_ping_is_answered_while_speech_is_made(url: str, service: Any) -> None:
    with opened(url, service, keepalive_ping_interval_seconds=None) as live:
        live.start()
        live.send("text", text=LONG)
        live.send("stop")
        waits_s = []
        for _ in range(10):
            asked_s = time.monotonic()
            assert live.session.ping(b"still there?").wait(5)
            waits_s.append(time.monotonic() - asked_s)
        audio, end = live.rest()

        assert end["reason"] == "stop"
        assert len(audio) > 10 * 2 * 44_100
        assert max(waits_s) < 2


@pytest.mark.parametrize(
    ("events", "says"),
    [
        pytest.param([{"event": "text", "text": "early"}], "start", id="text before start"),
        pytest.param([START | {"request": {"text": "", "format": "flac"}}], "format", id="a bad field"),
        pytest.param([START, START], "start", id="a second start"),
        pytest.param([{"event": "sing"}], "event", id="an event that there is not"),
        pytest.param([["no", "map"]], "", id="no map"),
        pytest.param([START, {"event": "text"}], "text", id="text without text"),
    ],
)  # fmt: skip
def test_a_client_that_errs_is_told_so_and_let_go(url: str, service: Any, events: list[Any], says: str) -> None:
    with opened(url, service) as live:
        for event in events:
            live.session.send_bytes(ormsgpack.packb(event))
        end = live.rest()[1]

        assert (end["event"], end["reason"]) == ("finish", "error")
        assert says in end["message"]
        with pytest.raises(httpx_ws.WebSocketDisconnect):
            live.session.receive_bytes(timeout=10)


@pytest.mark.parametrize("data", [b"\xc1", b"", b"\x92" * 2000, b"plain"], ids=["reserved", "empty", "deep", "text"])
def test_bytes_that_are_no_msgpack_are_a_finish_error(service: Any, data: bytes) -> None:
    with opened(service.url, service) as live:
        live.session.send_bytes(data)

        assert live.rest()[1]["reason"] == "error"


def test_a_text_frame_is_refused_and_not_a_crash(service: Any) -> None:
    with opened(service.url, service) as live:
        live.session.send_text('{"event": "start"}')

        assert live.rest()[1]["reason"] == "error"


def say_too_much_and_listen(live: Live) -> None:
    live.session.send(wsproto.events.BytesMessage(b"x" * (33 * 2**20)))
    live.rest()


def test_a_frame_over_the_limit_ends_the_session(service: Any) -> None:
    with opened(service.url, service) as live:
        live.start()
        with pytest.raises((httpx_ws.WebSocketDisconnect, httpx_ws.WebSocketNetworkError)):
            say_too_much_and_listen(live)

    assert httpx.get(f"{service.url}/readyz").status_code == 200
