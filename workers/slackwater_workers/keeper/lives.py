"""Which workers of a ledger live, seen by somebody who must not write in it.

Owns the reading of heartbeats.  A worker that claims shards judges by the store's clock and its own heartbeat as the
probe (`ledger.leases`); an onlooker has no probe, so it counts by its own clock from the moment it saw a beat.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from slackwater_workers.ledger.store import Store

_FORGET_AFTER_S = 600.0


@dataclass(slots=True)
class Life:
    """One worker process.  name: what it was given, which several may share; worker: the ledger's name for it."""

    worker: str
    name: str
    ttl_s: float
    beat_s: float  # by the store's clock
    seen_s: float  # when that beat was new, by our monotonic clock


class Lives:
    """Looks at the heartbeats again and again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, Life] = {}
        self._forgotten: set[str] = set()  # a job that runs for months has had thousands

    def living(self, now_s: float, age_s: Callable[[float], float]) -> list[Life]:
        """Those that beat within their own TTL, the one that beat last at the end.

        now_s: our monotonic clock.   age_s: how old a file time is that was not there at the look before.
        """
        for worker in self._store.names("hb"):
            if worker not in self._forgotten:
                self._look_at(worker, now_s, age_s)
        living = [life for life in self._known.values() if now_s - life.seen_s <= life.ttl_s]
        return sorted(living, key=lambda life: life.seen_s)

    def _look_at(self, worker: str, now_s: float, age_s: Callable[[float], float]) -> None:
        beat_s = self._store.modified_s(f"hb/{worker}")
        if beat_s is None:
            return
        life = self._known.get(worker)
        if life is None:
            body = json.loads(self._store.read(f"hb/{worker}") or b"{}")
            name, ttl_s = str(body.get("name", worker)), float(body.get("ttl_s", 0.0))
            self._known[worker] = Life(worker, name, ttl_s, beat_s, now_s - age_s(beat_s))
        elif life.beat_s != beat_s:
            life.beat_s, life.seen_s = beat_s, now_s - age_s(beat_s)
        elif now_s - life.seen_s > max(life.ttl_s, _FORGET_AFTER_S):
            del self._known[worker]
            self._forgotten.add(worker)
