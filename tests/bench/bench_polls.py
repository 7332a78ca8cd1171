"""CPU that the operator spends on one poll of a gateway, against the same poll by httpx.

Both ask a real gateway with eight replicas, in turns, over connections that stay open, as many polls at a time as the
operator has gateways.  A figure is the median of the rounds: CPU seconds of this process over the polls of a round, the
gateway being another process.  Connections are made, and one round is run, before anything counts.
"""

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import httpx
from run import Row

from slackwater_operator.demo.plan import free_port
from slackwater_operator.operate.remote import Asker, Unheard

ABREAST = 50
POLLS = 1000  # of a round
ROUNDS = 7
TIMEOUT_S = 2.5
REPLICAS = {"replicas": [{"uid": f"ns/tts-{i}", "url": f"http://127.0.0.1:{i + 1}", "slots": 8} for i in range(8)]}

Poll = Callable[[], Awaitable[bytes]]


def measure() -> list[Row]:
    port = free_port()
    command = [sys.executable, "-m", "slackwater_operator", "gateway", "--port", "0", "--control-port", str(port)]
    gateway = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ours, by_httpx = asyncio.run(_both(f"http://127.0.0.1:{port}"))
    finally:
        gateway.terminate()
        gateway.wait(60)
    note = f"{ABREAST} at a time, {ROUNDS} rounds of {POLLS} in turns; our side of it, not the gateway's"
    return [Row("poll_cpu_ms", ours, "ms", "httpx", by_httpx, note)]


async def _both(url: str) -> tuple[float, float]:
    """CPU milliseconds of a poll: the operator's own way, and by httpx."""
    asker = Asker()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=TIMEOUT_S, trust_env=False) as client:

        async def ours() -> bytes:
            return await asker.ask("GET", f"{url}/signals", TIMEOUT_S, params={"wait": "0", "seen": "0"})

        async def by_httpx() -> bytes:
            answer = await client.get(f"{url}/signals", params={"wait": "0", "seen": "0"})
            answer.raise_for_status()
            return answer.content

        await _told(asker, url)
        spent: dict[Poll, list[float]] = {ours: [], by_httpx: []}
        for poll in spent:
            assert b'"replicas"' in await poll()
            await _round(poll)
        for _ in range(ROUNDS):
            for poll, times in spent.items():
                times.append(await _round(poll))
        await asker.aclose()
        return statistics.median(spent[ours]), statistics.median(spent[by_httpx])


async def _told(asker: Asker, url: str) -> None:
    """Tell the gateway its replicas, once it listens."""
    async with asyncio.timeout(60):
        while True:
            try:
                await asker.ask("PUT", f"{url}/replicas", TIMEOUT_S, json=REPLICAS)
            except Unheard:
                await asyncio.sleep(0.1)
            else:
                return


async def _round(poll: Poll) -> float:
    async def some() -> None:
        for _ in range(POLLS // ABREAST):
            await poll()

    began_s = time.process_time()
    await asyncio.gather(*(some() for _ in range(ABREAST)))
    return 1000.0 * (time.process_time() - began_s) / POLLS
