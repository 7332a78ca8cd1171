"""One gateway process, as the operator speaks with it: a long poll for its signals, a PUT of its replicas.

Owns the two requests and what the newest answers said.  What several gateways of a service say together is `signals`'.
The contract of the wire is operator/README.md.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slackwater_operator.cluster.kube.ports import Replica
from slackwater_operator.operate.remote import MAX_RETRY_S, Asker, BadAnswer, Outage, Unheard

logger = logging.getLogger(__name__)

WAIT_S = 1.0  # of one poll; the gateway takes no more
PATIENCE_S = 2.0  # beyond it: a gateway's event loop may be busy with streams
FRESH_S = 2.5  # an answer counts for so long: one lost poll is no outage


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to a poll."""

    at_s: float
    in_flight: int
    queued: int
    arrivals_total: int
    oldest_queued_s: float
    first_audio_p95_s: float | None
    replicas: Mapping[str, int]
    backlogs: int
    boot: str


class Gateway:
    """Polls one gateway and tells it its replicas, until `close`.

    on_answer: called with each answer after it was taken in.
    """

    def __init__(
        self,
        service: str,
        url: str,
        asker: Asker,
        clock: Callable[[], float],
        on_answer: Callable[["Gateway", Answer, Answer | None], None],
    ) -> None:
        self.service = service
        self.url = url
        self.is_required = True  # False: it leaves, and the others speak for the service
        self.newest: Answer | None = None
        self.arrivals_total = 0  # over all its lives
        self.confirmed: frozenset[str] | None = None  # what it took last; None = nothing, in this life
        self._asker = asker
        self._clock = clock
        self._on_answer = on_answer
        self._outage = Outage(
            f"gateway of {service} at {url}", "its signals go stale, so nothing shrinks and nothing grows", clock()
        )
        self._wanted: tuple[Replica, ...] | None = None
        self._changed = asyncio.Event()
        self._tasks = (asyncio.create_task(self._poll()), asyncio.create_task(self._keep_told()))

    async def close(self) -> None:
        """Stop asking."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def tell(self, replicas: Sequence[Replica]) -> None:
        """These are its replicas from now on."""
        wanted = tuple(sorted(replicas, key=lambda replica: replica.uid))
        if wanted != self._wanted:
            self._wanted = wanted
            self._changed.set()

    def is_fresh(self, now_s: float) -> bool:
        """Its newest answer still counts."""
        return self.newest is not None and now_s - self.newest.at_s <= FRESH_S

    async def _poll(self) -> None:
        while True:
            try:
                # The first answer at once, as after an outage: a new leader knows nothing before it.
                query = {"wait": f"{WAIT_S if self._outage.is_up else 0.0:g}"}
                if self.newest is not None:
                    query["seen"] = str(self.newest.backlogs)
                answer = await self._asker.ask("GET", f"{self.url}/signals", WAIT_S + PATIENCE_S, params=query)
                self._take(read_answer(answer, self._clock()))
            except Unheard as error:
                await asyncio.sleep(self._outage.failed(error, self._clock()))

    def _take(self, answer: Answer) -> None:
        before, self.newest = self.newest, answer
        if before is not None and before.boot == answer.boot:
            self.arrivals_total += max(0, answer.arrivals_total - before.arrivals_total)
        else:  # a new life counts from 0, and has not been told anything
            self.arrivals_total += answer.arrivals_total
            self.confirmed = None
            self._changed.set()
        self._outage.answered(self._clock())
        self._on_answer(self, answer, before)

    async def _keep_told(self) -> None:
        refused = ""
        while True:
            await self._changed.wait()
            self._changed.clear()
            wanted = self._wanted
            if wanted is None:
                continue
            body = {"replicas": [{"uid": r.uid, "url": r.url, "slots": r.slots} for r in wanted]}
            try:
                await self._asker.ask("PUT", f"{self.url}/replicas", PATIENCE_S, json=body)
            except Unheard as error:
                if error.status is None:
                    delay_s = self._outage.failed(error, self._clock())
                else:
                    delay_s = MAX_RETRY_S
                    if refused != (refused := str(error)):
                        logger.error("gateway of %s at %s refuses its replicas: %s", self.service, self.url, refused)
                self._changed.set()  # again, with what is wanted by then
                await asyncio.sleep(delay_s)
            else:
                refused = ""
                self.confirmed = frozenset(replica.uid for replica in wanted)


def read_answer(body: bytes, now_s: float) -> Answer:
    """The signals in an answer.  Raises BadAnswer, naming what is missing."""
    try:
        fields: Any = json.loads(body)
        first_audio = fields.get("first_audio_p95_s")
        return Answer(
            at_s=now_s,
            in_flight=int(fields["in_flight"]),
            queued=int(fields["queued"]),
            arrivals_total=int(fields["arrivals_total"]),
            oldest_queued_s=float(fields.get("oldest_queued_s") or 0.0),
            first_audio_p95_s=None if first_audio is None else float(first_audio),
            replicas={str(uid): int(count) for uid, count in fields.get("replicas", {}).items()},
            backlogs=int(fields.get("backlogs", 0)),
            boot=str(fields.get("boot", "")),
        )
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise BadAnswer(f"not the signals of a gateway ({type(error).__name__}: {error}): {body[:80]!r}") from None
