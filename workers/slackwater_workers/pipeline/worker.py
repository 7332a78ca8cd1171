"""One worker: claim a shard, clean its open items, commit, again.

Owns the loop and what happens at each kind of failure.  The ledger decides what counts; this only obeys it.
"""

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from slackwater_workers.config import JobConfig
from slackwater_workers.core import (
    BadInput,
    Cleaner,
    Item,
    ItemRefused,
    LeaseLost,
    LedgerError,
    Progress,
    Shard,
    Stopped,
)
from slackwater_workers.ledger import index as indexing
from slackwater_workers.ledger.frames import Row
from slackwater_workers.ledger.index import Index, Listed
from slackwater_workers.ledger.leases import Lease, Leases
from slackwater_workers.ledger.parts import Chain, PartWriter, commit, deaths, done_name, read_chain
from slackwater_workers.ledger.progress import ProgressReader
from slackwater_workers.ledger.store import Store
from slackwater_workers.pipeline.lone import clean_alone
from slackwater_workers.pipeline.report import Report
from slackwater_workers.preemption import StopFlag, Watchdog

logger = logging.getLogger(__name__)

_IDLE_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Done:
    """A unit's record before it is written."""

    row: Row
    data: BinaryIO | None = None
    data_bytes: int = 0


# Makes one unit's record; the flag says that the unit is suspected of killing its workers.
Process = Callable[[str, bool], Done]


