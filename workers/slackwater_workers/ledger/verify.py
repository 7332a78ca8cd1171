"""Proof, from every byte of a ledger, that each item was cleaned exactly once; and of one receipt, from its own bytes.

Owns the judgement; changes nothing.  Works on a ledger in any state, also while workers run: a done-record and
the bytes it names never change, and everything else counts as open.
"""

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import BinaryIO

from slackwater_workers.core import PermanentError, Receipt, Shard, VerifyReport
from slackwater_workers.ledger.frames import Frame, Row, pieces, read_frames
from slackwater_workers.ledger.index import Index, load_index
from slackwater_workers.ledger.leases import epochs
from slackwater_workers.ledger.parts import (
    PartRef,
    done_name,
    part_name,
    prefix_sha256,
    read_chain,
    read_done,
    totals,
)
from slackwater_workers.ledger.store import Store


@dataclass(slots=True)
class _Findings:
    committed: Counter[str] = field(default_factory=Counter)  # item -> trusted records of it
    status: dict[str, str] = field(default_factory=dict)
    finished_units: set[str] = field(default_factory=set)  # in a shard that has a done-record
    named_bytes: dict[str, int] = field(default_factory=dict)  # part -> how far it is trusted
    garbage_frames: int = 0
    bytes_read: int = 0
    problems: list[str] = field(default_factory=list)


