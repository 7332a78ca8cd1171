"""Servers as processes of their own, for tests that look at them from outside: the engine and the gateway.

Owns how they are started, that their events are read, and that they end with the test.  Owns nothing that
serves users.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ENGINE = [sys.executable, "-c", "from slackwater_inference.cli import app; app()", "serve"]
GATEWAY = [sys.executable, "-c", "from slackwater_inference.gateway.cli import app; app()"]
START_TIMEOUT_S = 120.0  # torch alone takes ten seconds on a busy machine


class ServerProcess:
    """A supervised server.  `log_path` has what it wrote to standard error."""

    def __init__(self, process: "subprocess.Popen[str]", log_path: Path) -> None:
        self.process = process
        self.log_path = log_path
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="events", daemon=True).start()
        self.url = ""

    @property
    def pid(self) -> int:
        """Of the server itself."""
        return self.process.pid

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self.log_path.read_text(errors="replace")

    def event(self, name: str, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """The next event of this name; others are skipped.  Raises AssertionError when the server ended first."""
        while True:
            try:
                event = self._events.get(timeout=timeout_s)
            except queue.Empty:
                raise AssertionError(
                    f"no event {name} within {timeout_s:g} s; its log ends: {self.log[-2000:]}"
                ) from None
            if event is None:
                raise AssertionError(f"the server ended before it said {name}; its log ends: {self.log[-2000:]}")
            if event["event"] == name:
                return event

    def rss_bytes(self) -> int:
        """Memory that it holds now."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def forget_peak(self) -> None:
        """Let `peak_rss_bytes` count from here on."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")  # proc(5)

    def peak_rss_bytes(self) -> int:
        """The most memory that it held since `forget_peak`."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (kib,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(kib) * 1024

    def _read(self) -> None:
        assert self.process.stdout is not None
        # A pipe that nobody reads would in the end stop the server.
        for line in self.process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)


@contextmanager
def server_process(command: Sequence[str], log_path: Path) -> Iterator[ServerProcess]:
    """Start a supervised server on a free port and wait until it is ready; it is killed at the end of the block."""
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [*command, "--supervised", "--port", "0"],
            stdin=subprocess.PIPE,  # closed by the system if we die, and then the server leaves by itself
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        server = ServerProcess(process, log_path)
        server.url = server.event("ready")["url"]
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
