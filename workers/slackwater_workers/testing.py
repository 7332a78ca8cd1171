"""Stand-ins for tests of this room and of those who run workers.

Owns fakes that are real classes: a cleaner without audio, a store whose disk fills up, small recordings.  Loads neither
NumPy nor any decoder, so a worker process with `CopyCleaner` starts at once.
"""

# ruff: noqa: ARG002 - a fake takes what its protocol gives, whether it needs it or not
import hashlib
import io
import math
import os
import signal
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from slackwater_workers.config import JobConfig, identity
from slackwater_workers.core import Cleaned, Item, ItemRefused, Progress, Receipt, StorageFull
from slackwater_workers.ledger.export import export
from slackwater_workers.ledger.frames import Row
from slackwater_workers.ledger.index import LISTING, walk
from slackwater_workers.ledger.job import join_job
from slackwater_workers.ledger.leases import Lease, Leases
from slackwater_workers.ledger.parts import PartWriter, read_chain
from slackwater_workers.ledger.store import PartFile, PosixStore
from slackwater_workers.pipeline.worker import Worker
from slackwater_workers.preemption import StopFlag


class CopyCleaner:
    """Takes each file's bytes for its audio.  A file can ask for trouble by how it begins:

    `SLOW 0.2` takes so many seconds, with a look at the stop flag every 5 ms; `REFUSE` is refused; `CRASH` kills
    the process like a broken decoder does; `HANG` never returns and never looks; `PARENT` records who started it.
    """

    def __init__(self, config: JobConfig) -> None:
        self.versions: Mapping[str, str] = {"copy": "1", "rate": str(config.sample_rate_hz)}

    def clean(self, folder: Path, item: Item, keep_going: Callable[[], None]) -> Cleaned:
        """See `Cleaner.clean`."""
        content = (folder / item.path).read_bytes()
        word, *rest = content.split()[:2] or [b""]
        match word:
            case b"SLOW":
                _work_for(float(rest[0]), keep_going)
            case b"REFUSE":
                raise ItemRefused("copy", "asked to")
            case b"CRASH":
                os.kill(os.getpid(), signal.SIGKILL)
            case b"HANG":
                time.sleep(3600)
            case _:
                keep_going()
        row: dict[str, object] = {
            "status": "cleaned",
            "path": item.path,
            "sha256": item.id,
            "duration_s": len(content) / 1000,
            "audio_bytes": len(content),
            "audio_sha256": hashlib.sha256(content).hexdigest(),
            **({"parent": os.getppid()} if word == b"PARENT" else {}),
        }
        return Cleaned(row, io.BytesIO(content), len(content))


def _work_for(duration_s: float, keep_going: Callable[[], None]) -> None:
    deadline_s = time.monotonic() + duration_s
    while time.monotonic() < deadline_s:
        keep_going()
        time.sleep(0.005)


class FullStore(PosixStore):
    """A ledger on a disk with room for `room_bytes` more bytes of parts and names."""

    def __init__(self, root: Path, room_bytes: int) -> None:
        super().__init__(root)
        self.room_bytes = room_bytes

    def create(self, name: str, content: bytes) -> bool:
        self.take(len(content))
        return super().create(name, content)

    def create_part(self, name: str) -> "PartFile | None":
        part = super().create_part(name)
        return None if part is None else _FullPart(self, part)

    def take(self, size_bytes: int) -> int:
        """Use up to `size_bytes` of the room and return how much; StorageFull when there is none."""
        taken = min(size_bytes, self.room_bytes)
        if size_bytes and not taken:
            raise StorageFull(f"no space left on {self.root}; free some and start again, nothing is lost")
        self.room_bytes -= taken
        return taken


class _FullPart:
    """Writes what fits, then fails: the torn frame that a full disk leaves."""

    def __init__(self, store: FullStore, part: PartFile) -> None:
        self._store = store
        self._part = part

    def write(self, piece: bytes) -> None:
        while piece:
            taken = self._store.take(len(piece))
            self._part.write(piece[:taken])
            piece = piece[taken:]

    def sync(self) -> None:
        self._part.sync()

    def close(self) -> None:
        self._part.close()


