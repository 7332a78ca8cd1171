"""A real `slackwater operator run` as a child process, for tests on a real API server."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from slackwater_operator.cluster.child import LAUNCHER

_START = "from slackwater_operator.operate.cli import operator; operator(prog_name='slackwater operator')"


def free_port() -> int:
    """A port of loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class OperatorProcess:
    """One replica.  As a context manager it is started, and killed at the end if it still runs.

    environment: of the child, the caller's own.   log: what it says on both outputs.
    """

    def __init__(self, name: str, kubeconfig: Path, folder: Path, environment: Mapping[str, str], *more: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.metrics_port, self.probes_port = free_port(), free_port()
        self._command = [
            *(
                sys.executable,
                "-S",
                str(LAUNCHER),
                str(os.getpid()),
                "0",
            ),  # it ends with this process, however that dies
            *(sys.executable, "-c", _START, "run", "--kubeconfig", str(kubeconfig), "--identity", name),
            *("--host", "127.0.0.1", "--metrics-port", str(self.metrics_port), "--probes-port", str(self.probes_port)),
            *more,
        ]
        self._environment = environment
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=dict(self._environment), stdin=subprocess.DEVNULL
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()

    @property
    def child(self) -> subprocess.Popen[bytes]:
        """The process."""
        assert self._child is not None, "not started"
        return self._child

    def kill(self) -> None:
        """SIGKILL."""
        self.child.kill()
        self.child.wait()

    def freeze(self) -> None:
        """SIGSTOP, until `thaw`."""
        os.kill(self.child.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.child.pid, signal.SIGCONT)

    def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM; returns the exit code."""
        self.child.terminate()
        return self.child.wait(timeout_s)

    def words(self) -> str:
        """Everything that it said."""
        return self.log.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        """Its samples, by name with labels; empty while it does not answer."""
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", trust_env=False)
        except httpx.HTTPError:
            return {}
        pairs = (line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def leads(self) -> bool:
        """Whether it says that it leads."""
        return self.metrics().get("fleet_leader") == 1.0

    def health(self) -> tuple[int, str]:
        """Status and text of its probe; (0, "") while nobody listens."""
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.probes_port}/healthz", trust_env=False, timeout=15.0)
        except httpx.HTTPError:
            return 0, ""
        return answer.status_code, answer.text

    @property
    def rss_mb(self) -> float:
        """Memory that it holds now."""
        status = Path(f"/proc/{self.child.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1024


def wait_until(what: Callable[[], object], timeout_s: float = 30.0, why: Callable[[], str] = lambda: "") -> float:
    """Wait until something is true; returns how long it took.  Raises AssertionError with `why()`."""
    began_s = time.monotonic()
    while not what():
        if time.monotonic() - began_s > timeout_s:
            raise AssertionError(f"not so after {timeout_s:g} s\n{why()}")
        time.sleep(0.05)
    return time.monotonic() - began_s
