"""How a worker hears that it must go.

Owns the stop flag, its signals and the watchdog against a step that hangs.  Does not release
leases: whoever holds one does, when `StopFlag.check` raises.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from slackwater_workers.core import Stopped

EXIT_PREEMPTED = 75  # BSD's "temporary failure"; the contract of operator/README.md
_POLL_S = 0.05


class StopFlag:
    """Set by a signal or by the parent's end; looked at between windows and items.

    The signal handler stores one word and nothing else: it may run between any two instructions,
    so it takes no lock, writes no file and raises nothing.
    """

    def __init__(self) -> None:
        self.reason: str | None = None

    def install(self) -> None:
        """Let SIGTERM and SIGINT set the flag.  Call from the main thread, before slow imports."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.reason is None:
            self.reason = "interrupted" if number == signal.SIGINT else "preempted"

    def set(self, reason: str) -> None:
        """Ask to stop; the first reason stays."""
        if self.reason is None:
            self.reason = reason

    def check(self) -> None:
        """Raise Stopped when a stop was asked for."""
        if self.reason is not None:
            raise Stopped(self.reason)

    def wait(self, timeout_s: float) -> None:
        """Sleep for `timeout_s`, or until a stop is asked for and then raise Stopped."""
        # A lock-based event could deadlock with the handler, so this polls.
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.check()
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(left_s, _POLL_S))


def leave_when_parent_is_gone(stop: StopFlag, within_s: float = 3.0) -> Callable[[], None]:
    """What to do at the end of the parent's messages: stop, and end the process if that takes too long.

    Ending without a goodbye is safe at any moment; a stop only frees the lease sooner.
    """

    def on_gone() -> None:
        stop.set("parent gone")
        time.sleep(within_s)
        os._exit(EXIT_PREEMPTED)

    return on_gone


class Watchdog:
    """Ends the process when nothing was done for `stall_s`, so that its lease runs out and others go on.

    A decoder that loops for ever would otherwise hold its shard for as long as the heartbeat thread lives.
    """

    def __init__(self, stall_s: float, end_process: Callable[[int], None] = os._exit) -> None:
        self._stall_s = stall_s
        self._end_process = end_process
        self._last_s = time.monotonic()
        self._stopping = threading.Event()

    def pet(self) -> None:
        """Say that work goes on."""
        self._last_s = time.monotonic()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()

    def _watch(self) -> None:
        while not self._stopping.wait(min(1.0, self._stall_s / 4)):
            if time.monotonic() - self._last_s > self._stall_s:
                self._end_process(1)
                return
