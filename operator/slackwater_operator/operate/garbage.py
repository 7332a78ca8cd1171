"""Full garbage collections that do not stop the operator for long.

Owns when Python's collector looks at everything.  In a large cluster that is a million objects, and for half a second
nothing else runs: no tick, no poll, no renewal of the Lease.  Nearly all of them are in the caches and go by their
reference counts, so what has survived a long look is looked at again only once an hour.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LONG_S = 0.03
AGAIN_S = 3600.0
_OLDEST = 2


@dataclass(slots=True)
class Collector:
    """For `gc.callbacks`."""

    clock: Callable[[], float] = time.monotonic
    long_s: float = LONG_S
    _began_s: float = 0.0
    _all_s: float = field(default=float("-inf"))  # the last look at everything

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Before and after each collection."""
        if info["generation"] != _OLDEST:
            return
        if phase == "start":
            self._began_s = self.clock()
            if self._began_s - self._all_s >= AGAIN_S:
                self._all_s = self._began_s
                gc.unfreeze()
        elif self.clock() - self._began_s >= self.long_s:
            gc.freeze()


@contextmanager
def spared(collector: Collector | None = None) -> Iterator[None]:
    """Inside, what stays is spared; at the end nothing is any more."""
    collector = collector or Collector()
    gc.callbacks.append(collector)
    try:
        yield
    finally:
        gc.callbacks.remove(collector)
        gc.unfreeze()


def collect_all() -> None:
    """Now, whatever was spared before."""
    gc.unfreeze()
    gc.collect()
