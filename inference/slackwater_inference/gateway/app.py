"""The ASGI application: takes a request, waits for its slot, streams a replica's answer through.

Owns what the client sees: order, refusals, retries before the first byte, broken streams.  Owns no
choice (`routing`) and no socket (`upstream`, `server`).  Runs under `server.AbortableProtocol`, whose
`scope["state"]["abort"]` is the only way to end an answer so that no client takes it for whole.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from slackwater_inference.gateway.metrics import CONTENT_TYPE, EdgeMetrics
from slackwater_inference.gateway.routing import Outcome, Replica, ReplicaSpec, Router, Signals, Ticket
from slackwater_inference.gateway.slots import Guest, Limits, Refusal, Slots
from slackwater_inference.gateway.tunnel import Client, Session, knock
from slackwater_inference.gateway.upstream import (
    Answer,
    Broken,
    Died,
    Headers,
    Request,
    TooSlow,
    Unreachable,
    Upstream,
    request_id_of,
)

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# The engine's API and its pages; what else a replica serves stays inside.
PASSED = ("/v1/", "/model", "/wallet/")
PAGES = frozenset({"/", "/docs", "/openapi.json"})
WITHOUT_SLOT = frozenset({"GET", "HEAD", "OPTIONS"})
WAV_HEADER_BYTES = 44
CLIENT_LEFT = 499  # only in the metric; nobody is there to read it


class ClientLeft(Exception):
    """The connection ended while the request's body was still coming."""


