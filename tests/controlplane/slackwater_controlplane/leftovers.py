"""What a run leaves when it is killed, written down while it runs and ended at the next start.

Owns the state files, `<cache>/controlplane/runs/*.json`: the owner, the folder, every process by number and start time,
and commands that undo the rest.  Ends nothing that is not in such a file, and nothing whose owner is alive.
"""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slackwater_controlplane.errors import ControlPlaneError
from slackwater_controlplane.processes import ProcessName, await_end

logger = logging.getLogger(__name__)

_END_S = 10.0
_UNDO_S = 30.0


class Record:
    """One run's state file."""

    def __init__(self, path: Path, folder: Path, owner: ProcessName, label: str) -> None:
        self.path = path
        self.folder = folder
        self.owner = owner
        self.label = label
        self.processes: list[tuple[str, ProcessName]] = []
        self._undo: list[list[str]] = []

    @classmethod
    def create(cls, runs: Path, folder: Path, label: str = "test") -> "Record":
        """A new run of this process in `folder`, which is the run's own and removed with it."""
        owner = ProcessName.of(os.getpid())
        assert owner is not None, "this process is alive"
        record = cls(runs / f"{label}-{os.getpid()}-{secrets.token_hex(3)}.json", folder, owner, label)
        runs.mkdir(parents=True, exist_ok=True)
        record._write()
        return record

    @classmethod
    def load(cls, path: Path) -> "Record":
        document = json.loads(path.read_text())
        owner = ProcessName(*document["owner"])
        record = cls(path, Path(document["folder"]), owner, document["label"])
        record.processes = [(name, ProcessName(pid, ticks)) for name, pid, ticks in document["processes"]]
        record._undo = document["undo"]
        return record

    def add_process(self, name: str, process: ProcessName) -> None:
        """A process that must end with the run."""
        self.processes.append((name, process))
        self._write()

    def drop_process(self, process: ProcessName) -> None:
        """It ended in order.  Nothing when it is not written down, as after the run's end."""
        if process not in [one for _, one in self.processes]:
            return
        self.processes = [(name, one) for name, one in self.processes if one != process]
        self._write()

    def add_undo(self, *command: str) -> None:
        """A command to run once the processes are gone, the last added first, if the run does not do it itself."""
        self._undo.append(list(command))
        self._write()

    def drop_undo(self, *command: str) -> None:
        self._undo.remove(list(command))
        self._write()

    def end(self) -> None:
        """Kill what is left, undo the rest, remove the folder and this file.  Safe to call again."""
        left = [process for _, process in reversed(self.processes) if process.is_alive]
        for process in left:
            process.send(signal.SIGKILL)
        if not await_end(left, _END_S):
            raise ControlPlaneError(f"processes of {self.path} do not end: {[one.pid for one in left if one.is_alive]}")
        for command in reversed(self._undo):
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_UNDO_S)
            except (OSError, subprocess.TimeoutExpired) as error:
                logger.warning("undo failed command=%s error=%s", command, error)
            else:
                if done.returncode:
                    logger.warning("undo failed command=%s said=%s", command, done.stderr.strip())
        _remove(self.folder)
        self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        document: dict[str, Any] = {
            "owner": [self.owner.pid, self.owner.start_ticks],
            "label": self.label,
            "folder": str(self.folder),
            "processes": [[name, process.pid, process.start_ticks] for name, process in self.processes],
            "undo": self._undo,
        }
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(document, indent=1))
        os.replace(temporary, self.path)


def runs_folder(cache: Path) -> Path:
    """Where the state files of a cache lie."""
    return cache / "controlplane" / "runs"


@contextlib.contextmanager
def run_folder(cache: Path, label: str = "test") -> Iterator[Record]:
    """A folder of a run and its state file; whatever the block leaves is ended with it, or at the next start."""
    runs = runs_folder(cache)
    sweep(runs)
    # Not pytest's own folder: it is kept for three runs, and its path can be too long for a socket.
    record = Record.create(runs, Path(tempfile.mkdtemp(prefix=f"slackwater-{label}-")), label)
    try:
        yield record
    finally:
        record.end()


def records(runs: Path) -> list[Record]:
    """The runs that are written down, whoever owns them."""
    found = []
    for path in sorted(runs.glob("*.json")):
        with contextlib.suppress(FileNotFoundError):  # it ended meanwhile
            found.append(Record.load(path))
    return found


def sweep(runs: Path) -> list[Record]:
    """End every run whose owner is gone; returns them."""
    ended = []
    with _lock(runs):
        for record in records(runs):
            if not record.owner.is_alive:
                names = [name for name, process in record.processes if process.is_alive]
                logger.warning("ending what a killed run left label=%s processes=%s", record.label, names)
                record.end()
                ended.append(record)
    return ended


@contextlib.contextmanager
def _lock(runs: Path) -> Iterator[None]:
    runs.mkdir(parents=True, exist_ok=True)
    with (runs / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove(folder: Path) -> None:
    """Remove a folder, but never through a mount: what is behind one may be somebody's work."""
    for mount in reversed(_mounts_below(folder)):
        subprocess.run(["umount", "--lazy", mount], capture_output=True)
    if left := _mounts_below(folder):
        raise ControlPlaneError(f"{folder} is not removed: {', '.join(left)} mounted in it")
    shutil.rmtree(folder, ignore_errors=True)


def _mounts_below(folder: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points: Sequence[str] = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    return [point for point in points if point == str(folder) or point.startswith(f"{folder}/")]
