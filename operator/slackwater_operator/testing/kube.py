"""A pretended API server on loopback, for tests of all that talks to Kubernetes.

Owns the HTTP side: paths, lists in pages, watches, errors as `Status` objects, and the faults that tests order.
What it keeps is in `kube_store`; what it does not know (schemas, defaults, access control, garbage collection,
scheduling) is tested on a real API server.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from aiohttp import web

from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.connection import Connection
from slackwater_operator.kube.credentials import bearer
from slackwater_operator.kube.selectors import matches
from slackwater_operator.kube.transport import Limits
from slackwater_operator.kube.types import Key, Object
from slackwater_operator.testing import kube_discovery
from slackwater_operator.testing.kube_faults import Fault, Faults, Harm
from slackwater_operator.testing.kube_pods import Hands
from slackwater_operator.testing.kube_requests import Seen, broken, line, parse, status, success, told
from slackwater_operator.testing.kube_store import PODS, Collection, Refused, Store

QUIET_TURNS = 40  # a request is not longer than this between client and server unseen


@dataclass(slots=True, eq=False)
class _Watch:
    """An open watch.  poked: there may be news, or an order."""

    plural: str
    transport: asyncio.Transport
    poked: asyncio.Event = field(default_factory=asyncio.Event)
    bookmark: bool = False
    end: bool = False
    cut_in_line: bool = False


class FakeKube(Hands, Faults):
    """`async with FakeKube() as fake: async with fake.kube() as kube: …`

    requests: all that came, in order.  token: if set, what a client has to show.  page: the most objects of a
    page, whatever the client asks.  gone_as_event: a forgotten version is told within the watch, as the real
    server does in some cases, or as the answer to its request, as it does in others.
    logs: (namespace, pod) -> what its log says.
    """

    def __init__(self, *, wall: Callable[[], float] = time.time) -> None:
        super().__init__()
        self._wall = wall
        self.store = Store(wall)
        self.store.changed = self._poke
        self.requests: list[Seen] = []
        self.token: str | None = None
        self.page = 10_000
        self.gone_as_event = True
        self.logs: dict[Key, str] = {}
        self.url = ""
        self._watches: set[_Watch] = set()
        self._running = asyncio.Event()
        self._running.set()
        self._runner: web.AppRunner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._busy = 0  # requests being answered

    async def __aenter__(self) -> "FakeKube":
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        server = web.Application(client_max_size=64 * 2**20)
        server.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(server, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        self.resume()
        for watch in self._watches:
            watch.end = True
        self._poke()
        if self._runner is not None:
            await self._runner.cleanup()

    @classmethod
    @contextmanager
    def in_thread(cls) -> Iterator["FakeKube"]:
        """One that serves from a thread of its own, for tests that are not asynchronous themselves."""
        made: list[FakeKube] = []
        ready = threading.Event()

        async def serve() -> None:
            async with cls() as fake:
                stop = asyncio.Event()
                made.append(fake)
                stops.append((asyncio.get_running_loop(), stop))
                ready.set()
                await stop.wait()

        stops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        if not ready.wait(10):
            raise RuntimeError("the pretended API server did not start within 10 s")
        try:
            yield made[0]
        finally:
            loop, stop = stops[0]
            loop.call_soon_threadsafe(stop.set)
            thread.join(10)

    def connection(self, token: str = "token") -> Connection:
        """How to reach it."""
        return Connection(self.url, credentials=bearer(token))

    @asynccontextmanager
    async def kube(self, **options: Any) -> AsyncIterator[Kube]:
        """A client of it.  options: as for `Kube`; the time limits are short unless given."""
        limits = Limits(silence_s=5.0, request_s=5.0, watch_silence_s=5.0, retry_within_s=5.0)
        async with Kube(self.connection(), **{"limits": limits, **options}) as kube:
            yield kube

    def write_kubeconfig(self, path: Path, namespace: str = "default") -> Path:
        """A kubeconfig file that leads here."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": namespace}}],
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": {"token": "token"}}],
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def wall_s(self) -> float:
        return self._wall()

    def compact(self) -> None:
        """Forget the history: watches and continued lists from earlier versions get 410."""
        self.store.compact()

    def pause(self) -> None:
        """Say nothing any more, to nobody, without closing anything."""
        self._running.clear()

    def resume(self) -> None:
        """Go on."""
        self._running.set()
        self._poke()

    def bookmark(self) -> None:
        """Send a bookmark on each open watch."""
        for watch in self._watches:
            watch.bookmark = True
        self._poke()

    def end_watches(self, plural: str = "*") -> None:
        """End open watches in good order, as after their time."""
        for watch in self._watches:
            watch.end = watch.end or plural in ("*", watch.plural)
        self._poke()

    def cut_watches(self, plural: str = "*", *, within_line: bool = False) -> None:
        """Break the connections of open watches, after the first half of an event if within_line."""
        for watch in list(self._watches):
            if plural not in ("*", watch.plural):
                continue
            if within_line:
                watch.cut_in_line = True
            else:
                watch.transport.abort()
        self._poke()

    @property
    def watching(self) -> list[str]:
        """The plurals of the open watches."""
        return sorted(watch.plural for watch in self._watches)

    async def settle(self) -> None:
        """Wait until every request that is on its way has been answered, but for watches and those that hang.

        Client and server share one loop, so nothing new within some turns of it means that nothing is on its way.
        """
        seen, quiet = len(self.requests), 0
        while quiet < QUIET_TURNS:
            await asyncio.sleep(0)
            quiet = quiet + 1 if not self._busy and seen == len(self.requests) else 0
            seen = len(self.requests)

    def _poke(self) -> None:
        if self._loop is not None and threading.get_ident() != self._thread:
            self._loop.call_soon_threadsafe(self._poke)
            return
        for watch in self._watches:
            watch.poked.set()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        seen, collection = parse(request, await request.read())
        self.requests.append(seen)
        await self._running.wait()
        fault = self.take(seen.verb, seen.plural, seen.name)
        if fault is not None and fault.harm is Harm.HANG:
            await self.released()
        self._busy += seen.verb != "watch"
        try:
            return await self._answer(request, seen, collection, fault)
        finally:
            self._busy -= seen.verb != "watch"

    async def _answer(
        self, request: web.Request, seen: Seen, collection: Collection, fault: Fault | None
    ) -> web.StreamResponse:
        if fault is not None and fault.harm is Harm.DROP:
            return broken(request)
        try:
            if fault is not None and fault.harm is Harm.FAIL:
                raise Refused(fault.code, fault.reason, fault.message, fault.causes)
            if self.token is not None and seen.headers.get("Authorization") != f"Bearer {self.token}":
                raise Refused(401, "Unauthorized", "Unauthorized")
            if seen.verb == "watch":
                return await self._watch(request, seen, collection, fault)
            answer = self._carry_out(seen, collection)
        except Refused as refused:
            headers = {"Retry-After": fault.retry_after} if fault is not None and fault.retry_after else None
            return web.json_response(status(refused), status=refused.code, headers=headers)
        if fault is not None and fault.harm is Harm.LOSE:
            return broken(request)
        if isinstance(answer, bytes):
            return web.Response(body=answer)
        return web.json_response(answer, status=201 if seen.verb == "create" else 200)

    def _carry_out(self, seen: Seen, collection: Collection) -> Object | bytes:
        key, body, store = (seen.namespace, seen.name), seen.body, self.store
        manager, dry = seen.params.get("fieldManager", ""), seen.params.get("dryRun") == "All"
        part = "" if seen.part == "scale" else seen.part
        match seen.verb:
            case "raw":
                return kube_discovery.answer(seen.plural)
            case "get" if seen.part == "log":
                store.read(PODS, key)
                return self.logs.get(key, "").encode()
            case "get":
                return store.read(collection, key)
            case "list":
                return self._list(seen, collection)
            case "create" if seen.part == "binding":
                self.bind_pod(*key, body["target"]["name"])
                return success()
            case "create" if seen.part == "eviction":
                return store.delete(collection, key, body.get("deleteOptions") or {})
            case "create":
                body.setdefault("metadata", {})
                if seen.namespace:
                    body["metadata"]["namespace"] = seen.namespace
                return store.create(collection, body, manager, dry)
            case "replace":
                return store.replace(collection, key, body, part, manager, dry)
            case "merge":
                return store.merge(collection, key, body, part, manager, dry)
            case "apply":
                force = seen.params.get("force") == "true"
                return store.apply(collection, key, body, part, manager, force, dry)
            case "delete":
                return store.delete(collection, key, body or {})
        raise Refused(405, "MethodNotAllowed", f"no {seen.verb} here")

    def _list(self, seen: Seen, collection: Collection) -> Object:
        """A page.  The continue token is the version of the list and the key of its last object."""
        version, after = self.store.version, ("", "")
        if token := seen.params.get("continue"):
            at, namespace, name = token.split("|")
            version, after = int(at), (namespace, name)
            if version < self.store.compacted:
                raise Refused(410, "Expired", "The provided continue parameter is too old")
        labels, fields = seen.params.get("labelSelector", ""), seen.params.get("fieldSelector", "")
        found = [
            obj
            for obj in self.store.all(collection, seen.namespace or None)
            if (obj["metadata"].get("namespace", ""), obj["metadata"]["name"]) > after and matches(obj, labels, fields)
        ]
        size = min(int(seen.params.get("limit") or self.page), self.page)
        page = found[:size]
        metadata = {"resourceVersion": str(version)}
        if len(found) > size:
            last = page[-1]["metadata"]
            metadata["continue"] = f"{version}|{last.get('namespace', '')}|{last['name']}"
        bare = [{key: value for key, value in obj.items() if key not in ("apiVersion", "kind")} for obj in page]
        return {"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": bare}

    async def _watch(
        self, request: web.Request, seen: Seen, collection: Collection, fault: Fault | None
    ) -> web.StreamResponse:
        at = int(seen.params.get("resourceVersion") or self.store.version)
        gone = Refused(410, "Expired", f"too old resource version: {at} ({self.store.compacted})")
        if at < self.store.compacted and not self.gone_as_event:
            raise gone
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        assert isinstance(request.transport, asyncio.Transport)
        watch = _Watch(seen.plural, request.transport)
        self._watches.add(watch)
        budget = fault.after_bytes if fault is not None and fault.harm is Harm.CUT else None
        ends_s = time.monotonic() + float(seen.params.get("timeoutSeconds") or 3600)
        try:
            while not watch.end and not watch.transport.is_closing():
                watch.poked.clear()
                await self._running.wait()
                if at < self.store.compacted and at < self.store.version:
                    await response.write(line("ERROR", status(gone)))
                    break
                lines = [line(*event) for change in self.store.since(collection, at) if (event := told(change, seen))]
                at = self.store.version
                if watch.bookmark:
                    watch.bookmark = False
                    lines.append(line("BOOKMARK", {"kind": "", "metadata": {"resourceVersion": str(at)}}))
                data = b"".join(lines)
                if watch.cut_in_line:
                    data, budget = data + b'{"type":"MODIFIED","object":{"met', len(data) + 32
                if budget is not None and len(data) >= budget:
                    await response.write(data[:budget])
                    await asyncio.sleep(0.005)  # for what was written to leave before the reset
                    return broken(request)
                if data:
                    budget = None if budget is None else budget - len(data)
                    await response.write(data)
                try:
                    async with asyncio.timeout(ends_s - time.monotonic()):
                        await watch.poked.wait()
                except TimeoutError:
                    break
        except ConnectionError:
            return response
        finally:
            self._watches.discard(watch)
        return response