class Recorder:
    """A report that keeps what it is told, and can ask for a stop after so many records."""

    def __init__(self, stop: StopFlag, stop_after: int | None = None) -> None:
        self.receipts: list[Receipt] = []
        self.words: list[str] = []
        self._stop = stop
        self._stop_after = stop_after

    def working(self, progress: Progress) -> None:
        self.words.append("working")

    def durable(self, unit: str, receipt: Receipt, audio_s: float) -> None:
        self.receipts.append(receipt)
        if len(self.receipts) == self._stop_after:
            self._stop.set("preempted")

    def idle(self, progress: Progress) -> None:
        self.words.append("idle")

    def leaving(self, reason: str) -> None:
        self.words.append("leaving")


class _Blind(Leases):
    """A worker that looked just before it lost its lease, always."""

    def is_lost(self, lease: Lease) -> bool:
        return False


class Hand(PartWriter):
    """A worker's hand on one shard, led by a test.

    Whoever held the shard before counts as dead; and this one writes on after it lost the shard.
    """

    def __init__(self, store: PosixStore, shard: str) -> None:
        leases = _Blind(store, "hand", ttl_s=0.0)
        lease = leases.claim(shard)
        assert lease is not None
        super().__init__(store, leases, lease, read_chain(store, shard))

    def write(self, unit: str) -> Receipt:
        """Make one record of a second of audio durable."""
        return self.append(unit_row(unit))


def unit_row(unit: str) -> Row:
    """The least that a record says."""
    return {"unit": unit, "status": "cleaned", "duration_s": 1.0}


def receipt_of(path: Path) -> Receipt:
    """What a worker would say of a part as it lies there."""
    content = path.read_bytes()
    return Receipt(str(path), len(content), hashlib.sha256(content).hexdigest())


def make_input(folder: Path, contents: dict[str, bytes]) -> Path:
    """Write files by name; returns the folder."""
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def numbered(count: int, prefix: str = "item") -> dict[str, bytes]:
    """So many small files of different content."""
    return {f"{number:03d}.wav": f"{prefix} {number}".encode() for number in range(count)}


def work(
    store: PosixStore,
    folder: Path,
    *,
    shard_items: int = 4,
    stop_after: int | None = None,
    **settings: float,
) -> Recorder:
    """Run one worker in this process, to its end or to a stop after so many records (then Stopped is raised)."""
    config = JobConfig.model_validate({"shard_items": shard_items, **settings})
    cleaner = CopyCleaner(config)
    store.prepare()
    join_job(store, "test", identity(config, cleaner.versions))
    stop = StopFlag()
    report = Recorder(stop, stop_after)
    found = None if store.exists(LISTING) else walk(folder, store.root, stop.check)
    Worker(store, config, folder, cleaner, f"{__name__}:CopyCleaner", report, stop, "w").run(found)
    return report


def exported(store: PosixStore, folder: Path) -> dict[str, bytes]:
    """Every byte of an export, by name."""
    export(store, folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def wav_bytes(samples: list[float], sample_rate_hz: int = 16_000, num_channels: int = 1) -> bytes:
    """A 16-bit WAV of interleaved samples in -1 to 1."""
    data = b"".join(struct.pack("<h", round(max(-1.0, min(1.0, sample)) * 32767)) for sample in samples)
    return wav_header(len(data), sample_rate_hz, num_channels) + data


def wav_header(data_bytes: int, sample_rate_hz: int = 16_000, num_channels: int = 1, bits: int = 16) -> bytes:
    """The 44 bytes before a WAV's samples.  Integers, or IEEE floats when `bits` is 32 or 64."""
    frame = num_channels * bits // 8
    kind = 1 if bits <= 24 else 3
    form = struct.pack("<HHIIHH", kind, num_channels, sample_rate_hz, sample_rate_hz * frame, frame, bits)
    size = min(36 + data_bytes, 0xFFFFFFFF)
    return (
        b"RIFF"
        + struct.pack("<I", size)
        + b"WAVEfmt "
        + struct.pack("<I", 16)
        + form
        + b"data"
        + struct.pack("<I", data_bytes)
    )


def tone(
    duration_s: float, frequency_hz: float = 220.0, level: float = 0.2, sample_rate_hz: int = 16_000
) -> list[float]:
    """A sine."""
    step = 2.0 * math.pi * frequency_hz / sample_rate_hz
    return [level * math.sin(step * n) for n in range(round(duration_s * sample_rate_hz))]
