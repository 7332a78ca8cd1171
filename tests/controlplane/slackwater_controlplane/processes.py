"""Processes known by number and start time, so that a number used again is never taken for ours.

Owns nothing that runs; `servers` starts and `leftovers` ends what these names mean.
"""

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class ProcessName:
    """One process, now or later.  start_ticks: field 22 of /proc/PID/stat."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> "ProcessName | None":
        """The process that has this number now; None when there is none or it is a zombie."""
        found = _stat(pid)
        return None if found is None or found[0] == "Z" else cls(pid, found[1])

    @property
    def is_alive(self) -> bool:
        return ProcessName.of(self.pid) == self

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it is still that process."""
        if self.is_alive:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return


def await_end(processes: Iterable[ProcessName], timeout_s: float) -> bool:
    """Wait until none of them is alive; says whether that was so in time."""
    left = list(processes)
    deadline_s = time.monotonic() + timeout_s
    while left := [process for process in left if process.is_alive]:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything, a bracket too
    return fields[0], int(fields[19])
