"""A stand-in keeper, for tests of the real operator process in which preemptions are verified.

Owns the receipt that workers of kwok leave and that this keeper's ledger holds.
"""

import json

from slackwater_controlplane import stages
from slackwater_controlplane.threaded import Threaded
from slackwater_operator.testing.remotes import StandInKeeper

DIGEST = "ab" * 32
RECEIPT = json.dumps({"path": "/ledger/part/h0/1", "size_bytes": 9, "sha256": DIGEST, "unit": "u", "items": 7})


class Keeper(Threaded[StandInKeeper]):
    """A keeper whose ledger holds `RECEIPT`."""

    def __init__(self) -> None:
        real = StandInKeeper()
        real.holds.add(DIGEST)
        super().__init__(real)


def worker_notes(flush_s: float) -> dict[str, str]:
    """Annotations of a worker of kwok that leaves after a while, with its receipt."""
    return {stages.MESSAGE: RECEIPT, stages.FLUSH_S: f"{flush_s:g}"}
