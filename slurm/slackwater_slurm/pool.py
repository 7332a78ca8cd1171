"""SlurmPool: a Slurm partition as a cluster of the shared policy.

For an operator that has workers of one job in Kubernetes and in Slurm, over one ledger.  The policy says how
many workers it wants; `fleet` still says by which arrays, and Slurm alone makes way for training: it is
shown as running or not at all, so the policy never evicts for it.  Owns no loop and no client.
"""

import asyncio
from collections.abc import Mapping, Sequence

from slackwater_operator import core as operator
from slackwater_operator.cluster.base import Observation as PoolObservation
from slackwater_operator.cluster.base import Refusal, one_by_one
from slackwater_slurm import fleet
from slackwater_slurm.cluster import SlurmCluster
from slackwater_slurm.core import SlurmRefused
from slackwater_slurm.observation import Array, Observation, Task, Use

MANY_UNITS = 1_000_000  # a ledger does not say how many claims are left, only whether there are any


class SlurmPool:
    """Satisfies `slackwater_operator.cluster.base.Cluster`.  Call `refresh` before each tick of the loop."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self._cluster = cluster
        self._seen: Observation | None = None
        self._open: dict[str, bool] = {}
        self._idle_since_s: dict[tuple[str, str], list[float]] = {}  # (node, type) -> moments, oldest first

    async def refresh(self, now_s: float, epoch_s: float, open_jobs: Mapping[str, bool]) -> None:
        """Look at the cluster, in a thread.

        now_s: on the loop's clock; epoch_s: on Slurm's.   open_jobs: job to whether its ledger has open work.
        Raises SlurmUnavailable, OutputCut.
        """
        seen = await asyncio.to_thread(self._cluster.look, epoch_s)
        self._open = dict(open_jobs)
        self._seen = seen
        before = self._idle_since_s
        self._idle_since_s = {
            (node, kind): (before.get((node, kind), []) + [now_s] * count)[:count]
            for (node, kind, use), count in seen.gpus
            if use is Use.IDLE
        }

    def observe(self, now_s: float) -> PoolObservation:
        """The newest look, in the policy's types."""
        seen = self._look()
        return PoolObservation(
            nodes=tuple(self._node(seen, node.name, kind) for node in seen.nodes for kind in node.gpus.types),
            workloads=(*_training(seen, now_s), *_cleaning(seen, now_s)),
            jobs=tuple(self._job(seen, name, is_open) for name, is_open in sorted(self._open.items())),
            samples=(),
            lead_s=(),
        )

    async def apply(self, actions: Sequence[operator.Action], now_s: float) -> tuple[Refusal, ...]:
        """START: let so many more workers of a job run.   EVICT: send one of ours back to the queue.

        Anything else is refused for good: there are no replicas here, and training is not ours.
        """
        return await one_by_one(self._begin, actions, now_s)

    async def _begin(self, action: operator.Action, now_s: float) -> None:
        del now_s  # Slurm keeps its own time
        seen = self._look()
        steps: list[fleet.Action]
        if action.verb is operator.Verb.START:
            wish = self._cluster.wish(action.uid, is_open=True)
            workers = sum(a.held_workers + a.displaced for a in seen.arrays if a.job == action.uid)
            most = min(wish.max_workers, max(len(wish.lanes), workers + action.count))
            bounded = fleet.Wish(action.uid, 0, most, wish.gpu_types, wish.array_tasks)
            steps = [step for step in fleet.plan(seen, [bounded]) if not isinstance(step, fleet.Requeue)]
        elif action.verb is operator.Verb.EVICT and any(
            task.ref == action.uid for a in seen.arrays for task in a.tasks
        ):
            steps = [fleet.Requeue((action.uid,), action.reason.value)]
        else:
            raise SlurmRefused(f"{action.verb} {action.uid}: in Slurm only workers of ours are started and sent back")
        for step in steps:
            await asyncio.to_thread(self._cluster.apply, step)

    def _look(self) -> Observation:
        assert self._seen is not None, "refresh() comes first"
        return self._seen

    def _node(self, seen: Observation, name: str, kind: str) -> operator.Node:
        uses = {use: count for (node, its_kind, use), count in seen.gpus if (node, its_kind) == (name, kind)}
        return operator.Node(
            name=_place(name, kind),
            flavor=kind,
            gpus=sum(uses.values()),
            broken_gpus=uses.get(Use.UNAVAILABLE, 0),
            schedulable=not uses.get(Use.UNAVAILABLE) and name not in dict(seen.yielding),
            idle_since_s=tuple(self._idle_since_s.get((name, kind), ())),
        )

    def _job(self, seen: Observation, name: str, is_open: bool) -> operator.CleaningJob:
        wish = self._cluster.wish(name, is_open=is_open)
        return operator.CleaningJob(
            uid=name,
            min_workers=0,  # Slurm gives no guarantee to what can be preempted
            max_workers=wish.max_workers,
            open_units=MANY_UNITS if is_open else 0,
            flavors=wish.gpu_types or seen.gpu_types,
        )


def _place(node: str, kind: str) -> str:
    """The policy's name of a node; it knows one type of GPU a node."""
    return f"{node}/{kind}"


def _training(seen: Observation, now_s: float) -> list[operator.Workload]:
    """What others hold, one workload for each node and type."""
    return [
        operator.Workload(
            uid=f"training/{node}/{kind}",
            kind=operator.Kind.TRAINING,
            owner="slurm",
            flavor=kind,
            node=_place(node, kind),
            phase=operator.Phase.RUNNING,
            started_s=now_s,
            gpus=count,
        )
        for (node, kind, use), count in seen.gpus
        if use is Use.TRAINING
    ]


def _cleaning(seen: Observation, now_s: float) -> list[operator.Workload]:
    return [
        _worker(array, task, kind, now_s - max(0.0, seen.now_s - task.start_s))
        for array in seen.arrays
        for task in array.tasks
        for kind in task.gpus.types
    ]


def _worker(array: Array, task: Task, kind: str, started_s: float) -> operator.Workload:
    return operator.Workload(
        uid=task.ref,
        kind=operator.Kind.CLEANING,
        owner=array.job,
        flavor=kind,
        node=_place(task.node, kind),
        phase=operator.Phase.RUNNING if task.is_running else operator.Phase.LEAVING,
        started_s=started_s,
        gpus=task.gpus.get(kind),
        preemptible=True,
    )
