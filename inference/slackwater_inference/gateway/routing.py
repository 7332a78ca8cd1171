"""The queue and the choice: which request goes to which replica, and what the policy is told.

Owns the replicas' in-flight counts, the bounded first-come-first-served queue, the totals and the
honest `Retry-After`.  Owns no clock (`now_s` comes in, on one monotonic clock), no socket and no
task: `app` calls it from one event loop.
"""

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil

FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 4.0
MAX_RETRY_AFTER_S = 60
MAX_SAMPLES = 4096  # first-audio times kept, whatever the rate


class Outcome(StrEnum):
    """How a request ended.  Exactly one each."""

    DONE = "done"  # answered whole
    FAILED = "failed"  # our or the replica's fault: a 5xx, or a stream that broke
    GONE = "gone"  # the client left, or was cut off when the gateway left
    REFUSED = "refused"  # waited as long as it may, and no replica took it


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """An engine replica as the supervisor names it.  `slots` requests run on it at once."""

    uid: str
    url: str
    slots: int


@dataclass(slots=True, eq=False)
class Replica:
    """A replica with what it does now.  One that left the set stays until its last request ends."""

    uid: str
    url: str
    slots: int
    in_flight: int = 0
    is_leaving: bool = False
    num_unreachable: int = 0  # connections refused in a row
    down_until_s: float = 0.0  # no request goes there before


@dataclass(slots=True, eq=False)
class Ticket:
    """One request: queued while `replica` is None, else it holds a slot there."""

    number: int  # in order of arrival
    arrived_s: float
    replica: Replica | None = None
    started_s: float = 0.0
    avoid: set[Replica] = field(default_factory=set)  # each sent this request back once already


@dataclass(frozen=True, slots=True)
class Signals:
    """What the policy's traffic part reads; the fields are the `signals` event's."""

    in_flight: int
    queued: int
    arrivals_total: int
    rejected_total: int
    failed_total: int
    oldest_queued_s: float
    first_audio_p95_s: float | None  # over the last window; None = no request


