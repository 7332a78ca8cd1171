"""How far each cleaning job is, as its keeper reads it from the ledger: `Progress` for the cluster.

Owns the polls of all keepers and the newest answers.  The contract of the wire is operator/README.md.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from slackwater_operator.cluster.kube.ports import JobProgress, WorkerProgress
from slackwater_operator.operate.remote import Asker, BadAnswer, Outage, Unheard

logger = logging.getLogger(__name__)

BUSY_S = 1.0  # between two polls while workers live: the age of a durable point decides who is evicted
QUIET_S = 5.0
POLLS_PER_S = 100.0  # of all keepers together: with hundreds of them each is asked more rarely, and an age only grows
TIMEOUT_S = 5.0  # a ledger of many workers on a slow network file system
COUNTS = ("items_total", "items_done", "items_quarantined", "items_open", "shards_open")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a keeper is, and which ledger it reads: what is equal for one is the same one."""

    url: str
    ledger: str = ""


class Keeper:
    """Polls one keeper until `close`.   crowd: how many keepers are polled, this one included."""

    def __init__(
        self,
        job: str,
        place: Place,
        asker: Asker,
        clock: Callable[[], float],
        poke: Callable[[], None],
        crowd: Callable[[], int],
    ) -> None:
        self.place = place
        self.progress: JobProgress | None = None
        self.workers: dict[str, WorkerProgress] = {}
        self._job = job
        self._asker = asker
        self._clock = clock
        self._poke = poke
        self._crowd = crowd
        self._outage = Outage(f"keeper of {job} at {place.url}", "its workers' durable points are not known", clock())
        self._task = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """Stop asking."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def verify(self, receipt: Mapping[str, Any]) -> bool | None:
        """Whether the ledger holds a receipt; None = it cannot be told now."""
        try:
            body = {"receipt": dict(receipt)}
            answer = await self._asker.ask("POST", f"{self.place.url}/verify", TIMEOUT_S, json=body)
            return bool(json.loads(answer)["holds"])
        except Unheard as error:
            if error.status == HTTPStatus.UNPROCESSABLE_ENTITY:  # no keeper will ever take this one
                logger.error("keeper of %s refuses a receipt: %s", self._job, error)
                return False
            return None  # the poll tells people that it does not answer
        except (ValueError, KeyError, TypeError):
            return None

    async def _poll(self) -> None:
        while True:
            try:
                self._take(await self._asker.ask("GET", f"{self.place.url}/progress", TIMEOUT_S))
            except Unheard as error:
                await asyncio.sleep(self._outage.failed(error, self._clock()))
            else:
                self._outage.answered(self._clock())
                await asyncio.sleep(max(BUSY_S if self.workers else QUIET_S, self._crowd() / POLLS_PER_S))

    def _take(self, answer: bytes) -> None:
        before = self.progress
        self.progress, self.workers = read_progress(answer, self._clock())
        if before is None or before.shards_open != self.progress.shards_open:
            self._poke()


def read_progress(body: bytes, now_s: float) -> tuple[JobProgress, dict[str, WorkerProgress]]:
    """A keeper's answer: the job, and its living workers by name.  Raises BadAnswer."""
    try:
        fields: Any = json.loads(body)
        counts = {name: None if fields.get(name) is None else int(fields[name]) for name in COUNTS}
        audio = fields.get("audio_s")
        workers = {
            str(name): WorkerProgress(
                durable_s=None if worker.get("durable_age_s") is None else now_s - float(worker["durable_age_s"]),
                items=int(worker.get("items") or 0),
                shard=None if worker.get("shard") is None else str(worker["shard"]),
            )
            for name, worker in fields.get("workers", {}).items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise BadAnswer(f"not the progress of a keeper ({error}): {body[:80]!r}") from None
    return JobProgress(now_s, audio_s=None if audio is None else float(audio), **counts), workers


class Keepers:
    """Polls every keeper that it follows.  One event loop; all methods are called on it."""

    def __init__(self, asker: Asker, clock: Callable[[], float], poke: Callable[[], None]) -> None:
        self._asker = asker
        self._clock = clock
        self._poke = poke
        self._wanted: Mapping[str, Place] = {}
        self._keepers: dict[str, Keeper] = {}

    async def follow(self, wanted: Mapping[str, Place]) -> None:
        """The keeper of each job from now on; what one said stands until another one of the same ledger speaks."""
        if wanted == self._wanted:
            return
        gone = [job for job in self._keepers if job not in wanted]
        # Together: one after another, hundreds of them would outlast a Lease.
        await asyncio.gather(*(self._keepers.pop(job).close() for job in gone))
        for job, place in wanted.items():
            present = self._keepers.get(job)
            if present is not None and present.place == place:
                continue
            keeper = Keeper(job, place, self._asker, self._clock, self._poke, lambda: len(self._keepers))
            if present is not None:
                await present.close()
            if present is not None and present.place.ledger == place.ledger:
                keeper.progress, keeper.workers = present.progress, present.workers
            self._keepers[job] = keeper
        self._wanted = wanted

    async def close(self) -> None:
        """Stop following."""
        await self.follow({})

    def follows(self, job: str) -> bool:
        """There is a keeper of it."""
        return job in self._keepers

    # --- `Progress` ---------------------------------------------------------------------------------

    def job(self, uid: str) -> JobProgress | None:
        """The newest answer of that job's keeper."""
        keeper = self._keepers.get(uid)
        return keeper.progress if keeper else None

    def worker(self, uid: str, name: str) -> WorkerProgress | None:
        """A living worker of that job."""
        keeper = self._keepers.get(uid)
        return keeper.workers.get(name) if keeper else None

    async def verify(self, uid: str, receipt: Mapping[str, Any]) -> bool | None:
        """Whether that job's ledger holds a receipt; None = not to be told now, or there is no keeper."""
        keeper = self._keepers.get(uid)
        return await keeper.verify(receipt) if keeper else None