def verify(store: Store) -> VerifyReport:
    """Read everything and judge it.  Raises PermanentError when the index itself cannot be read."""
    findings = _Findings()
    # Done first, index second: a shard that gets done in between is then judged as open, never as foreign.
    done = [name for name in store.names("done") if name.startswith("s")]
    index = load_index(store)
    if index is None:
        if done:
            raise PermanentError(f"{store.location('')} has done-records but no index; was it deleted?")
        return VerifyReport(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    shards = {shard.name: shard for shard in index.shards}
    for name in done:
        _check_done(store, name, shards.get(name), findings)
    for shard in index.shards:
        if shard.name not in done:
            _look_at_open(store, shard, findings)
    for name in store.names("part"):
        if name.startswith("s"):
            _count_garbage(store, name, findings)
    return _judge(index, findings)


def holds(store: Store, receipt: Receipt) -> bool:
    """Whether the ledger has the bytes that a worker said are durable, and counts them.

    What a worker wrote after it lost its lease is on disk and in no history: it does not hold.  Of the path only
    the name inside the ledger is read, since the worker may see the folder elsewhere.
    Raises PermanentError when the shard's done-record is damaged.
    """
    named = re.fullmatch(r"part/([hs]\d+)/(\d+)", "/".join(PurePosixPath(receipt.path).parts[-3:]))
    if named is None:
        return False
    shard, epoch = named[1], int(named[2])
    try:
        record = read_done(store, shard)
        refs = None if record is None else [PartRef.from_row(part) for part in record["parts"]]
    except (ValueError, KeyError, TypeError) as error:
        raise PermanentError(f"{store.location(done_name(shard))} is damaged: {error}") from error
    counted = read_chain(store, shard, check_data=False).refs if refs is None else refs
    if not any(ref.epoch == epoch and ref.size_bytes >= receipt.size_bytes for ref in counted):
        return False
    file = store.open(part_name(shard, epoch))
    if file is None:
        return False
    with file:
        return prefix_sha256(file, receipt.size_bytes) == receipt.sha256


def _judge(index: Index, findings: _Findings) -> VerifyReport:
    lost = {unit for unit in findings.finished_units if not findings.committed[unit]}
    doubled = sorted(unit for unit, times in findings.committed.items() if times > 1)
    foreign = sorted(unit for unit in findings.committed if unit not in index.items)
    problems = list(findings.problems)
    problems += [f"lost: {index.items[unit].path!r} ({unit})" for unit in sorted(lost) if unit in index.items]
    problems += [f"committed {findings.committed[unit]} times: {unit}" for unit in doubled]
    problems += [f"committed but not in the index: {unit}" for unit in foreign]
    settled = {unit: state for unit, state in findings.status.items() if unit in index.items and unit not in lost}
    states = Counter(settled.values())
    return VerifyReport(
        items_total=len(index.items),
        items_done=states["cleaned"],
        items_quarantined=states["quarantined"],
        items_open=len(index.items) - len(settled) - len(lost),
        items_lost=len(lost),
        items_doubled=len(doubled) + len(foreign),
        files_duplicate=len(index.duplicates),
        files_refused=len(index.refused),
        garbage_frames=findings.garbage_frames,
        bytes_read=findings.bytes_read,
        problems=tuple(problems),
    )


def _check_done(store: Store, name: str, shard: Shard | None, findings: _Findings) -> None:
    if shard is None:
        findings.problems.append(f"{done_name(name)} is of no shard of the index")
    else:
        findings.finished_units.update(shard.units)
    try:
        record = read_done(store, name)
        assert record is not None, "it was listed, and done-records are never taken back"
        refs = [PartRef.from_row(part) for part in record["parts"]]
    except (ValueError, KeyError, TypeError) as error:
        findings.problems.append(f"{done_name(name)} cannot be read: {error}")
        return
    rows: dict[str, Row] = {}
    for ref in refs:
        for row in _trusted_rows(store, str(record["shard"]), ref, findings):
            findings.committed[row["unit"]] += 1
            findings.status[row["unit"]] = row["status"]
            rows[row["unit"]] = row
    if shard is not None and set(rows) == set(shard.units):
        counted = totals(rows)
        if any(record.get(key) != value for key, value in counted.items()):
            findings.problems.append(f"{done_name(name)} counts differently from its parts: {counted}")


def _trusted_rows(store: Store, shard: str, ref: PartRef, findings: _Findings) -> Iterator[Row]:
    """The rows of whole frames in a named part; a frame beside a damaged one still counts."""
    name = part_name(shard, ref.epoch)
    findings.named_bytes[name] = ref.size_bytes
    file = store.open(name)
    if file is None:
        findings.problems.append(f"{name} is gone")
        return
    with file:
        digest = prefix_sha256(file, ref.size_bytes)
        findings.bytes_read += ref.size_bytes
        end = 0
        damaged = 0
        for frame in read_frames(file, ref.size_bytes):
            end = frame.end
            if not frame.is_whole or not _data_fits(file, frame, findings):
                damaged += 1
            elif "unit" in frame.row:
                yield frame.row
        if digest != ref.sha256:
            kind = "is too short" if digest is None else "has other bytes than its done-record says"
            findings.problems.append(f"{name} {kind} ({damaged} damaged records, readable up to byte {end})")


def _data_fits(file: BinaryIO, frame: Frame, findings: _Findings) -> bool:
    """Whether the audio has the digest that its row names: the pair belongs together."""
    wanted = frame.row.get("audio_sha256")
    if wanted is None:
        return True
    digest = hashlib.sha256()
    file.seek(frame.data_offset)
    for piece in pieces(file, frame.data_bytes):
        digest.update(piece)
    if digest.hexdigest() == wanted:
        return True
    findings.problems.append(f"the audio of {frame.row['unit']} is not the one its row names")
    return False


def _look_at_open(store: Store, shard: Shard, findings: _Findings) -> None:
    chain = read_chain(store, shard.name)
    for ref in chain.refs:
        findings.named_bytes[part_name(shard.name, ref.epoch)] = ref.size_bytes
        findings.bytes_read += ref.size_bytes
    if chain.refs:
        # Its owner may be writing just now: what comes after our reading is no garbage.
        findings.named_bytes[part_name(shard.name, chain.refs[-1].epoch)] = sys.maxsize
    for unit, row in chain.rows.items():
        if unit in shard.units:
            findings.status[unit] = row["status"]


def _count_garbage(store: Store, shard: str, findings: _Findings) -> None:
    """Count frames, whole or torn, beyond what is trusted."""
    for epoch in epochs(store, "part", shard):
        name = part_name(shard, epoch)
        trusted = findings.named_bytes.get(name, 0)
        file = store.open(name)
        if file is None:
            continue  # deleted between our listing and now
        with file:
            size = file.seek(0, 2)
            end = 0
            for frame in read_frames(file, check_data=False):
                end = frame.end
                findings.garbage_frames += frame.offset >= trusted and "unit" in frame.row
            findings.garbage_frames += size > max(end, trusted)  # a torn tail
