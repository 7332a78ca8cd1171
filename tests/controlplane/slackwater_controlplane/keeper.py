"""A stand-in keeper in a thread, for tests of the real operator process in which preemptions are verified.

Owns the thread and the receipt that its workers of kwok leave; what the keeper says is `testing.remotes`.
"""

import asyncio
import json
import threading
from typing import Any

from slackwater_controlplane import stages
from slackwater_operator.testing.remotes import StandInKeeper

DIGEST = "ab" * 32
RECEIPT = json.dumps({"path": "/ledger/part/h0/1", "size_bytes": 9, "sha256": DIGEST, "unit": "u", "items": 7})


class Keeper:
    """A keeper whose ledger holds `RECEIPT`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.real = self._call(self._make())

    @property
    def url(self) -> str:
        return str(self.real.url)

    def close(self) -> None:
        """Be gone."""
        self._call(self.real.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    @staticmethod
    async def _make() -> StandInKeeper:
        keeper = StandInKeeper()
        keeper.holds.add(DIGEST)
        await keeper.start()
        return keeper

    def _call(self, act: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(act, self._loop).result(10)


def worker_notes(flush_s: float) -> dict[str, str]:
    """Annotations of a worker of kwok that leaves after a while, with its receipt."""
    return {stages.MESSAGE: RECEIPT, stages.FLUSH_S: f"{flush_s:g}"}