class Worker:
    """Works on one ledger until everything is settled or a stop is asked for.

    cleaner: used here; cleaner_path: the same as `module:name`, for the process of a suspect item.
    """

    def __init__(
        self,
        store: Store,
        config: JobConfig,
        folder: Path,
        cleaner: Cleaner,
        cleaner_path: str,
        report: Report,
        stop: StopFlag,
        name: str,
    ) -> None:
        self._store = store
        self._config = config
        self._folder = folder
        self._cleaner = cleaner
        self._cleaner_path = cleaner_path
        self._report = report
        self._stop = stop
        self._leases = Leases(store, name, config.ttl_s)
        self._watchdog = Watchdog(config.stall_s)
        self._progress = ProgressReader(store)
        # Workers that start together should not all race for the first shard.
        self._random = random.Random(self._leases.worker)
        self._index: Index | None = None
        self._shards: tuple[Shard, ...] = ()

    def run(self, found: list[Listed] | None) -> Progress:
        """Work to the end and return how that is.

        found: what lies in the input folder; None when the ledger has a listing.
        Raises Stopped after the lease was released, and LedgerError when the ledger or the input fails.
        """
        self._leases.start()
        self._watchdog.start()
        try:
            index = indexing.load_index(self._store) or self._make_index(found)
            self._check_folder(index)
            self._index = index
            self._work_through(index.shards, lambda unit, is_suspect: self._clean(index.items[unit], is_suspect))
            return self._read_progress()
        finally:
            self._watchdog.stop()
            self._leases.stop()

    def _make_index(self, found: list[Listed] | None) -> Index:
        listing = indexing.ensure_listing(self._store, found)
        batches = indexing.hash_batches(listing)
        shards = indexing.hash_shards(batches)
        self._work_through(
            shards, lambda unit, _: Done(indexing.hash_files(self._folder, batches[unit], self._keep_going))
        )
        indexing.build_index(self._store, listing, shards, self._config.shard_items)
        index = indexing.load_index(self._store)
        assert index is not None, "it was made one line above"
        return index

    def _check_folder(self, index: Index) -> None:
        """Catch another folder under an old ledger, before everything in it is quarantined as vanished."""
        sample = list(index.items.values())[:20]
        if sample and not any((self._folder / item.path).exists() for item in sample):
            raise BadInput(
                f"{self._folder} has none of the files that the ledger names, such as {sample[0].path!r};"
                " is it the folder the ledger was made from?"
            )

    def _work_through(self, shards: tuple[Shard, ...], process: Process) -> None:
        """Finish every shard, or see others finish it."""
        self._shards = shards
        is_idle = False
        while True:
            self._keep_going()
            done = set(self._store.names("done"))
            todo = [shard for shard in shards if shard.name not in done]
            if not todo:
                return
            claimed = self._claim(todo)
            if claimed is None:
                if not is_idle:
                    self._report.idle(self._read_progress())
                is_idle = True
                self._stop.wait(min(_IDLE_POLL_S, self._config.ttl_s / 4))
                continue
            is_idle = False
            self._report.working(self._read_progress())
            self._work_on(*claimed, process)

    def _claim(self, todo: list[Shard]) -> tuple[Shard, Lease] | None:
        start = self._random.randrange(len(todo))
        for shard in todo[start:] + todo[:start]:
            lease = self._leases.claim(shard.name)
            if lease is not None:
                logger.info("claimed shard=%s epoch=%d worker=%s", shard.name, lease.epoch, self._leases.worker)
                return shard, lease
        return None

    def _work_on(self, shard: Shard, lease: Lease, process: Process) -> None:
        """Do the shard's open units and commit it.  The lease is released unless the shard is committed or lost."""
        try:
            if self._store.exists(done_name(shard.name)):
                return  # finished between our look and our claim
            self._finish(shard, lease, process)
        except LeaseLost as error:
            logger.warning("lost shard=%s epoch=%d: %s", shard.name, lease.epoch, error)
        except BaseException as error:
            self._release(lease, error)
            raise

    def _release(self, lease: Lease, cause: BaseException) -> None:
        if not isinstance(cause, LedgerError | Stopped):
            return  # our own fault: it must count as a death on this unit
        try:
            self._leases.release(lease)
        except LedgerError as error:
            # The storage is full or gone, which `cause` already says; the lease runs out by itself.
            logger.warning("could not release shard=%s epoch=%d: %s", lease.shard, lease.epoch, error)

    def _finish(self, shard: Shard, lease: Lease, process: Process) -> None:
        chain = read_chain(self._store, shard.name)
        rows = {unit: row for unit, row in chain.rows.items() if unit in shard.units}
        todo = [unit for unit in shard.units if unit not in rows]
        suspect = todo[0] if todo and self._is_suspect(shard, lease, chain) else None
        part = PartWriter(self._store, self._leases, lease, chain)
        try:
            for unit in todo:
                self._keep_going()
                rows[unit] = self._append(part, unit, process(unit, unit == suspect))
        finally:
            part.close()
        if not commit(self._store, shard, part.refs(), rows, self._leases.worker):
            raise LeaseLost(f"{shard.name} was committed by somebody else")
        logger.info("committed shard=%s epoch=%d units=%d", shard.name, lease.epoch, len(rows))

    def _is_suspect(self, shard: Shard, lease: Lease, chain: Chain) -> bool:
        count = deaths(self._store, shard, chain, lease.epoch)
        if count:
            logger.info("workers died shard=%s on=%s times=%d", shard.name, shard.units[len(chain.rows)], count)
        return count >= self._config.max_deaths

    def _append(self, part: PartWriter, unit: str, done: Done) -> Row:
        row = {**done.row, "unit": unit}
        try:
            receipt = part.append(row, done.data, done.data_bytes)
        finally:
            if done.data is not None:
                done.data.close()
        if self._index is not None:
            self._report.durable(unit, receipt, float(row.get("duration_s", 0.0)))
        return row

    def _clean(self, item: Item, is_suspect: bool) -> Done:
        """Clean one item; an item that cannot be cleaned becomes a quarantine record, which is a result too."""
        try:
            if is_suspect:
                cleaned = clean_alone(self._cleaner_path, self._config, self._folder, item, self._keep_going)
            else:
                cleaned = self._cleaner.clean(self._folder, item, self._keep_going)
        except ItemRefused as refusal:
            logger.warning("quarantined path=%r step=%s reason=%s", item.path, refusal.step, refusal.reason)
            return Done(
                {
                    "status": "quarantined",
                    "path": item.path,
                    "sha256": item.id,
                    "size_bytes": item.size_bytes,
                    "step": refusal.step,
                    "reason": refusal.reason,
                }
            )
        return Done(cleaned.row, cleaned.audio, cleaned.audio_bytes)

    def _keep_going(self) -> None:
        self._watchdog.pet()
        self._stop.check()

    def _read_progress(self) -> Progress:
        return self._progress.read(self._index, self._shards)