class Router:
    """Gives slots to requests in their order of arrival, each on the least loaded replica.

    max_queued: requests that may wait; the next is refused.
    window_s: span of `first_audio_p95_s`.
    first_guess_s: mean service time before any request has ended.
    """

    def __init__(self, max_queued: int, window_s: float = 10.0, first_guess_s: float = 2.0) -> None:
        if max_queued < 0:
            raise ValueError(f"max_queued must be 0 or more, got {max_queued}")
        self._max_queued = max_queued
        self._window_s = window_s
        self._mean_service_s = first_guess_s
        self._replicas: dict[tuple[str, str], Replica] = {}
        self._queue: list[Ticket] = []  # sorted by number
        self._running: set[Ticket] = set()
        self._first_audio: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)  # (moment, seconds)
        self._rejected_total = 0
        self._ended = dict.fromkeys(Outcome, 0)
        self.arrivals_total = 0

    @property
    def in_flight(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Requests that wait for a slot."""
        return len(self._queue)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas that may get requests."""
        return tuple(r for r in self._replicas.values() if not r.is_leaving)

    def ended_total(self, outcome: Outcome) -> int:
        """Admitted requests that ended so."""
        return self._ended[outcome]

    def in_flight_by_replica(self) -> dict[str, int]:
        """Requests that hold a slot, by the replica's uid: each one in the set, and those that left it with some."""
        counts: dict[str, int] = {}
        for replica in self._replicas.values():
            counts[replica.uid] = counts.get(replica.uid, 0) + replica.in_flight
        return counts

    def set_replicas(self, specs: Iterable[ReplicaSpec]) -> None:
        """Replace the set.  One that is gone from it gets nothing new and finishes what it has.

        A known uid with another url is another replica.
        """
        wanted = {(spec.uid, spec.url): spec for spec in specs}
        for key, replica in list(self._replicas.items()):
            replica.is_leaving = key not in wanted
            if replica.is_leaving and not replica.in_flight:
                del self._replicas[key]
        for key, spec in wanted.items():
            replica = self._replicas.setdefault(key, Replica(spec.uid, spec.url, spec.slots))
            replica.slots = spec.slots

    def arrive(self, now_s: float) -> Ticket | None:
        """Put a new request at the end of the queue; None when it is refused, for no slot is free
        and the queue is full."""
        self.arrivals_total += 1
        if len(self._queue) >= self._max_queued + self._num_free(now_s):
            self._rejected_total += 1
            return None
        ticket = Ticket(self.arrivals_total, now_s)
        self._queue.append(ticket)
        return ticket

    def assign(self, now_s: float) -> list[Ticket]:
        """Give free slots to waiting requests, oldest first, and return those that got one.

        Only a request that a replica sent back can be overtaken, when none but that one is free.
        """
        placed = []
        for ticket in self._queue:
            replica = self.pick(now_s, ticket.avoid)
            if replica is None:
                if not ticket.avoid:  # nothing is free for anybody behind it either
                    break
                continue
            replica.in_flight += 1
            ticket.replica, ticket.started_s = replica, now_s
            placed.append(ticket)
        if placed:
            self._running.update(placed)
            self._queue = [ticket for ticket in self._queue if ticket.replica is None]
        return placed

    def pick(self, now_s: float, avoid: Collection[Replica] = (), needs_slot: bool = True) -> Replica | None:
        """The least loaded replica that can take a request now (ties: the first in the set), or None."""
        ready = [
            r
            for r in self._replicas.values()
            if not r.is_leaving
            and r.down_until_s <= now_s
            and r not in avoid
            and (r.in_flight < r.slots or not needs_slot)
        ]
        return min(ready, key=lambda r: r.in_flight / r.slots, default=None)

    def has_other(self, ticket: Ticket) -> bool:
        """Is there a replica, free or busy, besides its own, that did not send this request back?"""
        return any(r not in ticket.avoid and r is not ticket.replica for r in self.replicas)

    def send_back(self, ticket: Ticket) -> None:
        """A replica died with this request, or declined it, before the first byte: it waits again,
        at its old place, for any other replica."""
        ticket.avoid.add(self._free_slot(ticket))
        insort(self._queue, ticket, key=lambda t: t.number)

    def unreachable(self, ticket: Ticket, now_s: float) -> None:
        """The replica took no connection: the request waits again, and the replica gets none for a
        while that doubles each time."""
        self.mark_down(self._free_slot(ticket), now_s)
        insort(self._queue, ticket, key=lambda t: t.number)

    def mark_down(self, replica: Replica, now_s: float) -> None:
        """Send nothing to this replica for a while that doubles with each call."""
        if replica.down_until_s <= now_s:  # else several found it down at the same moment: one failure
            replica.down_until_s = now_s + min(FIRST_BACKOFF_S * 2**replica.num_unreachable, MAX_BACKOFF_S)
            replica.num_unreachable += 1

    def answered(self, ticket: Ticket) -> None:
        """Its replica sent the first byte: it is up."""
        assert ticket.replica is not None
        ticket.replica.num_unreachable = 0

    def first_audio(self, ticket: Ticket, now_s: float, asking_s: float = 0.0) -> float:
        """Note that the first audio byte left; returns the seconds since the request arrived, without the
        asking_s in which the request waited for its own client."""
        waited_s = now_s - ticket.arrived_s - asking_s
        self._first_audio.append((now_s, waited_s))
        return waited_s

    def finish(self, ticket: Ticket, outcome: Outcome, now_s: float) -> None:
        """The request ended, queued or running; its slot is free again.  Exactly once a ticket."""
        if ticket.replica is None:
            self._queue.remove(ticket)
        else:
            self._free_slot(ticket)
            if outcome is Outcome.DONE:
                self._mean_service_s += 0.2 * (now_s - ticket.started_s - self._mean_service_s)
        self._ended[outcome] += 1

    def next_wake_s(self, now_s: float) -> float | None:
        """When a replica that is down may be tried again, if somebody waits; None = nothing to wake for."""
        moments = [r.down_until_s for r in self.replicas if r.down_until_s > now_s]
        return min(moments, default=None) if self._queue else None

    def retry_after_s(self) -> int:
        """Whole seconds in which the present queue has gone through, as far as one can know."""
        slots = sum(r.slots for r in self.replicas)
        if not slots:  # nothing tells when one comes
            return 5
        return min(max(1, ceil(len(self._queue) * self._mean_service_s / slots)), MAX_RETRY_AFTER_S)

    def signals(self, now_s: float) -> Signals:
        """The numbers of this moment."""
        while self._first_audio and self._first_audio[0][0] < now_s - self._window_s:
            self._first_audio.popleft()
        waits_s = sorted(waited_s for _, waited_s in self._first_audio)
        return Signals(
            in_flight=len(self._running),
            queued=len(self._queue),
            arrivals_total=self.arrivals_total,
            rejected_total=self._rejected_total + self._ended[Outcome.REFUSED],
            failed_total=self._ended[Outcome.FAILED],
            oldest_queued_s=now_s - self._queue[0].arrived_s if self._queue else 0.0,
            first_audio_p95_s=waits_s[ceil(0.95 * len(waits_s)) - 1] if waits_s else None,
        )

    def _num_free(self, now_s: float) -> int:
        return sum(max(0, r.slots - r.in_flight) for r in self.replicas if r.down_until_s <= now_s)

    def _free_slot(self, ticket: Ticket) -> Replica:
        replica = ticket.replica
        assert replica is not None
        assert replica.in_flight > 0
        replica.in_flight -= 1
        ticket.replica = None
        self._running.remove(ticket)
        if replica.is_leaving and not replica.in_flight:
            self._replicas.pop((replica.uid, replica.url), None)
        return replica
