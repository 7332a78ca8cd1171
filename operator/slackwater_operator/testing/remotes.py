"""Stand-ins for a gateway's control port and for a keeper: real servers on loopback that say what a test tells them.

The wire is operator/README.md's.  The real ones are `slackwater_inference.gateway.control` and
`slackwater_workers.keeper`.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from aiohttp import web


class _Server:
    """One aiohttp server on a free port, or on the one that it had."""

    def __init__(self) -> None:
        self.url = ""
        self._port = 0
        self._runner: web.AppRunner | None = None

    def routes(self) -> list[web.RouteDef]:
        """What it answers."""
        raise NotImplementedError

    async def start(self) -> None:
        """Listen; again on the same port after `stop`."""
        server = web.Application()
        server.add_routes(self.routes())
        self._runner = web.AppRunner(server, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Be gone, as a process that died."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


class StandInGateway(_Server):
    """A gateway.  Set its numbers with `say`.

    told: the newest replicas that it was told, by uid, None = never.   polls, puts: how often it was asked and told.
    refusal: what it answers to a PUT, "" = it takes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.signals: dict[str, Any] = {
            "in_flight": 0,
            "queued": 0,
            "arrivals_total": 0,
            "rejected_total": 0,
            "failed_total": 0,
            "oldest_queued_s": 0.0,
            "first_audio_p95_s": None,
        }
        self.replicas: dict[str, int] = {}
        self.backlogs = 0
        self.boot = "first"
        self.told: dict[str, Mapping[str, Any]] | None = None
        self.polls = 0
        self.puts = 0
        self.refusal = ""
        self.max_wait_s = 1.0
        self._changed = asyncio.Event()

    def say(self, **signals: Any) -> None:
        """These numbers from now on, and at once, as when a backlog begins."""
        self.signals |= signals
        self.backlogs += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def restart(self) -> None:
        """Another life: counts from 0, was told nothing."""
        self.boot += "+"
        self.told = None
        self.say(arrivals_total=0, in_flight=0, queued=0)

    def routes(self) -> list[web.RouteDef]:
        """The control port."""
        return [web.get("/signals", self._signals), web.put("/replicas", self._replicas)]

    async def _signals(self, request: web.Request) -> web.Response:
        self.polls += 1
        if int(request.query.get("seen", self.backlogs)) == self.backlogs:
            with contextlib.suppress(TimeoutError):
                wait_s = min(self.max_wait_s, float(request.query.get("wait", 0)))
                await asyncio.wait_for(self._changed.wait(), wait_s)
        answer = {**self.signals, "replicas": self.replicas, "backlogs": self.backlogs, "boot": self.boot}
        return web.json_response(answer)

    async def _replicas(self, request: web.Request) -> web.Response:
        self.puts += 1
        if self.refusal:
            return web.json_response({"status": 422, "message": self.refusal}, status=422)
        self.told = {one["uid"]: one for one in (await request.json())["replicas"]}
        return web.Response(status=204)


class StandInKeeper(_Server):
    """A keeper.  progress: its next answer.   holds: the digests that its ledger has.   asked: receipts, in order.

    polls: how often it was asked how far the job is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.polls = 0
        self.progress: dict[str, Any] = {
            "job": "job",
            "items_total": None,
            "items_done": None,
            "items_quarantined": None,
            "items_open": None,
            "shards_open": None,
            "audio_s": None,
            "workers": {},
        }
        self.holds: set[str] = set()
        self.asked: list[Mapping[str, Any]] = []
        self.failing = False

    def routes(self) -> list[web.RouteDef]:
        """Its paths."""
        return [web.get("/progress", self._progress), web.post("/verify", self._verify)]

    async def _progress(self, _request: web.Request) -> web.Response:
        self.polls += 1
        if self.failing:
            return web.json_response({"status": 503, "message": "the storage fails"}, status=503)
        return web.json_response(self.progress)

    async def _verify(self, request: web.Request) -> web.Response:
        if self.failing:
            return web.json_response({"status": 503, "message": "the storage fails"}, status=503)
        receipt = (await request.json())["receipt"]
        self.asked.append(receipt)
        if "sha256" not in receipt:
            return web.json_response({"status": 422, "message": "sha256: Field required"}, status=422)
        return web.json_response({"holds": receipt["sha256"] in self.holds})
