"""What a shard's workers wrote, and which of it counts.

Owns the part files and the done-records.  Every part begins with a frame that names, with size and digest, the older
parts it builds on.  So the newest part that has begun tells one consistent history, and what a worker
that lost its lease adds later is in no history: garbage, never a duplicate.
"""

import hashlib
import json
import logging
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from slackwater_workers.core import LeaseLost, PermanentError, Receipt, Shard
from slackwater_workers.ledger.frames import Frame, Row, pieces, read_frames, write_frame
from slackwater_workers.ledger.leases import Lease, Leases, epochs
from slackwater_workers.ledger.store import PartFile, Store

logger = logging.getLogger(__name__)

FORMAT = 1  # of parts, done-records, index and job; written into each


@dataclass(frozen=True, slots=True)
class PartRef:
    """The first `size_bytes` bytes of a shard's part."""

    epoch: int
    size_bytes: int
    sha256: str

    def as_row(self) -> Row:
        return {"epoch": self.epoch, "size_bytes": self.size_bytes, "sha256": self.sha256}

    @staticmethod
    def from_row(row: Row) -> "PartRef":
        return PartRef(int(row["epoch"]), int(row["size_bytes"]), str(row["sha256"]))


@dataclass(frozen=True, slots=True)
class Chain:
    """The records of a shard that count, each unit once."""

    refs: tuple[PartRef, ...] = ()
    rows: dict[str, Row] = field(default_factory=dict)  # unit -> row
    units_of: dict[int, tuple[str, ...]] = field(default_factory=dict)  # epoch -> the units it added


def part_name(shard: str, epoch: int) -> str:
    return f"part/{shard}/{epoch}"


def prefix_sha256(file: BinaryIO, size_bytes: int) -> str | None:
    """Digest of the first `size_bytes` bytes; None when there are fewer."""
    file.seek(0)
    digest = hashlib.sha256()
    seen = 0
    for piece in pieces(file, size_bytes):
        digest.update(piece)
        seen += len(piece)
    return digest.hexdigest() if seen == size_bytes else None


def read_chain(store: Store, shard: str, *, check_data: bool = True) -> Chain:
    """The history that the shard's newest begun part tells.

    With `check_data` every byte is read and checked, as one must before building on it; without,
    only the rows are, which is enough to show progress.
    """
    for epoch in reversed(epochs(store, "part", shard)):
        with _opened(store, shard, epoch) as file:
            frames = _whole_prefix(file, None, check_data)
            if not frames:
                continue  # torn inside its first frame: it never began
            end = frames[-1].end
            own = PartRef(epoch, end, (prefix_sha256(file, end) or "") if check_data else "")
        base = [PartRef.from_row(row) for row in frames[0].row["base"]]
        found = [(ref, _base_frames(store, shard, ref, check_data)) for ref in base]
        return _merge([*found, (own, frames)])
    return Chain()


def _opened(store: Store, shard: str, epoch: int) -> BinaryIO:
    file = store.open(part_name(shard, epoch))
    if file is None:
        raise PermanentError(f"{part_name(shard, epoch)} was listed and is gone; parts are never deleted by workers")
    return file


def _base_frames(store: Store, shard: str, ref: PartRef, check_data: bool) -> list[Frame] | None:
    """The frames of an older part; None when its bytes are not what they were, so that its units are done again."""
    file = store.open(part_name(shard, ref.epoch))
    if file is None:
        logger.warning("part is gone shard=%s epoch=%d; its items are done again", shard, ref.epoch)
        return None
    with file:
        if check_data and prefix_sha256(file, ref.size_bytes) != ref.sha256:
            logger.warning("part is damaged shard=%s epoch=%d; its items are done again", shard, ref.epoch)
            return None
        return _whole_prefix(file, ref.size_bytes, check_data)


def _whole_prefix(file: BinaryIO, end: int | None, check_data: bool) -> list[Frame]:
    frames: list[Frame] = []
    for frame in read_frames(file, end, check_data=check_data):
        if not frame.is_whole:
            break
        frames.append(frame)
    return frames


def _merge(found: list[tuple[PartRef, list[Frame] | None]]) -> Chain:
    chain = Chain(refs=tuple(ref for ref, frames in found if frames is not None))
    for ref, frames in found:
        units = [frame.row["unit"] for frame in frames or [] if "unit" in frame.row]
        chain.units_of[ref.epoch] = tuple(units)
        chain.rows.update((frame.row["unit"], frame.row) for frame in frames or [] if "unit" in frame.row)
    return chain


