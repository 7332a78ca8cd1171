"""Moments of the API server on the loop's clock, and back.

Owns the difference between wall time, in which Kubernetes writes, and the monotonic clock that fills `now_s`.
"""

from collections.abc import Callable

STEP_S = 0.5  # a wall clock that moved by more was set; less is the jitter between two readings


class Clock:
    """`sync` it with every observation; the difference changes only when the wall clock was set."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._ahead_s: float | None = None
        self._now_s = 0.0

    def sync(self, now_s: float) -> bool:
        """Take a reading; True if moments that were converted before are no longer right."""
        self._now_s = now_s
        ahead_s = self._wall() - now_s
        if self._ahead_s is not None and abs(ahead_s - self._ahead_s) < STEP_S:
            return False
        is_first = self._ahead_s is None
        self._ahead_s = ahead_s
        return not is_first

    @property
    def now_s(self) -> float:
        """The moment of the newest reading."""
        return self._now_s

    def moment(self, wall_s: float) -> float:
        """A wall time on the loop's clock.

        Everything that is stamped has happened: what seems to lie ahead was stamped by a clock that is ahead of ours.
        """
        assert self._ahead_s is not None, "sync first"
        return min(wall_s - self._ahead_s, self._now_s)

    def wall(self, moment_s: float) -> float:
        """A moment of the loop's clock as wall time."""
        assert self._ahead_s is not None, "sync first"
        return moment_s + self._ahead_s
