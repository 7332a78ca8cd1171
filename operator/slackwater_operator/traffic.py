"""What a service's traffic samples say about the demand for decode slots.

Owns the windows over the gateway's samples: their means, their slope and the rise to be ready for.
Owns no clock and takes no decision: the loop appends samples, asks for a `Load` each tick and hands it
to the policy.  Demand is requests in flight plus queued, so it is not bounded by the slots there are.
"""

import math
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from slackwater_operator.core import Load, TrafficSample

UNSEEN = -1  # marks, in the row of buckets, that nothing is known of the time before


@dataclass(frozen=True, slots=True)
class Window:
    """How far back each part of a `Load` looks.  Raises ValueError on a window that cannot work."""

    panic_s: float = 6.0
    """Short mean and slope.  A tenth of the stable window; fewer samples do not tell a slope from noise."""

    stable_s: float = 60.0
    """Long mean.  Bridges the pauses between bursts, so that the need does not follow every dip."""

    down_s: float = 120.0
    """Maximum that survivors of a shrink must carry.  Longer than one speech request and its successor."""

    stale_after_s: float = 5.0
    """Some samples of one a second may be lost; five in a row mean that nobody is counting."""

    day_s: float = 86_400.0
    """Rises of the last day size the headroom: the daily peak is in it, last week's incident is not."""

    rise_quantile: float = 0.99
    """One rise in a hundred may be larger than the headroom; it waits for a reclaim."""

    bucket_s: float = 1.0
    """Samples are kept as the maximum of each bucket.  One second is how often a gateway speaks at least."""

    def __post_init__(self) -> None:
        for name in ("panic_s", "stable_s", "down_s", "stale_after_s", "day_s", "bucket_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a positive number of seconds, got {value}")
        if not 0 < self.rise_quantile <= 1:
            raise ValueError(f"rise_quantile must be above 0 and at most 1, got {self.rise_quantile}")

    def buckets(self, seconds: float) -> int:
        """How many buckets a time takes, at least one."""
        return max(1, math.ceil(seconds / self.bucket_s - 1e-9))


