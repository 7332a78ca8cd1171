"""Clients that are slow, silent, huge or gone: memory stays bounded, slots come free, and others hear no difference."""

import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import httpx_ws
import ormsgpack
import pytest
import wsproto
from wsproto import events

TEXT = "One two three four five six seven eight nine ten."
LONG = "A long text takes a while to be spoken, and nobody should wait for its end. " * 60
MIB = 2**20


def running(service: Any) -> int:
    """Sequences and queued parts that the engine has now."""
    text = httpx.get(f"{service.url}/metrics").text
    return sum(
        int(float(n)) for n in re.findall(r"^tts_requests_(?:running|waiting)\{[^}]*\} (\S+)$", text, re.MULTILINE)
    )


def in_flight(service: Any) -> int:
    """Slots that the gateway has given."""
    text = httpx.get(f"{service.gateway.url}/metrics").text
    return int(float(re.findall(r"^edge_in_flight (\S+)$", text, re.MULTILINE)[0]))


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Does it hold by then?  Looks fifty times a second."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def idle(service: Any) -> bool:
    return running(service) == 0 and in_flight(service) == 0


@pytest.fixture(autouse=True)
def _from_rest(service: Any) -> None:
    assert within(30, lambda: idle(service)), "an earlier test left work behind"


def address(url: str) -> tuple[str, int]:
    parsed = httpx.URL(url)
    assert parsed.port is not None
    return parsed.host, parsed.port


