"""One server of the test cluster as a process: start, wait, stop, kill, pause.

Owns the process and its log file.  Does not own what the command line says (`flags`) nor the order among servers
(`cluster`).
"""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from slackwater_controlplane.errors import ControlPlaneError, StartError
from slackwater_controlplane.leftovers import Record
from slackwater_controlplane.processes import ProcessName

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_STOP_S = 15.0
_LAST_LINES = 6


class Server:
    """One program with its arguments.  It runs or it does not; starting it again is allowed.

    enter: a command that enters another network namespace and becomes the program (execs), as nsenter does.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, folder: Path, record: Record, enter: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.log = folder / "log" / f"{name}.log"
        self._command = [*enter, *command]
        self._folder = folder
        self._record = record
        self._child: subprocess.Popen[bytes] | None = None
        self._process: ProcessName | None = None
        self._is_paused = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self.is_alive else None

    @property
    def is_alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start the process; it need not be ready when this returns."""
        assert not self.is_alive, f"{self.name} runs already"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                self._command,
                # Not this process's own: proxies, Go's settings and a person's kubeconfig would change what servers do.
                env={"PATH": os.defpath, "HOME": str(self._folder), "LC_ALL": "C"},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # an interrupt at the terminal is for its owner, which ends it in order
            )
        self._is_paused = False
        self._process = ProcessName.of(self._child.pid)
        if self._process is not None:
            self._record.add_process(self.name, self._process)

    def wait(self, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Return when `is_ready`.  Raises StartError with the log's last lines when it ends or takes too long."""
        deadline_s = time.monotonic() + timeout_s
        while not is_ready():
            if not self.is_alive:
                code = self._child.returncode if self._child is not None else None
                raise StartError(f"{self.name} ended with {code} before it was ready:\n  {self.last_words()}")
            if time.monotonic() > deadline_s:
                raise StartError(f"{self.name} is not ready after {timeout_s:g} s:\n  {self.last_words()}")
            time.sleep(_POLL_S)

    def stop(self, timeout_s: float = _STOP_S) -> None:
        """SIGTERM and wait; SIGKILL when that takes too long.  Nothing when it does not run."""
        if self._child is None:
            return
        if self._is_paused and self.is_alive:
            self.resume()
        if self.is_alive:
            self._child.send_signal(signal.SIGTERM)
        try:
            self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.info("server does not stop, killed name=%s after_s=%g", self.name, timeout_s)
            self._child.kill()
            self._child.wait()
        self._forget()

    def kill(self) -> None:
        """SIGKILL, and return when it is gone."""
        self._running().kill()
        self._running().wait()
        self._forget()

    def pause(self) -> None:
        """SIGSTOP: it keeps its port and its connections, and answers nothing."""
        self._running().send_signal(signal.SIGSTOP)
        self._is_paused = True

    def resume(self) -> None:
        self._running().send_signal(signal.SIGCONT)
        self._is_paused = False

    def last_words(self) -> str:
        """The last lines of its log that tell of errors, or just the last ones."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        wrong = [line for line in lines if line.startswith(("E", "F")) or '"level":"fatal"' in line or "rror:" in line]
        return "\n  ".join((wrong or lines)[-_LAST_LINES:]) or "it said nothing"

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            raise ControlPlaneError(f"{self.name} is not running")
        return self._child

    def _forget(self) -> None:
        self._is_paused = False
        if self._process is not None:
            self._record.drop_process(self._process)
