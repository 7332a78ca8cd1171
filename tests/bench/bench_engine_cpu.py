"""The engine over HTTP on this CPU: N listeners at once, batched, against the same engine one request at a time.

Both servers are real processes with the embedded voice; they take turns, so that a busy moment of the
machine meets both.  Each listener asks for one text after another and plays what comes at the pace of
speech; an underrun is a moment in which it had begun and had nothing left to play.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
from run import Row

LISTENERS = (1, 4, 16)
ROUNDS = 3
ROUND_S = 8.0
ONE_BY_ONE = "the same engine, one request at a time"
FRAME_BYTES = 2048 * 2
BYTES_PER_S = 44_100 * 2
# 191 bytes: 178 frames, 8.3 s of speech.  Each request begins with a number, so no two texts are the same.
TEXT = (
    "The train to the coast leaves at a quarter past nine from platform four, and whoever is late may take the slow "
    "one at ten, which stops at every village and is seldom full on a weekday."
)


@dataclass(slots=True)
class Heard:
    """What the listeners of one kind of server got, over all rounds."""

    frames: int = 0
    busy_s: float = 0.0
    first_audio_s: list[float] = field(default_factory=list)
    underruns: int = 0
    requests: int = 0

    def quantile(self, share: float) -> float:
        """The smallest value that at least `share` of all do not exceed."""
        ordered = sorted(self.first_audio_s)
        return ordered[max(0, min(len(ordered), -int(-share * len(ordered) // 1)) - 1)]


@contextlib.contextmanager
def serving(slots: int) -> Iterator[str]:
    """A real engine process with so many slots; yields its address."""
    command = [sys.executable, "-m", "slackwater_operator", "engine", "serve", "--supervised"]
    process = subprocess.Popen(
        [*command, "--slots", str(slots), "--max-queued", str(max(LISTENERS))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        url = next(event["url"] for event in map(json.loads, process.stdout) if event["event"] == "ready")
        # What it says later is read and dropped: a full pipe would hold the engine.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield url
    finally:
        process.kill()
        process.wait()


async def listen(client: httpx.AsyncClient, number: int, until_s: float, heard: Heard) -> None:
    """One listener: a text after another until `until_s`; a request that has begun is heard to its end."""
    count = 0
    while time.monotonic() < until_s:
        count += 1
        sent_s = time.monotonic()
        began_s, played_until_s, num_bytes = 0.0, 0.0, 0
        text = f"{number}-{count}: {TEXT}"
        async with client.stream(
            "POST", "/v1/tts", json={"text": text, "format": "pcm", "latency": "balanced"}
        ) as answer:
            answer.raise_for_status()
            async for data in answer.aiter_raw():
                now_s = time.monotonic()
                if not began_s:
                    began_s = played_until_s = now_s
                    heard.first_audio_s.append(now_s - sent_s)
                heard.underruns += now_s > played_until_s
                played_until_s = max(played_until_s, now_s)
                played_until_s += len(data) / BYTES_PER_S
                num_bytes += len(data)
        heard.frames += num_bytes // FRAME_BYTES
        heard.requests += 1


async def play(url: str, listeners: int, heard: Heard) -> None:
    """One round against one server."""
    began_s = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=120.0, trust_env=False) as client, asyncio.TaskGroup() as group:
        for number in range(listeners):
            group.create_task(listen(client, number, began_s + ROUND_S, heard))
    heard.busy_s += time.monotonic() - began_s


def measure() -> list[Row]:
    rows: list[Row] = []
    with serving(max(LISTENERS)) as batched_url, serving(1) as single_url:
        for url in (batched_url, single_url):
            asyncio.run(play(url, 1, Heard()))  # warm
        for listeners in LISTENERS:
            batched, single = Heard(), Heard()
            for _ in range(ROUNDS):
                asyncio.run(play(batched_url, listeners, batched))
                asyncio.run(play(single_url, listeners, single))
            rows += compared(listeners, batched, single)
    return rows


def compared(listeners: int, batched: Heard, single: Heard) -> list[Row]:
    """The rows for one number of listeners."""

    def row(what: str, value: float, peer: float, unit: str, note: str = "") -> Row:
        return Row(f"{what}_c{listeners}", value, unit, ONE_BY_ONE, peer, note)

    rate, single_rate = batched.frames / batched.busy_s, single.frames / single.busy_s
    return [
        row("frames_per_s", rate, single_rate, "frames/s", f"{rate / single_rate:.2f} times the peer's"),
        row("first_audio_p50_s", batched.quantile(0.5), single.quantile(0.5), "s", f"{batched.requests} requests"),
        row("first_audio_p99_s", batched.quantile(0.99), single.quantile(0.99), "s", f"{os.cpu_count()} cores"),
        row("underruns", batched.underruns, single.underruns, "count", "chunks that came after their listener ran dry"),
    ]