class Ring:
    """A ring buffer of whole numbers: the newest, at most `most` of them.

    In two bytes each, or in four once one of them needs it: each service has two for each second of a day.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers = array("h")
        self._first = 0  # where the oldest is, once all places are taken

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[int]:
        return iter(self.last(len(self)))

    @property
    def size_bytes(self) -> int:
        """What the numbers take."""
        return len(self._numbers) * self._numbers.itemsize

    def append(self, number: int) -> int | None:
        """Add the next one; returns the oldest if that had to go."""
        try:
            return self._append(number)
        except OverflowError:
            self._numbers = array("i", self._numbers)
            return self._append(number)

    def last(self, count: int) -> list[int]:
        """The newest `count` of them, or all there are, oldest first."""
        count = min(count, len(self._numbers))
        begin = self._first - count
        if begin >= 0:
            return self._numbers[begin : self._first].tolist()
        return self._numbers[len(self._numbers) + begin :].tolist() + self._numbers[: self._first].tolist()

    def _append(self, number: int) -> int | None:
        if len(self._numbers) < self._most:
            self._numbers.append(number)
            return None
        gone = self._numbers[self._first]
        self._numbers[self._first] = number
        self._first = (self._first + 1) % self._most
        return gone


class History:
    """The bounded memory of one service's samples, newest last.

    Memory and work are bounded by the windows: two small integers for each bucket of the last day, and
    a few hundred steps for each `load`.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        day = window.buckets(window.day_s)
        self._day = Ring(day)  # demand of each closed bucket
        self._slopes: deque[float] = deque(maxlen=window.buckets(window.down_s))  # at the end of each
        self._arrivals: deque[tuple[float, int]] = deque()  # (t_s, arrivals since the first sample)
        self._rises = Rises(1, day)
        self._newest: TrafficSample | None = None
        self._bucket = 0  # number of the open bucket
        self._peak = 0  # its highest demand so far
        self._covered = 0  # closed buckets since the samples last began or broke off

    def append(self, sample: TrafficSample) -> bool:
        """Take in the next sample; False if it is not later than the newest and so was ignored.

        A sample that comes late says nothing that the newest does not say better.  Buckets without a
        sample hold the last demand, unless the samples broke off for longer than `stale_after_s`: what
        was asked for in that time is unknown, so every window begins anew.
        """
        last = self._newest
        if last is not None and sample.t_s <= last.t_s:
            return False
        bucket = math.floor(sample.t_s / self._window.bucket_s)
        demand = sample.in_flight + sample.queued
        if last is None or sample.t_s - last.t_s > self._window.stale_after_s:
            self._begin(sample, bucket)
        else:
            self._roll(bucket, held=last.in_flight + last.queued)
            self._count(sample, last)
        self._peak = max(self._peak, demand)
        self._newest = sample
        return True

    def load(self, now_s: float, lead_s: float) -> Load:
        """The demand as it is known at `now_s`, for a cluster that needs `lead_s` to bring a replica.

        Stale, with what was last known, when the newest sample is older than `stale_after_s`; age
        infinite when there is none.  Of a rising slope only what `rise_slots` does not cover is given:
        both say what may come within the lead time, so their sum counts the larger of the two, and
        noise that the day is used to does not look like a trend.  `window_max_slots` is the most that
        growing would have asked for at any moment of the scale-down window, slope included, and
        infinite until the samples cover that window: a shrink needs to have seen all of it.  Raises
        ValueError on a negative `lead_s`.
        """
        if lead_s < 0:
            raise ValueError(f"lead_s must not be negative, got {lead_s}")
        self._rises.look_ahead(self._window.buckets(lead_s), self._day)
        newest = self._newest
        if newest is None:
            return Load(0.0, 0.0, 0.0, 0.0, math.inf, 0.0, 0.0, math.inf, stale=True)
        panic = self._last(self._window.panic_s)
        stable = self._last(self._window.stable_s)
        age_s = max(0.0, now_s - newest.t_s)
        rise = float(self._rises.quantile(self._window.rise_quantile))
        usual = rise / max(lead_s, self._window.bucket_s)  # slots a second
        return Load(
            now_slots=float(newest.in_flight + newest.queued),
            panic_slots=sum(panic) / len(panic),
            stable_slots=sum(stable) / len(stable),
            slope_slots_per_s=beyond(slope(panic) / self._window.bucket_s, usual),
            window_max_slots=self._window_max(lead_s, usual),
            rise_slots=rise,
            arrival_rps=self._arrival_rps(),
            age_s=age_s,
            stale=age_s > self._window.stale_after_s,
            first_audio_p95_s=newest.first_audio_p95_s,
        )

    def _begin(self, sample: TrafficSample, bucket: int) -> None:
        if self._newest is not None:
            self._day.append(UNSEEN)
        self._rises.break_off()
        self._slopes.clear()
        self._arrivals.clear()
        self._arrivals.append((sample.t_s, 0))
        self._bucket, self._peak, self._covered = bucket, 0, 0

    def _roll(self, bucket: int, held: int) -> None:
        """Close the open bucket and those up to `bucket`, in which `held` was the demand."""
        while self._bucket < bucket:
            self._slopes.append(slope(self._last(self._window.panic_s)) / self._window.bucket_s)
            self._rises.add(self._peak)
            self._day.append(self._peak)
            self._covered += 1
            self._bucket += 1
            self._peak = held if self._bucket < bucket else 0

    def _count(self, sample: TrafficSample, last: TrafficSample) -> None:
        came = sample.arrivals_total - last.arrivals_total
        if came < 0:  # the gateway restarted and counts from zero
            came = sample.arrivals_total
        self._arrivals.append((sample.t_s, self._arrivals[-1][1] + came))
        while len(self._arrivals) > 2 and self._arrivals[1][0] <= sample.t_s - self._window.panic_s:
            self._arrivals.popleft()

    def _arrival_rps(self) -> float:
        (first_s, first), (last_s, last) = self._arrivals[0], self._arrivals[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0

    def _last(self, seconds: float) -> list[int]:
        """Demand of the buckets of the last `seconds`, the open one included, oldest first."""
        closed = min(self._window.buckets(seconds) - 1, self._covered)
        return [*self._day.last(closed), self._peak]

    def _window_max(self, lead_s: float, usual: float) -> float:
        needed = self._window.buckets(self._window.down_s)
        if self._covered < needed:
            return math.inf
        closed = zip(self._day.last(needed), self._slopes, strict=True)
        return max(self._peak, max(demand + max(0.0, steep - usual) * lead_s for demand, steep in closed))


class Rises:
    """How far demand rose within one lead time, for each bucket of the last day, as a histogram."""

    def __init__(self, lead: int, day: int) -> None:
        self._lead = lead
        self._day = day
        self._begin()

    def look_ahead(self, lead: int, demands: Ring) -> None:
        """Look `lead` buckets ahead from now on; counts all of `demands` again if that is a change.

        A measured lead wobbles and counting a day takes long, so a lead that is shorter by one bucket
        or by less than a fifth is no change: the rises are then a little too high.
        """
        if min(self._lead - 1, 0.8 * self._lead) <= lead <= self._lead:
            return
        self._lead = lead
        self._begin()
        for demand in demands:
            if demand == UNSEEN:
                self.break_off()
            else:
                self.add(demand)

    def add(self, demand: int) -> None:
        """The demand of the next bucket."""
        self._ahead.append(demand)
        if len(self._ahead) <= self._lead:
            return
        base = self._ahead.popleft()
        rise = max(0, max(self._ahead) - base)
        gone = self._kept.append(rise)
        if gone is not None:
            self._counts[gone] -= 1
        self._counts.extend([0] * (rise + 1 - len(self._counts)))
        self._counts[rise] += 1

    def break_off(self) -> None:
        """What comes next does not follow on what came before."""
        self._ahead.clear()

    def quantile(self, q: float) -> int:
        """The smallest rise that a share `q` of all rises does not exceed; 0 when none was seen."""
        wanted = q * len(self._kept)
        seen = 0
        for rise, count in enumerate(self._counts):
            seen += count
            if seen >= wanted - 1e-9:
                return rise
        return 0

    def _begin(self) -> None:
        self._ahead: deque[int] = deque()
        self._kept = Ring(self._day)
        self._counts: list[int] = []


def slope(values: list[int]) -> float:
    """Least-squares slope of equally spaced values, a step, drawn towards 0 by two standard errors.

    Noise around a level has no direction, and a step that is over has none either: its height is
    already in the newest value.  What is left is a trend.  0 for fewer than four values.
    """
    count = len(values)
    if count < 4:
        return 0.0
    middle = (count - 1) / 2
    mean = sum(values) / count
    spread = count * (count * count - 1) / 12  # sum of squared distances from the middle
    found = sum((index - middle) * (value - mean) for index, value in enumerate(values)) / spread
    error = sum((value - mean - found * (index - middle)) ** 2 for index, value in enumerate(values))
    doubt = 2 * math.sqrt(max(0.0, error) / (count - 2) / spread)
    return math.copysign(max(0.0, abs(found) - doubt), found)


def beyond(slope_slots_per_s: float, usual: float) -> float:
    """The part of a rising slope above the usual one; a falling slope as it is."""
    return slope_slots_per_s if slope_slots_per_s <= 0 else max(0.0, slope_slots_per_s - usual)
