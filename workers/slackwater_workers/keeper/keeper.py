"""What a keeper knows of its ledger: how far the job is, what each worker made, whether a receipt holds.

Owns what is remembered between two looks.  What only a reading of every byte shows (lost, doubled) is not here:
`slackwater clean verify` tells that.  Called by `server`.
"""

import time
from collections.abc import Callable
from math import inf
from typing import Any

from slackwater_workers.core import Receipt
from slackwater_workers.keeper.lives import Lives
from slackwater_workers.ledger.index import Index, load_index
from slackwater_workers.ledger.job import read_job
from slackwater_workers.ledger.progress import ProgressReader
from slackwater_workers.ledger.store import Store
from slackwater_workers.ledger.verify import holds


class Keeper:
    """Looks at one ledger, which may not be there yet.  `look` from one thread at a time; `holds` from any.

    monotonic_s, wall_s: seconds; the second is compared with the store's file times.
    """

    def __init__(
        self,
        store: Store,
        monotonic_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s
        self._index: Index | None = None
        self._start_over(None)

    def look(self) -> dict[str, Any]:
        """The job's progress, as `GET /progress` answers it.

        What is not known before the index is made is None.  Raises PermanentError when the ledger is damaged and
        TemporaryError when its storage fails.
        """
        record = read_job(self._store)
        if record != self._record:
            self._start_over(record)
        if record is not None and self._index is None:
            self._index = load_index(self._store)
        found = self._counts(self._index)
        return {"job": record and record["job"], **found, "workers": self._workers()}

    def holds(self, receipt: Receipt) -> bool:
        """Whether the ledger has and counts what a worker said is durable; see `ledger.verify.holds`."""
        return holds(self._store, receipt)

    def _start_over(self, record: dict[str, Any] | None) -> None:
        self._record = record
        self._index = None
        self._progress = ProgressReader(self._store, follows_workers=True)
        self._lives = Lives(self._store)
        self._durable_s: dict[str, float] = {}  # worker -> moment of its newest record, by our monotonic clock
        self._looked_s: float | None = None

    def _counts(self, index: Index | None) -> dict[str, Any]:
        if index is None:
            names = ("items_total", "items_done", "items_quarantined", "items_open", "shards_open", "audio_s")
            return dict.fromkeys(names)
        progress = self._progress.read(index, index.shards)
        return {
            "items_total": progress.items_total,
            "items_done": progress.items_done,
            "items_quarantined": progress.items_quarantined,
            "items_open": progress.items_open,
            "shards_open": progress.shards_open,
            "audio_s": progress.audio_s,
        }

    def _workers(self) -> dict[str, dict[str, Any]]:
        now_s, wall_s = self._monotonic_s(), self._wall_s()
        since_s = inf if self._looked_s is None else now_s - self._looked_s

        def age_s(written_s: float) -> float:
            """What is new since the last look is no older than that, whatever the store's clock says."""
            return min(max(0.0, wall_s - written_s), since_s)

        living = self._lives.living(now_s, age_s)
        records, shards = self._progress.records(), self._progress.holders()
        workers = {}
        for life in living:
            times_s = map(self._store.modified_s, self._progress.grown.get(life.worker, ()))
            for written_s in filter(None, times_s):
                self._durable_s[life.worker] = max(now_s - age_s(written_s), self._durable_s.get(life.worker, -inf))
            durable_s = self._durable_s.get(life.worker)
            workers[life.name] = {
                "durable_age_s": None if durable_s is None else round(now_s - durable_s, 3),
                "items": records[life.worker],
                "shard": shards.get(life.worker),
            }
        self._looked_s = now_s
        return workers
