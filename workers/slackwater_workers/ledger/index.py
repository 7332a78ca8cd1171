"""The list of what a job cleans.

Owns the walk of the input folder, the hashing of its files and the index.  All three are names made by
create-if-absent, so workers that start together agree.  Hashing is shared out in shards like cleaning is: a
folder that takes hours to read survives evictions too.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slackwater_workers.core import BadInput, Item, PermanentError, Shard
from slackwater_workers.ledger.frames import CHUNK_BYTES, Row
from slackwater_workers.ledger.parts import FORMAT, read_chain, read_done
from slackwater_workers.ledger.store import Store, is_regular

LISTING = "listing"
INDEX = "index"
_BATCH_FILES = 256
_BATCH_BYTES = 256 << 20
_SHARD_BATCHES = 8

# A name with one of these is taken as meant to be audio, so that a broken one is reported, not overlooked.
_AUDIO_SUFFIXES = (
    *(".wav", ".wave", ".rf64", ".w64", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".mp2", ".m4a", ".m4b", ".mp4"),
    *(".aac", ".aif", ".aiff", ".aifc", ".au", ".snd", ".caf", ".wma", ".webm", ".mka", ".mkv", ".sph", ".amr"),
    *(".ac3", ".wv", ".ape"),
)
# Any other file is taken when its first bytes are those of an audio container.
_MAGICS: tuple[tuple[int, bytes], ...] = (
    (8, b"WAVE"),
    (8, b"AIFF"),
    (8, b"AIFC"),
    (0, b"fLaC"),
    (0, b"OggS"),
    (0, b"ID3"),
    (0, b".snd\0"),
    (0, b"caff\0"),
    (0, b"riff\x2e\x91\xcf\x11"),
    (4, b"ftypM4A"),
    (0, b"NIST_1A"),
)


@dataclass(frozen=True, slots=True)
class Listed:
    """One file of the input folder.  `refused` says why it cannot be read as a file at all."""

    path: str
    size_bytes: int = 0
    mtime_ns: int = 0
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Index:
    """The job's items in their order, and what else was found."""

    items: dict[str, Item]  # by id
    shards: tuple[Shard, ...]
    duplicates: tuple[tuple[str, str], ...]  # (path, id of the item with the same content)
    refused: tuple[tuple[str, str], ...]  # (path, reason)


def walk(folder: Path, excluded: Path | None, keep_going: Callable[[], None]) -> list[Listed]:
    """The audio files under `folder`, sorted by path.

    Links to files are followed, links to folders are not (they can form loops).  `excluded` and all below it is
    left out: a ledger may lie inside its input.  keep_going: called in every folder.
    Raises BadInput with one clear line.
    """
    if not folder.exists():
        raise BadInput(f"the input folder {folder} does not exist")
    if not folder.is_dir():
        raise BadInput(f"the input must be a folder, {folder} is a file; name the folder that holds it")
    errors: list[OSError] = []
    found: list[Listed] = []
    for current, folders, files in os.walk(folder, onerror=errors.append):
        keep_going()
        if excluded is not None:
            folders[:] = [name for name in folders if not _same(Path(current, name), excluded)]
        found.extend(
            listed
            for name in files
            if (listed := _look_at(Path(current, name), os.path.relpath(os.path.join(current, name), folder)))
        )
    if errors:
        raise BadInput(f"cannot read {errors[0].filename}: {errors[0].strerror}; make it readable or leave it out")
    if not found:
        raise BadInput(f"no audio files in {folder}")
    if all(listed.refused for listed in found):
        raise BadInput(f"none of the {len(found)} audio files in {folder} can be read: {found[0].refused}")
    return sorted(found, key=lambda listed: os.fsencode(listed.path))


def _same(path: Path, other: Path) -> bool:
    return path.exists() and other.exists() and path.samefile(other)


def _look_at(path: Path, relative: str) -> Listed | None:
    has_suffix = path.suffix.lower() in _AUDIO_SUFFIXES
    try:
        if not is_regular(path):
            return Listed(relative, refused="not a regular file") if has_suffix else None
        status = os.stat(path)
        if not has_suffix:
            with path.open("rb") as file:
                start = file.read(16)
            if not any(start[at : at + len(magic)] == magic for at, magic in _MAGICS):
                return None
        elif not os.access(path, os.R_OK):
            return Listed(relative, refused="permission denied")
    except OSError as error:
        return Listed(relative, refused=error.strerror or str(error)) if has_suffix else None
    return Listed(relative, status.st_size, status.st_mtime_ns)


def ensure_listing(store: Store, found: list[Listed] | None) -> list[Listed]:
    """The ledger's listing: `found`, unless somebody was first.  None: it is known to be made."""
    if found is not None:
        lines = [_line({"format": FORMAT, "files": len(found)}), *(_line(_listed_row(entry)) for entry in found)]
        store.create(LISTING, b"".join(lines))
    head, rows = _read_lines(store, LISTING)
    if len(rows) != head["files"]:
        raise PermanentError(f"{store.location(LISTING)} is damaged: {head['files']} files named, {len(rows)} found")
    return [Listed(row["path"], row.get("size_bytes", 0), row.get("mtime_ns", 0), row.get("refused")) for row in rows]


