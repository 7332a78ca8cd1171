"""How long to wait before the next try: doubling, with jitter, up to a bound.  Owns no clock and no sleep."""

import random
from dataclasses import dataclass, field


@dataclass(slots=True)
class Backoff:
    """Grows with each `next_s`, starts again with `reset`.

    jitter_ratio: each delay is taken between this share of it and all of it, so that clients that lost the
    same server do not come back in the same moment.
    """

    first_s: float = 0.1
    max_s: float = 10.0
    jitter_ratio: float = 0.5
    rng: random.Random = field(default_factory=random.Random)
    tries: int = 0

    def next_s(self, at_least_s: float = 0.0) -> float:
        """The delay before the next try.  at_least_s: what the server asked for."""
        grown_s = min(self.first_s * 2.0 ** min(self.tries, 30), self.max_s)
        self.tries += 1
        return max(grown_s * self.rng.uniform(self.jitter_ratio, 1.0), at_least_s)

    def reset(self) -> None:
        """The last try went well."""
        self.tries = 0
