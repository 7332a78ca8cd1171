"""The cleaned data set as plain files: `audio/*.flac`, `manifest.jsonl`, `quarantine.jsonl`.

Owns the export's names.  Reads only what done-records name; may be run again at any time, also beside workers, and then
adds what was finished since.  Each file appears whole or not at all.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from slackwater_workers.core import PermanentError
from slackwater_workers.ledger.frames import Row, encode_row, pieces, read_frames
from slackwater_workers.ledger.index import load_index
from slackwater_workers.ledger.parts import PartRef, part_name, read_done
from slackwater_workers.ledger.store import Store, storage_error


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export holds now, and what this run had to write."""

    cleaned: int
    quarantined: int
    written: int
    shards_open: int


def export(store: Store, folder: Path) -> Exported:
    """Write every committed item into `folder`.  Raises PermanentError on a ledger without index or with damage."""
    index = load_index(store)
    if index is None:
        raise PermanentError(f"{store.location('')} has no index yet; run `slackwater clean run` on it first")
    try:
        return _export(store, folder, [shard.name for shard in index.shards], index.refused)
    except OSError as error:
        raise storage_error(error, str(folder)) from error


def _export(store: Store, folder: Path, shards: list[str], refused: tuple[tuple[str, str], ...]) -> Exported:
    audio = folder / "audio"
    audio.mkdir(parents=True, exist_ok=True)
    manifest: list[Row] = []
    quarantine: list[Row] = [{"path": path, "reason": reason, "step": "index"} for path, reason in refused]
    written = shards_open = 0
    for shard in shards:
        record = read_done(store, shard)
        if record is None:
            shards_open += 1
            continue
        for row, file in _records(store, shard, record["parts"]):
            if row["status"] == "quarantined":
                quarantine.append(row)
                continue
            name = f"audio/{row['unit']}.flac"
            manifest.append({**row, "audio": name})
            written += _write_once(folder / name, file, row["audio_bytes"], row["audio_sha256"])
    _replace(folder / "manifest.jsonl", manifest)
    _replace(folder / "quarantine.jsonl", quarantine)
    return Exported(len(manifest), len(quarantine), written, shards_open)


def _records(store: Store, shard: str, parts: list[Row]) -> Iterator[tuple[Row, BinaryIO]]:
    """The committed rows, each with its part opened where the audio begins."""
    for ref in map(PartRef.from_row, parts):
        part = store.open(part_name(shard, ref.epoch))
        if part is None:
            raise PermanentError(f"{part_name(shard, ref.epoch)} is gone; see `slackwater clean verify`")
        with part as file:
            for frame in read_frames(file, ref.size_bytes, check_data=False):
                if "unit" in frame.row:
                    file.seek(frame.data_offset)
                    yield frame.row, file


def _write_once(path: Path, file: BinaryIO, size_bytes: int, sha256: str) -> bool:
    """Copy the audio unless it is there.  A name that exists is whole, since only a rename makes it."""
    if path.exists() and path.stat().st_size == size_bytes:
        return False
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    digest = hashlib.sha256()
    try:
        with temporary.open("wb") as target:
            for piece in pieces(file, size_bytes):
                digest.update(piece)
                target.write(piece)
            target.flush()
            os.fsync(target.fileno())
        if digest.hexdigest() != sha256:
            raise PermanentError(f"the audio of {path.stem} is damaged in the ledger; see `slackwater clean verify`")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _replace(path: Path, rows: list[Row]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as target:
            for row in sorted(rows, key=lambda row: (os.fsencode(row["path"]), row.get("unit", ""))):
                target.write(encode_row(row) + b"\n")
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
