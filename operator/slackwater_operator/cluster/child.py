"""One child process: its start, its JSON lines, its signals and its end.

Knows the wire of operator/README.md and nothing of what the child is for.  Each child leads its own
session, so that a signal to its group reaches whatever it started and a Ctrl-C reaches none of them.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

LAUNCHER = Path(__file__).with_name("launch.py")
LINE_LIMIT_BYTES = 1 << 20  # of one JSON line; a longer one is the child's error


class Child:
    """A running child.  Make it with `Child.start`.

    on_event is called with each event, on_exit once with the return code (negative: the signal).
    Both run on the event loop.
    """

    def __init__(self, uid: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.uid = uid
        self.log = log
        self._process = process
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    @classmethod
    async def start(
        cls,
        uid: str,
        command: list[str],
        *,
        log: Path,
        on_event: Callable[[dict[str, Any]], None],
        on_exit: Callable[[int], None],
        nice: int = 0,
        environment: dict[str, str] | None = None,
    ) -> "Child":
        """Start `command` with its standard error appended to `log`."""
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-S",
                str(LAUNCHER),
                str(os.getpid()),
                str(nice),
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                limit=LINE_LIMIT_BYTES,
                env=os.environ | (environment or {}),
            )
        child = cls(uid, process, log)
        child._kill_group_at_exit()
        child._tasks = (asyncio.create_task(child._follow(on_event, on_exit), name=f"child {uid}"),)
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, message: dict[str, Any]) -> None:
        """Write one `set` message; a child that is gone hears nothing."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.is_closing():
            with contextlib.suppress(ConnectionError):
                stdin.write(json.dumps(message).encode() + b"\n")

    def signal(self, number: signal.Signals) -> None:
        """Signal the child itself; no error if it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL the child and everything in its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> None:
        """Until the child is gone and its last event was handled."""
        await asyncio.gather(*self._tasks)

    def last_words(self) -> str:
        """The last line of the log, for an error message."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - 4096))
                lines = log.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _kill_group_at_exit(self) -> None:
        """As soon as the child itself is gone, end what it left in its group: that would hold its pipes open."""
        if sys.platform != "linux":
            return
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:  # gone already
            return
        loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            self.kill()

        loop.add_reader(descriptor, gone)

    async def _follow(self, on_event: Callable[[dict[str, Any]], None], on_exit: Callable[[int], None]) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        while True:
            try:
                line = await stdout.readline()
            except ValueError:  # longer than LINE_LIMIT_BYTES
                logger.warning("dropped an over-long line uid=%s", self.uid)
                continue
            if not line:
                break
            try:
                event = json.loads(line)
            except ValueError:
                logger.warning("not an event uid=%s line=%r", self.uid, line[:200])
                continue
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                on_event(event)
        on_exit(await self._process.wait())


async def end(children: list[Child], grace_s: float) -> None:
    """Wait until all are gone; what is left after the grace is killed."""
    waits = [asyncio.ensure_future(child.wait()) for child in children]
    if waits:
        _, late = await asyncio.wait(waits, timeout=grace_s)
        if late:
            for child in children:
                child.kill()
            await asyncio.wait(late)
