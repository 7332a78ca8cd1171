"""What the loop needs of a cluster, whichever it is."""

from dataclasses import dataclass
from typing import Protocol

from slackwater_operator.core import Action, CleaningJob, Node, TrafficSample, Workload


@dataclass(frozen=True, slots=True)
class Observation:
    """What a cluster looks like now.

    samples: traffic since the last observation, (service, sample) in time order.
    lead_s: (variant uid, measured reclaim + wake time).
    departed: (worker uid, its final committed_s) since the last observation.
    """

    nodes: tuple[Node, ...]
    workloads: tuple[Workload, ...]
    jobs: tuple[CleaningJob, ...]
    samples: tuple[tuple[str, TrafficSample], ...]
    lead_s: tuple[tuple[str, float], ...]
    departed: tuple[tuple[str, float], ...] = ()


class Cluster(Protocol):
    """A place where plans are carried out."""

    def observe(self, now_s: float) -> Observation:
        """Read what is known; never waits."""

    async def apply(self, action: Action, now_s: float) -> None:
        """Begin one action; its effect shows in a later observation.

        Raises TemporaryError (the same action may be planned again later) or PermanentError.
        """
