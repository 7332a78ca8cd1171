"""A stand-in server in a thread of its own, for tests that are not asynchronous.

Owns the thread and its event loop; what the stand-ins answer is `slackwater_operator.testing.remotes`.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from slackwater_operator.testing.remotes import StandInGateway, StandInKeeper

S = TypeVar("S", StandInGateway, StandInKeeper)
T = TypeVar("T")


class Threaded(Generic[S]):
    """Runs a stand-in until `close`.   real: the stand-in, which may be read from any thread."""

    def __init__(self, real: S) -> None:
        self.real = real
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.call(real.start())

    def call(self, act: Coroutine[Any, Any, T]) -> T:
        """Run something in its thread and wait for it."""
        return asyncio.run_coroutine_threadsafe(act, self._loop).result(10)

    def close(self) -> None:
        """Be gone."""
        self.call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    async def _end(self) -> None:
        await self.real.stop()
        left = asyncio.all_tasks() - {asyncio.current_task()}  # answers to clients that are gone
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


class Gateway(Threaded[StandInGateway]):
    """A gateway."""

    def __init__(self) -> None:
        super().__init__(StandInGateway())

    def say(self, **signals: Any) -> None:
        """These numbers from now on."""
        self._loop.call_soon_threadsafe(lambda: self.real.say(**signals))
