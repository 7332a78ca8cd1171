"""The moments at which requests begin to wait for a slot, for those who want to hear of a burst early.

Owns the count and the wait.  `slots` tells it through the gateway's `on_backlog`; `server` and `control` wait.
"""

import asyncio
import contextlib

MIN_BETWEEN_S = 0.1  # between two things said: near full load a queue comes and goes at any rate


class Backlog:
    """Counts backlogs that began.  One event loop; all methods are called on it."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = asyncio.Event()

    def began(self) -> None:
        """The first request has to wait."""
        self.count += 1
        self.wake()

    def wake(self) -> None:
        """End every wait."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, seen: int, timeout_s: float) -> None:
        """Return at once when `count` is not `seen`, else at the next backlog or `wake`, or after timeout_s."""
        if self.count == seen:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
