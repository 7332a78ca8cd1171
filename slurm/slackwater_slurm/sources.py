"""Where the controller's jobs come from, and who is told how they go.

Owns the protocol and the plain case, the jobs of a configuration file.  Jobs of a Kubernetes cluster are
`placed`.  Called by `service`, at every tick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from slackwater_slurm.config import CleaningJob


@dataclass(frozen=True, slots=True)
class JobState:
    """One job on this cluster.  running: workers that hold GPUs; waiting: tasks that would start on an idle one."""

    running: int = 0
    waiting: int = 0
    failure: str = ""


class Source(Protocol):
    """Neither call waits for anybody."""

    def jobs(self) -> tuple[CleaningJob, ...] | None:
        """The jobs that are wanted now; None = not known yet, nothing is changed."""

    def report(self, cluster: str, states: Mapping[str, JobState]) -> None:
        """How they go, by name, after each tick."""

    @property
    def is_endless(self) -> bool:
        """Whether jobs may come when all are done."""


@dataclass(frozen=True, slots=True)
class Listed:
    """The jobs of a file; nobody is told."""

    listed: tuple[CleaningJob, ...]
    is_endless: bool = False

    def jobs(self) -> tuple[CleaningJob, ...] | None:
        return self.listed

    def report(self, cluster: str, states: Mapping[str, JobState]) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Several:
    """Jobs from several places.  Of two of one name the first is taken."""

    sources: tuple[Source, ...]

    @property
    def is_endless(self) -> bool:
        return any(source.is_endless for source in self.sources)

    def jobs(self) -> tuple[CleaningJob, ...] | None:
        found: dict[str, CleaningJob] = {}
        for source in self.sources:
            jobs = source.jobs()
            if jobs is None:
                return None
            found = {job.name: job for job in jobs} | found
        return tuple(found.values())

    def report(self, cluster: str, states: Mapping[str, JobState]) -> None:
        for source in self.sources:
            source.report(cluster, states)