def request_bytes(service: Any, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/tts HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {service.owner}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


def vanish(connection: socket.socket) -> None:
    """Reset, as a machine that was switched off and on again answers."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextmanager
def listener_who_hears_all(url: str, service: Any) -> Iterator[dict[str, Any]]:
    """Somebody else, who speaks and listens all the while; `seconds` has how long each call took."""
    heard: dict[str, Any] = {"seconds": [], "errors": []}
    stop = threading.Event()

    def listen() -> None:
        with httpx.Client(base_url=url, headers=service.headers, timeout=30) as client:
            while not stop.is_set():
                began_s = time.monotonic()
                answer = client.post("/v1/tts", json={"text": TEXT, "format": "pcm"})
                heard["seconds"].append(time.monotonic() - began_s)
                if answer.status_code != 200 or len(answer.content) < 100_000:
                    heard["errors"].append((answer.status_code, answer.content[:200]))

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield heard
    finally:
        stop.set()
        thread.join()


def spoken_s(service: Any) -> float:
    """Seconds of audio that the engine has made."""
    text = httpx.get(f"{service.url}/metrics").text
    return float(re.findall(r"^tts_audio_seconds_total\{[^}]*\} (\S+)$", text, re.MULTILINE)[0])


def test_nobody_works_far_ahead_of_a_reader_that_is_slow(service: Any) -> None:
    before, before_s = service.engine.rss_bytes(), spoken_s(service)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before connecting: it sets what the kernels hold
        slow.connect(address(service.url))
        # Two hours of audio, half as fast so that fewer frames fill the kernel's buffers.
        body = {"text": LONG * 30, "format": "pcm", "prosody": {"speed": 0.5}, "chunk_length": 100}
        slow.sendall(request_bytes(service, body))
        assert slow.recv(1000).startswith(b"HTTP/1.1 200")

        assert within(60, lambda: rests(service)), "the engine goes on and on"

        assert spoken_s(service) - before_s < 300
        assert service.engine.rss_bytes() - before < 64 * MIB
        with listener_who_hears_all(service.url, service) as heard:
            for _ in range(15):  # a kilobyte a second, in tenths
                assert slow.recv(100)
                time.sleep(0.1)
        assert heard["errors"] == []
        assert heard["seconds"], "others are served meanwhile"
        vanish(slow)
    assert within(5, lambda: idle(service))


def rests(service: Any) -> bool:
    """Has the engine nothing to do, two looks long?"""
    if running(service):
        return False
    time.sleep(0.2)
    return running(service) == 0


def test_a_body_of_32_mib_is_held_a_few_times_at_most(url: str, service: Any, recording: bytes) -> None:
    before = service.engine.rss_bytes()
    service.engine.forget_peak()
    audio = recording + b"\0" * (32 * MIB - len(recording) - 400)
    data = ormsgpack.packb({"text": TEXT, "references": [{"audio": audio, "text": "Far too much."}]})
    assert 31 * MIB < len(data) <= 32 * MIB
    headers = service.headers | {"content-type": "application/msgpack"}

    for _ in range(2):
        answer = httpx.post(f"{url}/v1/tts", content=data, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text

    assert service.engine.peak_rss_bytes() - before < 6 * 32 * MIB


def test_200_silent_sockets_keep_nobody_out(url: str, service: Any) -> None:
    before = service.engine.rss_bytes()
    with ExitStack() as stack:
        for at in range(200):
            silent = stack.enter_context(socket.create_connection(address(url)))
            if at % 2:
                silent.sendall(b"POST /v1/tts HTTP/1.1\r\nhost: h\r\ncontent-le")  # and never the rest

        answer = httpx.post(f"{url}/v1/tts", json={"text": TEXT}, headers=service.headers, timeout=30)

        assert answer.status_code == 200
        assert running(service) == 0
        assert service.engine.rss_bytes() - before < 64 * MIB


@pytest.mark.parametrize("how", ["resets", "closes"])
def test_a_stream_whose_client_vanishes_is_given_up_within_a_second(url: str, service: Any, how: str) -> None:
    with listener_who_hears_all(url, service) as heard:
        connections = []
        for _ in range(4):
            connection = socket.create_connection(address(url))
            connection.sendall(request_bytes(service, {"text": LONG, "format": "pcm"}))
            connections.append(connection)
        for connection in connections:
            assert connection.recv(10_000).startswith(b"HTTP/1.1 200")
        assert running(service) >= 4

        for connection in connections:
            vanish(connection) if how == "resets" else connection.close()

        # The listener itself has one at most.
        assert within(1.0, lambda: running(service) <= 1)
    assert heard["errors"] == []
    assert within(5, lambda: idle(service))


class RawLive:
    """A websocket whose socket is in our hands."""

    def __init__(self, url: str, key: str) -> None:
        self.socket = socket.create_connection(address(url), timeout=30)
        self._protocol = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        self._send(
            events.Request(
                host="h", target="/v1/tts/live", extra_headers=[(b"authorization", f"Bearer {key}".encode())]
            )
        )
        self.next(events.AcceptConnection)

    def say(self, event: str, **fields: Any) -> None:
        self._send(events.BytesMessage(ormsgpack.packb({"event": event, **fields})))

    def next(self, kind: type[events.Event]) -> events.Event:
        """The next event of this kind."""
        while True:
            for event in self._protocol.events():
                if isinstance(event, kind):
                    return event
            data = self.socket.recv(65_536)
            assert data, f"the connection ended before {kind.__name__}"
            self._protocol.receive_data(data)

    def _send(self, event: events.Event) -> None:
        self.socket.sendall(self._protocol.send(event))


@pytest.mark.parametrize("how", ["resets", "closes"])
def test_websocket_clients_that_vanish_are_given_up_within_a_second(url: str, service: Any, how: str) -> None:
    with listener_who_hears_all(url, service) as heard:
        sessions = [RawLive(url, service.owner) for _ in range(3)]
        for session in sessions:
            session.say("start", request={"text": "", "format": "pcm"})
            session.say("text", text=LONG)
        for session in sessions:
            session.next(events.BytesMessage)
        assert running(service) >= 3

        for session in sessions:
            vanish(session.socket) if how == "resets" else session.socket.close()

        assert within(1.0, lambda: running(service) <= 1)
        assert within(1.0, lambda: in_flight(service) <= 1)
    assert heard["errors"] == []
    assert within(5, lambda: idle(service))


LISTENER = """
import sys
from fishaudio import FishAudio
url, key, text = sys.argv[1:]
for piece in FishAudio(api_key=key, base_url=url).tts.stream_websocket(iter([text]), format="pcm"):
    print(len(piece), flush=True)
"""


def test_a_client_that_is_killed_is_given_up_within_a_second(url: str, service: Any) -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", LISTENER, url, service.owner, LONG], stdout=subprocess.PIPE, text=True
    )
    try:
        assert client.stdout is not None
        assert int(client.stdout.readline()) > 0
        assert running(service) >= 1

        client.send_signal(signal.SIGKILL)

        assert within(1.0, lambda: running(service) == 0)
        assert within(1.0, lambda: in_flight(service) == 0)
    finally:
        client.kill()
        client.communicate()


def test_sessions_that_say_nothing_hold_no_slot_of_the_engine(service: Any) -> None:
    with httpx.Client(headers=service.headers, timeout=30) as client, ExitStack() as stack:
        for _ in range(20):
            live = stack.enter_context(httpx_ws.connect_ws(f"{service.url}/v1/tts/live", client))
            live.send_bytes(ormsgpack.packb({"event": "start", "request": {"text": ""}}))

        answer = client.post(f"{service.url}/v1/tts", json={"text": TEXT})

        assert answer.status_code == 200
        assert within(10, lambda: running(service) == 0)
