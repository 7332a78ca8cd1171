"""The API server's wall clock, as its answers tell it.

Owns the difference between that clock and our monotonic one, so that an own wall clock that is wrong, or is set, moves
nothing: what the server stamped is compared with the server's time.  Fed by `transport`, read as `Kube.wall`.
"""

import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

_TICK_S = 1.0  # a `Date` is cut to the second


class ServerTime:
    """Narrows with each answer; begins anew when the server's clock was set, or is another server's.

    clock: monotonic.   wall: our own, until the server has answered once.
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self._ahead: tuple[float, float] | None = None  # of the monotonic clock: at least, at most

    def note(self, date: str | None, asked_s: float, answered_s: float) -> None:
        """An answer's `Date`, which was written at some moment between two of our monotonic clock."""
        try:
            stamp_s = parsedate_to_datetime(date or "").timestamp()
        except ValueError:
            return  # a proxy's, or none
        low, high = stamp_s - answered_s, stamp_s + _TICK_S - asked_s
        if self._ahead is not None and low <= self._ahead[1] and self._ahead[0] <= high:
            low, high = max(low, self._ahead[0]), min(high, self._ahead[1])
        self._ahead = low, high

    def wall(self) -> float:
        """Unix time by the server."""
        return self._wall() if self._ahead is None else self._clock() + sum(self._ahead) / 2
