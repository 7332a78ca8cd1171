"""Intake by kopf, in a thread and an event loop of its own: it hears of our resources first and answers the probes.

Owns the thread.  It writes nothing: no peering, no finalizers, no annotations, no Events; what it hears is handed to
the caches of the operator's own loop, which works by level from these and has watches of its own, so a kopf watcher
that dies costs nothing but earliness.  kopf ends now and then (its API calls have a bound of tries); it is begun again,
and the probes with it.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import aiohttp
import kopf

from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.connection import Connection
from slackwater_operator.resources import names

logger = logging.getLogger(__name__)

AGAIN_S = 1.0
END_S = 10.0

Heard = Callable[[str, str, Mapping[str, Any]], None]  # (kind, event type, object)


def hand_over(loop: asyncio.AbstractEventLoop, copies: Iterable[Cache]) -> Heard:
    """What gives each new or edited object to the copy of its kind, in the loop that runs the copies.

    The copy's change is what a tick is made early for: one before the copy has the object would decide nothing.
    """
    by_kind = {copy.resource.kind: copy for copy in copies}
    seen: dict[str, int] = {}  # uid -> generation; a change of status alone is no news

    def heard(kind: str, change: str, obj: Mapping[str, Any]) -> None:
        metadata = obj.get("metadata", {})
        uid, generation = str(metadata.get("uid")), int(metadata.get("generation") or 0)
        if change == "DELETED":  # the copy's own watch says so
            seen.pop(uid, None)
        elif seen.get(uid) != generation:
            seen[uid] = generation
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(by_kind[kind].remember, dict(obj))

    return heard


class Intake:
    """Runs until `stop`.

    heard: called in the intake's own thread, once for each event of a kind of ours.
    sick: why this process is not well, "" = it is; asked by each probe, in the intake's own thread.
    """

    def __init__(self, connection: Connection, host: str, port: int, heard: Heard, sick: Callable[[], str]) -> None:
        self._connection = connection
        self._endpoint = f"http://{f'[{host}]' if ':' in host else host}:{port}/healthz"
        self._heard = heard
        self._sick = sick
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)
        logging.getLogger("kopf").setLevel(logging.CRITICAL)  # what matters of it is said here
        self._was_sick = False
        self._session: aiohttp.ClientSession | None = None
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, within some seconds."""
        self._ended.set()
        if (running := self._running) is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                running[0].call_soon_threadsafe(running[1].cancel)
        self._thread.join(END_S)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                asyncio.run(self._operate())
            except asyncio.CancelledError:
                continue
            except Exception as error:  # noqa: BLE001 - kopf raises its own and its libraries' errors, of many kinds
                logger.warning("intake begins again: %s: %s", type(error).__name__, error)
            self._ended.wait(AGAIN_S)

    async def _operate(self) -> None:
        asyncio.get_running_loop().set_exception_handler(_note)
        # Not by kopf's own stop flag: the wait for it is a task that kopf itself then waits five seconds for.
        operator = asyncio.ensure_future(
            kopf.operator(
                registry=self._registry(),
                settings=quiet_settings(),
                standalone=True,
                clusterwide=True,
                liveness_endpoint=self._endpoint,
            )
        )
        self._running = (asyncio.get_running_loop(), operator)
        if self._ended.is_set():
            operator.cancel()
        try:
            await operator
        finally:
            self._running = None
            if self._session is not None:
                await self._session.close()
                self._session = None

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> Any:
            return await self._login()

        @kopf.on.probe(registry=registry, id="watches")
        async def probe(**_: Any) -> str:
            why = self._sick()
            if why and not self._was_sick:
                logger.error("not well: %s", why)
            self._was_sick = bool(why)
            if why:
                raise kopf.PermanentError(why)
            return "ok"

        for kind in names.KINDS:
            self._listen(registry, kind)
        return registry

    def _listen(self, registry: kopf.OperatorRegistry, kind: names.KindNames) -> None:
        @kopf.on.event(names.GROUP, names.VERSION, kind.plural, registry=registry, id=kind.plural)
        async def event(event: Mapping[str, Any], **_: Any) -> None:
            self._heard(kind.kind, str(event.get("type") or "LISTED"), event["object"])

    async def _login(self) -> kopf.AiohttpSession:
        """The operator's own connection, with the credentials of now; kopf asks again when they run out."""
        connection = self._connection
        headers = dict(await connection.credentials.headers())
        if self._session is not None:
            await self._session.close()
        connector = aiohttp.TCPConnector(ssl=connection.tls if connection.tls is not None else True)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, proxy=connection.proxy)
        return kopf.AiohttpSession(server=connection.server, aiohttp_session=self._session)


class NoDiffs(kopf.DiffBaseStorage):
    """Compares nothing: at each event kopf would copy the whole object for handlers of changes, and there are none."""

    def build(
        self,
        *,
        body: kopf.Body,  # noqa: ARG002
        extra_fields: Iterable[kopf.FieldSpec] | None = None,  # noqa: ARG002
    ) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:  # noqa: ARG002
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


def _note(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What kopf's tasks leave behind when it begins again was said by the error that ended it."""
    logger.debug("intake: %s: %s", context.get("message"), context.get("exception"))


def quiet_settings() -> kopf.OperatorSettings:
    """kopf as a pure listener."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True  # our kinds are there before we are, and all namespaces are one watch
    settings.watching.connect_timeout = 10
    settings.networking.connect_timeout = 10
    settings.networking.request_timeout = 60
    settings.process.ultimate_exiting_timeout = None  # the process is not kopf's to end
    settings.persistence.diffbase_storage = NoDiffs()
    return settings