def deaths(store: Store, shard: Shard, chain: Chain, before_epoch: int) -> int:
    """How many workers died on the shard's first open unit, as far as their leases tell.

    Units are worked through in the shard's order, so an epoch that ended died on the first unit it had not
    written.  Released epochs left by their own will.  Counting stops at the epoch that finished the unit before.
    """
    count = 0
    for epoch in reversed([epoch for epoch in epochs(store, "lease", shard.name) if epoch < before_epoch]):
        count += not store.exists(f"released/{shard.name}/{epoch}")
        if chain.units_of.get(epoch):
            break
    return count


class PartWriter:
    """Appends this lease's records, each durable before `append` returns.

    The file is made with the first record, so an epoch without progress leaves none.
    """

    def __init__(self, store: Store, leases: Leases, lease: Lease, chain: Chain) -> None:
        self._store = store
        self._leases = leases
        self._lease = lease
        self._chain = chain
        self._name = part_name(lease.shard, lease.epoch)
        self._file: PartFile | None = None
        self._digest = hashlib.sha256()
        self._size_bytes = 0
        self._units = 0

    def append(self, row: Row, data: BinaryIO | None = None, data_bytes: int = 0) -> Receipt:
        """Make one record durable.

        row: has the key `unit`.  Raises LeaseLost when somebody took the shard over: the record would be garbage.
        After any error the writer must not be used again, since its file may end in a torn frame.
        """
        if self._leases.is_lost(self._lease):
            raise LeaseLost(f"epoch {self._lease.epoch} of {self._lease.shard} was taken over")
        if self._file is None:
            self._begin()
        assert self._file is not None
        write_frame(self._write, row, data, data_bytes)
        self._file.sync()
        self._units += 1
        return Receipt(self._store.location(self._name), self._size_bytes, self._digest.hexdigest())

    def refs(self) -> tuple[PartRef, ...]:
        """The history including this writer's records."""
        own = PartRef(self._lease.epoch, self._size_bytes, self._digest.hexdigest())
        return (*self._chain.refs, own) if self._units else self._chain.refs

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self) -> None:
        self._file = self._store.create_part(self._name)
        if self._file is None:
            raise LeaseLost(f"{self._name} exists already; somebody else wrote under this epoch")
        base = [ref.as_row() for ref in self._chain.refs]
        head = {"format": FORMAT, "shard": self._lease.shard, "epoch": self._lease.epoch, "base": base}
        write_frame(self._write, {**head, "worker": self._leases.worker}, None, 0)

    def _write(self, piece: bytes) -> None:
        assert self._file is not None
        self._file.write(piece)
        self._digest.update(piece)
        self._size_bytes += len(piece)


def commit(store: Store, shard: Shard, refs: tuple[PartRef, ...], rows: dict[str, Row], worker: str) -> bool:
    """Say that the shard is finished and which bytes hold its records.  False: somebody else said so first.

    From here on only what this record names counts.
    """
    assert set(rows) == set(shard.units), "a done-record is never written for a short shard"
    parts = [{"path": part_name(shard.name, ref.epoch), **ref.as_row()} for ref in refs]
    record = {"format": FORMAT, "shard": shard.name, "worker": worker, "parts": parts, **totals(rows)}
    return store.create(done_name(shard.name), json.dumps(record, sort_keys=True).encode())


def totals(rows: dict[str, Row]) -> Row:
    """Counts over a shard's rows, kept in its done-record so that progress needs no part."""
    cleaned = [row for row in rows.values() if row["status"] == "cleaned"]
    return {
        "units": len(rows),
        "cleaned": len(cleaned),
        "quarantined": sum(row["status"] == "quarantined" for row in rows.values()),
        "audio_s": round(sum(float(row["duration_s"]) for row in cleaned), 3),
    }


def done_name(shard: str) -> str:
    return f"done/{shard}"


def read_done(store: Store, shard: str) -> dict[str, Any] | None:
    """The shard's done-record; None when there is none.  Raises ValueError when it is damaged."""
    body = store.read(done_name(shard))
    if body is None:
        return None
    record = json.loads(body)
    if not isinstance(record, dict) or record.get("format") != FORMAT or not isinstance(record.get("parts"), list):
        raise ValueError(f"{done_name(shard)} is not a done-record of format {FORMAT}")
    return record
