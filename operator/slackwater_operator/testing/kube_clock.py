"""A clock that tests move, with a sleep that ends when they do."""

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from itertools import count

SETTLE_ROUNDS = 20  # turns of the loop that whoever was woken gets before the clock moves on


class MovedClock:
    """`clock()` is the time, `clock.sleep` the sleep; nothing passes but by `advance`.

    wall_s: what `wall()` says at time 0.
    """

    def __init__(self, now_s: float = 1000.0, wall_s: float = 1_796_000_000.0) -> None:
        self.now_s = now_s
        self._wall_s = wall_s - now_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()

    def __call__(self) -> float:
        return self.now_s

    def wall(self) -> float:
        """Seconds since 1970."""
        return self._wall_s + self.now_s

    async def sleep(self, seconds: float) -> None:
        """As asyncio.sleep, on this clock."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        waker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now_s + seconds, next(self._order), waker))
        await waker

    @property
    def sleeping(self) -> int:
        """How many sleep now."""
        return sum(not waker.done() for _, _, waker in self._sleepers)

    async def advance(
        self, seconds: float, settle_s: float = 0.0, settle: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Let so much time pass, waking each sleeper at its moment.

        settle: awaited after each of them, `FakeKube.settle` for those who talk to one.  settle_s: real seconds
        to wait there, for others who talk to a server.
        """
        end_s = self.now_s + seconds
        await self._settle(settle_s, settle)
        while self._sleepers and self._sleepers[0][0] <= end_s:
            at_s, _, waker = heapq.heappop(self._sleepers)
            if waker.done():
                continue
            self.now_s = max(self.now_s, at_s)
            waker.set_result(None)
            await self._settle(settle_s, settle)
        self.now_s = end_s
        await self._settle(settle_s, settle)

    async def _settle(self, settle_s: float, settle: Callable[[], Awaitable[None]] | None) -> None:
        for _ in range(SETTLE_ROUNDS):
            await asyncio.sleep(0)
        if settle is not None:
            await settle()
        if settle_s:
            await asyncio.sleep(settle_s)