async def body_parts(receive: Receive) -> AsyncIterator[bytes]:
    """A request's body as it comes.  Raises ClientLeft."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        yield message["body"]
        more = message["more_body"]


class Exchange:
    """One request of one client: its parts, and what was sent back so far."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self.request_id = request_id_of(scope["headers"])
        self.abort: Callable[[], None] = scope["state"]["abort"]
        self.method: str = scope["method"]
        self.path: str = scope["path"]  # decoded, as the replica routes by it
        query: bytes = scope["query_string"]
        self.target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
        self.headers: Headers = [(n, v) for n, v in scope["headers"] if n.lower() != b"x-request-id"]
        self.headers.append((b"x-request-id", self.request_id))
        self.status: int | None = None
        self.held_bytes = 0  # of its body, in our memory

    async def start(self, status: int, headers: Headers) -> None:
        """Send status and headers, with the request's id."""
        self.status = status
        kept = [(n, v) for n, v in headers if n != b"x-request-id"]
        kept.append((b"x-request-id", self.request_id))
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    async def body(self, data: bytes, more: bool) -> None:
        """Send body bytes; waits while the client is slow to read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def refuse(self, refusal: Refusal) -> None:
        """Send an error of our own."""
        headers, data = refusal.answer()
        await self.start(refusal.status, headers)
        await self.body(data, more=False)


class Gateway:
    """The application.  One event loop; all methods are called on it.
    `cut` ends what `leave` could not wait for.

    on_backlog: called when the first request has to wait, so that the policy hears of a burst early.
    """

    def __init__(
        self,
        router: Router,
        upstream: Upstream,
        limits: Limits,
        on_backlog: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._upstream = upstream
        self._limits = limits
        self._clock = clock
        self._metrics = EdgeMetrics(router)
        self._slots = Slots(router, limits, self._metrics, on_backlog, clock)
        self._live: set[Exchange | Client] = set()
        self._held_bytes = 0
        self._is_leaving = False

    def set_replicas(self, specs: list[ReplicaSpec]) -> None:
        """Replace the replicas; running streams of one that is gone go on to their end."""
        self._router.set_replicas(specs)
        logger.info("replicas n=%d slots=%d", len(specs), sum(spec.slots for spec in specs))
        self._slots.assign()

    def signals(self) -> Signals:
        """The numbers of this moment."""
        return self._router.signals(self._clock())

    def in_flight_by_replica(self) -> dict[str, int]:
        """Requests on each replica; one that left the set is there until its last one ends."""
        return self._router.in_flight_by_replica()

    def metrics_text(self) -> bytes:
        """The `edge_` numbers, as Prometheus reads them."""
        return self._metrics.render()

    def leave(self) -> None:
        """Be not ready from now on; requests that are here are still served."""
        self._is_leaving = True

    def cut(self) -> None:
        """Break every request that is still here, so that no client takes its part for a whole."""
        for exchange in self._live:
            exchange.abort()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        assert scope["type"] == "http", "the server runs without lifespan, and websockets go to `tunnel`"
        exchange = Exchange(scope, send)
        path = exchange.path
        if path in ("/healthz", "/readyz", "/metrics"):
            await self._serve_own(path, exchange)
            return
        try:
            if not path.startswith(PASSED) and path not in PAGES:
                raise Refusal(404, f"no such path: {path}")
            await self._serve(exchange, receive)
        except Refusal as refusal:
            self._note_refusal(refusal, exchange)
            await exchange.refuse(refusal)
        except ClientLeft:
            self._metrics.client_aborts.labels("queued").inc()
        self._metrics.requests.labels(str(exchange.status or CLIENT_LEFT)).inc()

    def _note_refusal(self, refusal: Refusal, guest: Guest) -> None:
        if refusal.reason is not None:
            self._metrics.rejected.labels(refusal.reason).inc()
            logger.info("refused id=%s status=%d reason=%s", _text(guest), refusal.status, refusal.reason)

    async def _serve_own(self, path: str, exchange: Exchange) -> None:
        if path == "/metrics":
            await exchange.start(200, [(b"content-type", CONTENT_TYPE)])
            await exchange.body(self.metrics_text(), more=False)
        elif path == "/readyz" and (self._is_leaving or not self._router.replicas):
            await exchange.refuse(Refusal(503, "leaving" if self._is_leaving else "no replica is ready"))
        else:
            await exchange.start(200, [(b"content-type", b"application/json")])
            await exchange.body(b'{"status": 200, "message": "ok"}', more=False)

    async def _serve(self, exchange: Exchange, receive: Receive) -> None:
        self._live.add(exchange)
        try:
            body = await self._read(exchange, receive)
            request = Request(exchange.method, exchange.target, exchange.headers, body)
            needs_slot = exchange.method not in WITHOUT_SLOT and exchange.path.startswith("/v1/")
            work = self._with_slot(exchange, request) if needs_slot else self._without_slot(exchange, request)
            await _until_gone(work, receive)
        finally:
            self._live.remove(exchange)
            self._held_bytes -= exchange.held_bytes

    async def _read(self, exchange: Exchange, receive: Receive) -> bytes:
        """The request's body.  Raises Refusal (413, 429) and ClientLeft."""
        limits = self._limits
        too_large = Refusal(413, f"the body may have {limits.max_body_bytes} bytes", "too_large")
        declared = dict(exchange.headers).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limits.max_body_bytes:
            raise too_large
        parts: list[bytes] = []
        async for part in body_parts(receive):
            parts.append(part)
            exchange.held_bytes += len(part)
            self._held_bytes += len(part)
            if exchange.held_bytes > limits.max_body_bytes:
                raise too_large
            if self._held_bytes > limits.max_held_bytes:
                raise Refusal(429, "too many large requests wait", "memory", self._router.retry_after_s())
        return b"".join(parts)

    # Requests that hold a slot

    async def tunnel(self, client: Client) -> None:
        """Serve one websocket, which holds its slot until it ends: same order and refusals as any request."""

        async def attempt(ticket: Ticket, replica: Replica) -> Outcome | None:
            timeouts_s = self._upstream.connect_timeout_s, self._upstream.silence_timeout_s
            async with knock(replica.url, client, *timeouts_s) as answer:
                if isinstance(answer, Session):
                    self._router.answered(ticket)
                    return await self._splice(answer, client, ticket)
                if answer.status == 503 and self._router.has_other(ticket):
                    return None
                self._router.answered(ticket)
                client.answer(answer.status, answer.headers, answer.body)
                return Outcome.FAILED if answer.status >= 500 else Outcome.DONE

        self._live.add(client)
        try:
            if client.method != "GET" or not client.target.startswith(b"/v1/"):
                raise Refusal(404, "no such websocket; it is GET /v1/tts/live")
            await self._slots.hold(client, attempt)
        except Refusal as refusal:
            self._note_refusal(refusal, client)
            client.refuse(refusal)
        finally:
            self._live.remove(client)
            self._metrics.requests.labels(str(client.status or CLIENT_LEFT)).inc()

    async def _splice(self, session: Session, client: Client, ticket: Ticket) -> Outcome:
        def on_audio(asking_s: float) -> None:
            self._metrics.ttfb.observe(self._router.first_audio(ticket, self._clock(), asking_s))

        outcome = await session.splice(client, self._limits.idle_timeout_s, on_audio)
        if outcome is Outcome.FAILED:
            logger.warning("websocket broken id=%s", _text(client))
            self._metrics.broken.inc()
        return outcome

    async def _with_slot(self, exchange: Exchange, request: Request) -> None:
        async def attempt(ticket: Ticket, replica: Replica) -> Outcome | None:
            async with self._upstream.open(replica.url, request) as answer:
                if answer.status == 503 and self._router.has_other(ticket):
                    return None
                self._router.answered(ticket)
                return await self._forward(answer, exchange, ticket)

        await self._slots.hold(exchange, attempt)

    # Requests without one

    async def _without_slot(self, exchange: Exchange, request: Request) -> None:
        avoid: set[Replica] = set()
        for _ in range(self._limits.max_tries):
            replica = self._router.pick(self._clock(), avoid, needs_slot=False)
            if replica is None:
                break
            avoid.add(replica)
            try:
                async with self._upstream.open(replica.url, request) as answer:
                    await self._forward(answer, exchange, None)
                    return
            except Unreachable as error:
                self._slots.note_retry("unreachable", exchange, replica.uid, str(error))
                self._router.mark_down(replica, self._clock())
            except Died as error:
                self._slots.note_retry("died", exchange, replica.uid, str(error))
                if exchange.method == "POST":  # it may have been done: a voice must not be made twice
                    raise Refusal(502, "the replica died before it answered; look whether it was done") from error
            except TooSlow as error:
                raise Refusal(502, "the replica sent nothing for too long") from error
        if avoid:
            raise Refusal(502, f"no answer from {len(avoid)} replicas")
        raise Refusal(503, "no replica is ready", "no_replica", self._router.retry_after_s())

    # The answer

    async def _forward(self, answer: Answer, exchange: Exchange, ticket: Ticket | None) -> Outcome:
        """Stream the answer through, each chunk as it comes.  A broken answer breaks the client's."""
        now_s = self._clock()
        if ticket is not None:
            self._metrics.ttfb.observe(now_s - ticket.arrived_s)
        audio_from = _first_audio_offset(answer) if ticket is not None else None
        num_bytes = 0
        await exchange.start(answer.status, answer.headers)
        try:
            async for chunk in answer.chunks():
                num_bytes += len(chunk)
                await exchange.body(chunk, more=True)
                if ticket is not None and audio_from is not None and num_bytes > audio_from:
                    self._router.first_audio(ticket, self._clock())
                    audio_from = None
        except Broken as error:
            logger.warning("stream broken id=%s bytes=%d error=%s", _text(exchange), num_bytes, error)
            self._metrics.broken.inc()
            exchange.abort()
            await asyncio.sleep(0)  # the server hears of it before we return, and logs nothing of its own
            return Outcome.FAILED
        await exchange.body(b"", more=False)
        return Outcome.FAILED if answer.status >= 500 else Outcome.DONE


async def _until_gone(work: Awaitable[None], receive: Receive) -> None:
    """Run `work`; cancel it as soon as the client's connection ends."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        task.cancel()  # does nothing to one that is done
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _first_audio_offset(answer: Answer) -> int | None:
    """How many body bytes come before audio; None when the answer is no audio."""
    content_type = dict(answer.headers).get(b"content-type", b"").lower()
    if answer.status != 200 or not content_type.startswith(b"audio/"):
        return None
    return WAV_HEADER_BYTES if b"wav" in content_type else 0


def _text(guest: Guest) -> str:
    return guest.request_id.decode("ascii")
