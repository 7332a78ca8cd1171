"""A cell: a set of processes with a PID namespace, a mount namespace and a cgroup of their own, ended all at once.

It owns the namespaces, not what runs in them.  A node is one cell, kube-proxy and DNS together are another.  Nothing
of a cell outlives its owner: its first process (cell_init.py) returns when the pipe to the owner closes, be it by
`close` or since the owner was killed, and the kernel ends the others with it.  Mounts go with the namespace.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

INIT = Path(__file__).with_name("cell_init.py")
CGROUPS = Path("/sys/fs/cgroup")
# The kernel ends a namespace's processes at once; a container in the middle of a disk write needs a moment.
CLOSE_WAIT_S = 10.0


class CellError(RuntimeError):
    """A cell could not be set up, or a process in it could not be started."""


@dataclass(frozen=True, slots=True)
class Mounts:
    """What a cell sees at other places: binds (source, target), fresh temporary folders, and files over settings.

    views: binds through which nobody writes.   settings: files that stand in for kernel settings below /proc/sys, so
    that a kubelet that wants them otherwise finds what it wants and leaves the machine's own alone; one that this
    kernel has not is left out.
    """

    binds: tuple[tuple[Path, str], ...] = ()
    scratch: tuple[str, ...] = ()
    settings: tuple[tuple[Path, str], ...] = ()
    views: tuple[tuple[Path, str], ...] = ()


class Cell:
    """Processes of one node, or of one group of servers, in namespaces that end together; a context manager."""

    def __init__(self, cgroup: str, folder: Path, *, enter: Sequence[str] = (), mounts: Mounts | None = None) -> None:
        """cgroup: its name, unique on the machine.  folder: logs go there.  enter: prefix that joins a network."""
        self.folder = folder
        self._cgroup = cgroup
        self._enter = tuple(enter)
        self._mounts = mounts or Mounts()
        self._outer: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Make the namespaces and mounts; CellError says what the first process could not do."""
        self.folder.mkdir(parents=True, exist_ok=True)
        setup = {
            "cgroup": self._cgroup,
            "binds": [[str(source), target] for source, target in self._mounts.binds],
            "views": [[str(source), target] for source, target in self._mounts.views],
            "scratch": list(self._mounts.scratch),
            "settings": [[str(source), target] for source, target in self._mounts.settings],
        }
        unshare = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc")
        self._outer = subprocess.Popen(
            [*self._enter, *unshare, sys.executable, "-I", "-S", str(INIT), json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt typed at a terminal reaches the owner, which closes in order
        )
        try:
            self._answer()
        except CellError:
            self.close()
            raise

    def close(self) -> None:
        """End every process of the cell and remove its cgroup; harmless when called again."""
        outer, self._outer = self._outer, None
        if outer is None or outer.stdin is None or outer.stdout is None:
            return
        with contextlib.suppress(BrokenPipeError):
            outer.stdin.close()
        try:
            outer.wait(CLOSE_WAIT_S)
        except subprocess.TimeoutExpired:
            outer.kill()
            outer.wait()
        outer.stdout.close()
        remove_cgroups(self._cgroup)

    @property
    def pid(self) -> int:
        """The first process of the cell, as the machine counts: the one to look below for all the others."""
        assert self._outer is not None
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        if not children:
            raise CellError(f"the cell of {self.folder} has ended")
        return int(children[0])

    def log(self, name: str) -> Path:
        """Where the named process writes its standard output and error."""
        return self.folder / f"{name}.log"

    def start(self, name: str, argv: Sequence[str | Path], env: Mapping[str, str] | None = None) -> int:
        """Start a process under a name and return its process id inside the cell."""
        order = {
            "do": "start",
            "name": name,
            "argv": [str(word) for word in argv],
            "env": {"PATH": os.defpath + ":/usr/sbin:/sbin", "HOME": "/root", **(env or {})},
            "log": str(self.log(name)),
        }
        return int(self._ask(order)["pid"])

    def stop(self, name: str, *, sig: int = signal.SIGTERM, wait_s: float = 5.0) -> int | None:
        """End one process: the signal, then after wait_s a kill; its exit code, None when it never ran."""
        code: int | None = self._ask({"do": "stop", "name": name, "number": int(sig), "wait_s": wait_s})["code"]
        return code

    def running(self) -> dict[str, int]:
        """The named processes that run, with their process ids inside the cell."""
        running: dict[str, int] = self._ask({"do": "state"})["running"]
        return running

    def check(self, *names: str) -> None:
        """Raise CellError with the end of its log when one of these processes has ended."""
        state = self._ask({"do": "state"})
        for name in names:
            if name not in state["running"]:
                raise CellError(f"{name} ended with {state['ended'].get(name)}; its log ends:\n{self.tail(name)}")

    def tail(self, name: str, num_lines: int = 15) -> str:
        """The last lines of a process' log."""
        log = self.log(name)
        return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:]) if log.exists() else "(no log)"

    def enter(self) -> tuple[str, ...]:
        """The prefix that runs a command inside the cell, as it sees files, processes and network."""
        return ("nsenter", "--target", str(self.pid), "--mount", "--pid", "--net", "--")

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if self._outer is None or self._outer.stdin is None:
                raise CellError(f"the cell of {self.folder} is closed")
            try:
                self._outer.stdin.write(json.dumps(order).encode() + b"\n")
                self._outer.stdin.flush()
            except BrokenPipeError as error:
                raise CellError(f"the cell of {self.folder} has ended") from error
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._outer is not None
        assert self._outer.stdout is not None
        line = self._outer.stdout.readline()
        if not line:
            raise CellError(f"the cell of {self.folder} ended before it answered")
        content: dict[str, Any] = json.loads(line)
        if "error" in content:
            raise CellError(f"the cell of {self.folder}: {content['error']}")
        return content


def remove_cgroups(pattern: str) -> None:
    """Remove the cgroups of a name, or of all that a pattern names, from every hierarchy, with those below them.

    The processes in them must have ended.
    """
    unified = (CGROUPS / "cgroup.controllers").exists()
    for hierarchy in [CGROUPS] if unified else [each for each in CGROUPS.iterdir() if not each.is_symlink()]:
        for group in hierarchy.glob(pattern):
            for folder, _, _ in os.walk(group, topdown=False):
                _remove_when_empty(Path(folder))


def _remove_when_empty(group: Path) -> None:
    """The kernel lets a cgroup go a moment after its last process, not at once."""
    for _ in range(50):
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)
        else:
            return