def _listed_row(entry: Listed) -> Row:
    if entry.refused:
        return {"path": entry.path, "refused": entry.refused}
    return {"path": entry.path, "size_bytes": entry.size_bytes, "mtime_ns": entry.mtime_ns}


def hash_batches(listing: list[Listed]) -> dict[str, list[Listed]]:
    """The readable files in batches of bounded count and size; the same for everyone with the same listing."""
    batches: list[list[Listed]] = [[]]
    size_bytes = 0
    for entry in (entry for entry in listing if not entry.refused):
        if len(batches[-1]) == _BATCH_FILES or (batches[-1] and size_bytes + entry.size_bytes > _BATCH_BYTES):
            batches.append([])
            size_bytes = 0
        batches[-1].append(entry)
        size_bytes += entry.size_bytes
    return {f"b{number:06d}": batch for number, batch in enumerate(batches)}


def hash_shards(batches: Iterable[str]) -> tuple[Shard, ...]:
    return _cut("h", list(batches), _SHARD_BATCHES)


def hash_files(folder: Path, batch: list[Listed], keep_going: Callable[[], None]) -> Row:
    """The record of one batch: each file's digest, or why it has none.

    keep_going: called after every block read; raises to abandon the batch.
    """
    files: list[Row] = []
    for entry in batch:
        path = folder / entry.path
        try:
            files.append({"path": entry.path, **_digest(path, keep_going)})
        except OSError as error:
            files.append({"path": entry.path, "refused": error.strerror or str(error)})
    return {"status": "hashed", "files": files}


def _digest(path: Path, keep_going: Callable[[], None]) -> Row:
    digest = hashlib.sha256()
    size_bytes = 0
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
            size_bytes += len(piece)
            keep_going()
    return {"sha256": digest.hexdigest(), "size_bytes": size_bytes, "mtime_ns": status.st_mtime_ns}


def build_index(store: Store, listing: list[Listed], shards: Iterable[Shard], shard_items: int) -> None:
    """Make the index from finished hash shards.  Everyone builds the same bytes; the first one's stay."""
    hashed: dict[str, Row] = {}
    for shard in shards:
        if read_done(store, shard.name) is None:
            raise AssertionError(f"the index was asked for before {shard.name} was done")
        for row in read_chain(store, shard.name).rows.values():
            hashed.update((file["path"], file) for file in row["files"])
    items: dict[str, Row] = {}
    others: list[Row] = []
    for entry in listing:
        row = hashed.get(entry.path, {"path": entry.path, "refused": entry.refused})
        if row.get("refused"):
            others.append(row)
        elif row["sha256"] in items:
            others.append({"path": entry.path, "duplicate_of": row["sha256"]})
        else:
            items[row["sha256"]] = row
    head = {"format": FORMAT, "items": len(items), "others": len(others), "shard_items": shard_items}
    store.create(INDEX, b"".join(map(_line, [head, *items.values(), *others])))


def load_index(store: Store) -> Index | None:
    """The ledger's index; None when it is not made yet.  Raises PermanentError when it is damaged."""
    if not store.exists(INDEX):
        return None
    head, rows = _read_lines(store, INDEX)
    items = {
        row["sha256"]: Item(row["sha256"], row["path"], row["size_bytes"], row["mtime_ns"])
        for row in rows
        if "sha256" in row
    }
    if len(items) != head["items"] or len(rows) != head["items"] + head["others"]:
        raise PermanentError(f"{store.location(INDEX)} is damaged: it names {head['items']} items and has {len(items)}")
    return Index(
        items=items,
        shards=_cut("s", list(items), head["shard_items"]),
        duplicates=tuple((row["path"], row["duplicate_of"]) for row in rows if "duplicate_of" in row),
        refused=tuple((row["path"], row["refused"]) for row in rows if "refused" in row),
    )


def _cut(letter: str, units: list[str], size: int) -> tuple[Shard, ...]:
    return tuple(
        Shard(f"{letter}{number:06d}", tuple(units[start : start + size]))
        for number, start in enumerate(range(0, len(units), size))
    )


def _line(row: Row) -> bytes:
    # ASCII, so that names with undecodable bytes (lone surrogates) survive the way there and back.
    return json.dumps(row, sort_keys=True).encode("ascii") + b"\n"


def _read_lines(store: Store, name: str) -> tuple[dict[str, Any], list[Row]]:
    body = store.read(name) or b""
    try:
        head, *rows = [json.loads(line) for line in body.splitlines()]
        if head["format"] != FORMAT:
            raise PermanentError(f"{store.location(name)} has format {head['format']}, this program reads {FORMAT}")
    except (ValueError, KeyError, TypeError) as error:
        raise PermanentError(f"{store.location(name)} is damaged: {error}") from error
    return head, rows
