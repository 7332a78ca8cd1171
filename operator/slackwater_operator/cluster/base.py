"""What the loop needs of a cluster, whichever it is."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from slackwater_operator.core import (
    Action,
    CleaningJob,
    Flavor,
    Node,
    PermanentError,
    TemporaryError,
    TrafficSample,
    Workload,
)


@dataclass(frozen=True, slots=True)
class Observation:
    """What a cluster looks like now.

    samples: traffic since the last observation, (service, sample) in time order.
    lead_s: (variant uid, measured reclaim + wake time).
    departed: (worker uid, its final committed_s) since the last observation.
    flavors: those with limits of their own.
    """

    nodes: tuple[Node, ...]
    workloads: tuple[Workload, ...]
    jobs: tuple[CleaningJob, ...]
    samples: tuple[tuple[str, TrafficSample], ...]
    lead_s: tuple[tuple[str, float], ...]
    departed: tuple[tuple[str, float], ...] = ()
    flavors: tuple[Flavor, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """An action that could not be begun.  A TemporaryError may pass by itself; the other needs a person."""

    action: Action
    error: TemporaryError | PermanentError


class Cluster(Protocol):
    """A place where plans are carried out."""

    def observe(self, now_s: float) -> Observation:
        """Read what is known; never waits."""

    async def apply(self, actions: Sequence[Action], now_s: float) -> tuple[Refusal, ...]:
        """Begin the actions of one plan; their effects show in later observations.

        Returns those that could not be begun; they may be planned again.
        """


async def one_by_one(
    begin: Callable[[Action, float], Awaitable[None]], actions: Sequence[Action], now_s: float
) -> tuple[Refusal, ...]:
    """`Cluster.apply` for a cluster that begins one action after another and raises what it refuses."""
    refusals = []
    for action in actions:
        try:
            await begin(action, now_s)
        except (TemporaryError, PermanentError) as error:
            refusals.append(Refusal(action, error))
    return tuple(refusals)
