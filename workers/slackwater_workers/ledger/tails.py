"""What is written in one open shard, followed from look to look: each record is read once.

Owns how far each part was read.  Which records count is what `parts.read_chain` says; here nothing is built on
them, so bodies are believed.  Called by `progress`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from slackwater_workers.core import Shard
from slackwater_workers.ledger.frames import Frame, Row, read_frames
from slackwater_workers.ledger.leases import epochs
from slackwater_workers.ledger.parts import PartRef, part_name, totals
from slackwater_workers.ledger.store import Store


@dataclass(slots=True)
class _Part:
    """A part up to byte `end`.  head: its first record's row; None = it has not begun."""

    end: int = 0
    head: Row | None = None
    records: list[tuple[int, str, Row]] = field(default_factory=list)  # (byte after it, unit, what `totals` reads)

    @property
    def worker(self) -> str:
        return "" if self.head is None else str(self.head["worker"])


class Tails:
    """The parts of one shard.  on_record: called with the worker and the part's name, for each record read."""

    def __init__(self, store: Store, shard: Shard, on_record: Callable[[str, str], None]) -> None:
        self._store = store
        self._name = shard.name
        self._units = frozenset(shard.units)
        self._on_record = on_record
        self._parts: dict[int, _Part] = {}
        self._newest: _Part | None = None  # of those that have begun
        self._totals = totals({})

    @property
    def holder(self) -> str | None:
        """The worker whose part tells the shard's history; None when none has begun."""
        return None if self._newest is None else self._newest.worker

    def read(self) -> Row:
        """The shard's totals now, as `parts.totals` has them."""
        for epoch in reversed(epochs(self._store, "part", self._name)):
            has_grown = self._follow(epoch)
            part = self._parts[epoch]
            if part.head is None:
                continue  # torn inside its first record
            if has_grown or part is not self._newest:
                self._newest = part
                self._totals = self._count(part, part.head)
            break
        return self._totals

    def finish(self, refs: list[PartRef]) -> None:
        """Read what is left of the parts that the shard's done-record names."""
        for ref in refs:
            self._follow(ref.epoch, ref.size_bytes)

    def records(self) -> Counter[str]:
        """How many records each worker has written here."""
        counts: Counter[str] = Counter()
        for part in self._parts.values():
            counts[part.worker] += len(part.records)
        return counts

    def _count(self, newest: _Part, head: Row) -> Row:
        rows: dict[str, Row] = {}
        for ref in map(PartRef.from_row, head["base"]):
            self._follow(ref.epoch, ref.size_bytes)
            rows.update((unit, row) for end, unit, row in self._parts[ref.epoch].records if end <= ref.size_bytes)
        rows.update((unit, row) for _, unit, row in newest.records)
        return totals({unit: row for unit, row in rows.items() if unit in self._units})

    def _follow(self, epoch: int, end: int | None = None) -> bool:
        """Read a part on, up to byte `end`.  Returns whether there was anything new."""
        part = self._parts.setdefault(epoch, _Part())
        before = part.end
        if end is not None and before >= end:
            return False
        file = self._store.open(part_name(self._name, epoch))
        if file is None:
            return False
        with file:
            for frame in read_frames(file, end, start=before, check_data=False):
                if not frame.is_whole:
                    break
                self._take(part, frame, epoch)
        return part.end > before

    def _take(self, part: _Part, frame: Frame, epoch: int) -> None:
        part.end = frame.end
        if part.head is None:
            part.head = frame.row
        elif "unit" in frame.row:
            kept: Row = {key: frame.row[key] for key in ("status", "duration_s") if key in frame.row}
            part.records.append((frame.end, frame.row["unit"], kept))
            self._on_record(part.worker, part_name(self._name, epoch))
