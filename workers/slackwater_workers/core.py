"""The values that the workers room speaks, and its errors.

Owns: `Item`, `Shard`, `Receipt`, `Progress`, `VerifyReport`, what a `Cleaner` is, and the error tree.  Owns no I/O.
Imported by every other module of this room; imports nothing of ours.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol


class WorkersError(Exception):
    """Root of the workers room's errors."""


class LedgerError(WorkersError):
    """The ledger or the input cannot be used as asked."""


class TemporaryError(LedgerError):
    """Try again after `delay_s`: a storage that does not answer, an input folder that is not mounted now."""

    def __init__(self, message: str, delay_s: float = 5.0) -> None:
        super().__init__(message)
        self.delay_s = delay_s


class PermanentError(LedgerError):
    """Trying again cannot help; a person has to change something.  The message says what."""


class StorageFull(PermanentError):
    """A write found no space.  Nothing that was durable is harmed."""


class BadInput(PermanentError):
    """The input folder is missing, empty of audio, or not the one the ledger was made from."""


class WrongLedger(PermanentError):
    """The folder holds a ledger of another job, other settings or another format."""


class LeaseLost(TemporaryError):
    """Another worker holds a newer epoch of the shard: what this one has not committed is void."""


class Stopped(WorkersError):
    """A stop was asked for; whoever catches it releases its lease and leaves."""


class ItemRefused(WorkersError):
    """One input cannot be cleaned.  It is quarantined and the run goes on."""

    def __init__(self, step: str, reason: str) -> None:
        super().__init__(f"{step}: {reason}")
        self.step = step
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Item:
    """One distinct content among the inputs, under the first name that has it."""

    id: str  # sha256 of the file's bytes, hexadecimal
    path: str  # relative to the input folder; undecodable bytes as surrogates
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Shard:
    """What one lease covers: so many units, worked through in this order."""

    name: str
    units: tuple[str, ...]  # item ids


@dataclass(frozen=True, slots=True)
class Receipt:
    """The first `size_bytes` bytes of `path` are on disk and have this digest."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is, read from the ledger alone.  None: the index is not made yet."""

    items_total: int | None
    items_done: int  # cleaned and durable
    items_quarantined: int
    audio_s: float  # of the cleaned items
    shards_total: int
    shards_open: int  # without a done-record

    @property
    def items_settled(self) -> int:
        """Items that need no more work: cleaned or quarantined."""
        return self.items_done + self.items_quarantined

    @property
    def items_open(self) -> int | None:
        return None if self.items_total is None else self.items_total - self.items_settled


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a reading of every byte of a ledger found.

    Every item of the index is in exactly one of done, quarantined, open and lost.  Lost: in a shard
    whose done-record says it is finished, but no trusted frame of it can be read.  Doubled: committed twice.
    """

    items_total: int
    items_done: int
    items_quarantined: int
    items_open: int
    items_lost: int
    items_doubled: int
    files_duplicate: int  # further names of an item's content; cleaned once, under the first name
    files_refused: int  # names that could not be read as files at all
    garbage_frames: int  # whole or torn frames that no trusted record names; harmless
    bytes_read: int
    problems: tuple[str, ...] = field(default=())

    @property
    def is_sound(self) -> bool:
        return self.items_lost == 0 and self.items_doubled == 0


@dataclass(frozen=True, slots=True)
class Cleaned:
    """An item's row and its audio, which stands at its beginning.  The receiver closes the audio."""

    row: dict[str, object]
    audio: BinaryIO
    audio_bytes: int


class Cleaner(Protocol):
    """What the pipeline asks of a set of steps.  Made with the job's settings as its only argument."""

    versions: Mapping[str, str]

    def clean(self, folder: Path, item: Item, keep_going: Callable[[], None]) -> Cleaned:
        """Clean one item.

        keep_going: called between windows; raises to abandon the item.  Raises ItemRefused when the
        item cannot be cleaned, ever; StorageFull or TemporaryError when it could be another time.
        """
