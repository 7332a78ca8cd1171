"""How a request gets a slot, keeps it and gives it back, over plain HTTP and over a websocket alike.

Owns the wait for a turn, the tries on one replica after another and the refusals; `routing` chooses.
What a try does with its replica is the caller's: `app` streams an answer, `tunnel` joins two connections.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from slackwater_inference.gateway.metrics import EdgeMetrics
from slackwater_inference.gateway.routing import Outcome, Replica, Router, Ticket
from slackwater_inference.gateway.upstream import Died, Headers, TooSlow, Unreachable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may cost.

    queue_timeout_s: longest wait for a slot.     max_body_bytes: of one request, as the hosted API has it.
    max_held_bytes: of all bodies held at once, so that a full queue of big ones does not fill the memory.
    max_tries: replicas that may die with one request before it is suspected to be the cause.
    idle_timeout_s: longest time in which a websocket passes no message in either direction; pings are none,
    since a client library sends them on its own while it forgot the session that holds the slot.
    """

    queue_timeout_s: float = 30.0
    max_body_bytes: int = 32 * 2**20
    max_held_bytes: int = 256 * 2**20
    max_tries: int = 3
    idle_timeout_s: float = 300.0


class Refusal(Exception):
    """An answer of the gateway itself.  `reason` is the metric's label; None = not an overload."""

    def __init__(self, status: int, message: str, reason: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s

    def answer(self) -> tuple[Headers, bytes]:
        """Headers and body, the body exactly `{"status", "message"}`."""
        data = json.dumps({"status": self.status, "message": str(self)}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        return headers, data


class Guest(Protocol):
    """Who asks for a slot.  status: what was sent to it; None = nothing yet."""

    request_id: bytes
    status: int | None


# One try on the ticket's replica.  Returns how the request ended, or None when the replica declined it.
# Raises Unreachable, Died and TooSlow, after which the client has still seen nothing.
Attempt = Callable[[Ticket, Replica], Awaitable[Outcome | None]]


class Slots:
    """The asynchronous side of a router.  One event loop; all methods are called on it.

    on_backlog: called when the first request has to wait, so that the policy hears of a burst early.
    """

    def __init__(
        self,
        router: Router,
        limits: Limits,
        metrics: EdgeMetrics,
        on_backlog: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._limits = limits
        self._metrics = metrics
        self._on_backlog = on_backlog
        self._clock = clock
        self._turns: dict[Ticket, asyncio.Event] = {}  # set when the ticket holds a slot
        self._wake: asyncio.TimerHandle | None = None

    async def hold(self, guest: Guest, attempt: Attempt) -> None:
        """Wait for a slot and make tries until one ends the request; the slot is free again at return.

        Raises Refusal.  Cancelled when the client leaves.
        """
        ticket = self._router.arrive(self._clock())
        if ticket is None:
            raise Refusal(429, "all slots are busy and the queue is full", "queue_full", self._router.retry_after_s())
        outcome = Outcome.FAILED
        try:
            outcome = await self._try_replicas(ticket, guest, attempt)
            if outcome is Outcome.GONE:
                self._metrics.client_aborts.labels("streaming").inc()
        except asyncio.CancelledError:
            outcome = Outcome.GONE
            phase = "queued" if ticket.replica is None else "streaming" if guest.status else "first_byte"
            self._metrics.client_aborts.labels(phase).inc()
            raise
        except Refusal as refusal:
            outcome = Outcome.FAILED if refusal.reason is None else Outcome.REFUSED
            raise
        finally:
            self._turns.pop(ticket, None)
            self._router.finish(ticket, outcome, self._clock())
            self.assign()

    def assign(self) -> None:
        """Give free slots to those who wait, and wake again when a replica that is down may be tried."""
        now_s = self._clock()
        for ticket in self._router.assign(now_s):
            self._turns[ticket].set()
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        wake_s = self._router.next_wake_s(now_s)
        if wake_s is not None:
            self._wake = asyncio.get_running_loop().call_later(wake_s - now_s, self.assign)

    def note_retry(self, reason: str, guest: Guest, uid: str, error: str) -> None:
        """Count and log a try that ended before a byte."""
        self._metrics.retries.labels(reason).inc()
        logger.info("replica %s id=%s replica=%s error=%s", reason, guest.request_id.decode(), uid, error)

    async def _try_replicas(self, ticket: Ticket, guest: Guest, attempt: Attempt) -> Outcome:
        num_died = 0
        while True:
            await self._wait_for_slot(ticket, num_died)
            replica = ticket.replica
            assert replica is not None
            try:
                outcome = await attempt(ticket, replica)
                if outcome is not None:
                    return outcome
                self.note_retry("declined", guest, replica.uid, "503")
                self._router.send_back(ticket)
            except Unreachable as error:
                self.note_retry("unreachable", guest, replica.uid, str(error))
                self._router.unreachable(ticket, self._clock())
            except Died as error:
                self.note_retry("died", guest, replica.uid, str(error))
                num_died += 1
                if num_died >= self._limits.max_tries:
                    raise Refusal(502, f"{num_died} replicas died before they answered") from error
                self._router.send_back(ticket)
            except TooSlow as error:
                raise Refusal(502, "the replica sent nothing for too long") from error

    async def _wait_for_slot(self, ticket: Ticket, num_died: int) -> None:
        turn = self._turns[ticket] = asyncio.Event()
        self.assign()
        if not turn.is_set() and self._router.queued == 1:
            self._on_backlog()
        try:
            async with asyncio.timeout(self._limits.queue_timeout_s):
                await turn.wait()
        except TimeoutError:
            if turn.is_set():  # both in one turn of the loop: the slot is ours
                return
            if num_died:
                raise Refusal(502, "the replica died before it answered, and no other came free") from None
            waited = f"within {self._limits.queue_timeout_s:g} s"
            retry_after_s = self._router.retry_after_s()
            if self._router.replicas:
                raise Refusal(503, f"no slot came free {waited}", "no_slot", retry_after_s) from None
            raise Refusal(503, f"no replica was ready {waited}", "no_replica", retry_after_s) from None
