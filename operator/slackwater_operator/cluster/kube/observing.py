"""What the policy sees: nodes, workloads and jobs, from what is known now.

Owns the translation and the values that are kept from one observation to the next, so that one costs what changed.
Never waits and never writes.
"""

import math
from dataclasses import dataclass, field

from slackwater_operator.cluster.kube.books import Page
from slackwater_operator.cluster.kube.lending import is_limited, lent_room
from slackwater_operator.cluster.kube.pods import Pod
from slackwater_operator.cluster.kube.starts import flavors_of
from slackwater_operator.cluster.kube.state import State
from slackwater_operator.core import CleaningJob, Flavor, Kind, Limits, Node, Phase, Workload
from slackwater_operator.resources import cleaning, names
from slackwater_operator.resources.inference import InferenceDeployment

NOMINATION_S = 1.5  # a training pod that does not preempt and waits for so long is helped by us
DEFAULT_LEAD_S = 5.0
DEFAULT_START_S = 2.0
MOVED_S = 0.5  # a durable moment that moved by less is the same one: keepers tell ages, not moments


@dataclass(slots=True)
class Entry:
    """One of our pods, with what stays the same while its object does, and its newest workload."""

    pod: Pod
    is_cleaning: bool
    flavor: str
    gpus: int
    started_s: float
    running_s: float | None
    workload: Workload | None = None


@dataclass(slots=True)
class Observer:
    """Makes the parts of an `Observation`; remembers values of the observation before."""

    state: State
    _entries: dict[str, Entry] = field(default_factory=dict)  # by Pod.uid and in its order, none of a pod that is over
    _flavors: dict[str, tuple[cleaning.CleaningJob, tuple[str, ...]]] = field(default_factory=dict)  # by job
    _variants: dict[str, tuple[InferenceDeployment, tuple[str, ...]]] = field(default_factory=dict)  # by service
    _nodes: dict[str, tuple[tuple[object, ...], Node]] = field(default_factory=dict)

    def forget(self) -> None:
        """The wall clock was set: moments that were converted before are wrong."""
        for entry in self._entries.values():
            self._entries[entry.pod.uid] = self._entry(entry.pod)

    # --- nodes ------------------------------------------------------------------------------------

    def nodes(self) -> tuple[Node, ...]:
        """Every seated node; GPUs that the pool does not lend have not been idle at all for the policy."""
        kept = self._unlendable()
        found = []
        for name, page in self.state.books.pages.items():
            key = (page.seat, tuple(page.idle_since_s), kept.get(name, 0))
            known = self._nodes.get(name)
            if known is None or known[0] != key:
                known = self._nodes[name] = (key, _node(page, kept.get(name, 0)))
            found.append(known[1])
        if len(self._nodes) > len(found):
            self._nodes = {name: self._nodes[name] for name in self.state.books.pages}
        return tuple(found)

    def _unlendable(self) -> dict[str, int]:
        """By node, idle GPUs that may not be lent: those of a pool beyond what it lends, the newest idle first."""
        kept: dict[str, int] = {}
        for name, pool in self.state.catalogue.pools.items():
            if not is_limited(pool):
                continue
            idle = sorted(
                (since_s, node)
                for node, page in self.state.books.pages.items()
                if page.seat.pool == name
                for since_s in page.idle_since_s
            )
            for _, node in idle[lent_room(self.state, pool) :]:
                kept[node] = kept.get(node, 0) + 1
        return kept

    def flavors(self) -> tuple[Flavor, ...]:
        """Each pool's flavors, with the pool's limits."""
        return tuple(
            Flavor(
                names.policy_flavor(pool.metadata.name, listed.name),
                Limits(
                    lend_after_s=pool.spec.lending.lend_after_s,
                    retarget_after_s=pool.spec.reclaim.retarget_after_s,
                    max_parallel=pool.spec.reclaim.max_parallel,
                ),
            )
            for pool in sorted(self.state.catalogue.pools.values(), key=lambda pool: pool.key)
            for listed in pool.spec.flavors
        )

    # --- workloads --------------------------------------------------------------------------------

    def workloads(self, now_s: float) -> tuple[Workload, ...]:
        """Our replicas and workers, and the training pods of others."""
        self._take_in()
        serving = {uid: self.state.revisions.serving(uid) for uid in self.state.catalogue.services}
        found = []
        for entry in self._entries.values():
            revision = None if entry.is_cleaning else serving.get(entry.pod.owner)
            workload = self._workload(entry, None if revision is None else revision.name)
            if workload is not None:
                found.append(workload)
        ours = self.state.index.ours
        more = [begun.workload for uid, begun in self.state.begun.items() if uid not in ours] + self._training(now_s)
        return tuple(sorted(found + more, key=_uid) if more else found)

    def _take_in(self) -> None:
        """Entries of the pods that changed."""
        entries, index = self._entries, self.state.index
        is_new = False
        for uid in index.changed_ours:
            pod = index.ours.get(uid)
            if pod is None or pod.is_over:
                entries.pop(uid, None)
            else:
                is_new |= uid not in entries
                entries[uid] = self._entry(pod)
        index.changed_ours.clear()
        if is_new:
            self._entries = dict(sorted(entries.items()))

    def _entry(self, pod: Pod) -> Entry:
        state = self.state
        return Entry(
            pod=pod,
            is_cleaning=pod.kind == names.POD_CLEANING,
            flavor=pod.policy_flavor,
            gpus=pod.gpus(state.catalogue.resource_of(pod.flavor)) or pod.any_gpus,
            started_s=state.clock.moment(pod.created_s),
            running_s=None if pod.running_s is None else state.clock.moment(pod.running_s),
        )

    def _workload(self, entry: Entry, serving: str | None) -> Workload | None:
        """One of our pods; None for a reservation whose GPU is not free yet."""
        state, pod, before = self.state, entry.pod, entry.workload
        if not pod.node:
            page = state.books.pages.get(pod.place)
            if page is None or pod.uid not in page.visible:
                return None
        since_s = state.leaving_since(pod)
        draining_s = None if entry.is_cleaning else state.draining_since(pod)
        phase = Phase.RUNNING if pod.is_ready else Phase.STARTING
        if since_s is not None:
            phase = Phase.LEAVING
        elif draining_s is not None:
            # One of an older revision is never asked back: for the policy it leaves.
            is_old = serving is not None and pod.revision != serving
            phase, since_s = (Phase.LEAVING if is_old else Phase.DRAINING), draining_s
        running_slots, durable_s = 0, None
        if not entry.is_cleaning:
            running_slots = state.signals.in_flight(pod.owner, pod.uid) or 0
        elif phase is not Phase.STARTING:
            seen = state.progress.worker(pod.owner, pod.name)
            durable_s = None if seen is None else seen.durable_s
        if (
            before is not None
            and before.phase is phase
            and before.leaving_since_s == since_s
            and before.running_slots == running_slots
            and (
                before.durable_s == durable_s
                or (before.durable_s is not None and durable_s is not None and durable_s - before.durable_s < MOVED_S)
            )
        ):
            return before
        committed_s = state.committed.get(pod.uid, 0.0)
        if durable_s is not None and entry.running_s is not None:
            committed_s = max(committed_s, (durable_s - entry.running_s) * entry.gpus)
            state.committed[pod.uid] = committed_s
        entry.workload = Workload(
            uid=pod.uid,
            kind=Kind.CLEANING if entry.is_cleaning else Kind.INFERENCE,
            owner=pod.owner,
            flavor=entry.flavor,
            node=pod.place,
            phase=phase,
            started_s=entry.started_s,
            gpus=entry.gpus,
            preemptible=entry.is_cleaning,
            leaving_since_s=since_s,
            durable_s=durable_s,
            restart_cost_s=self._start_s(pod.owner) * entry.gpus if entry.is_cleaning else 0.0,
            running_slots=running_slots,
            committed_s=committed_s,
        )
        return entry.workload

    def _start_s(self, job: str) -> float:
        found = self.state.owners.get((names.POD_CLEANING, job))
        return DEFAULT_START_S if found is None or found.start_s is None else found.start_s

    # --- training ---------------------------------------------------------------------------------

    def _training(self, now_s: float) -> list[Workload]:
        """Training pods on our nodes, and those that wait and could start on one."""
        found = []
        for pod in self.state.index.foreign.values():
            page = self.state.books.pages.get(pod.place)
            if page is not None and _is_training(pod) and (gpus := pod.gpus(page.seat.resource)):
                found.append(self._trainer(pod, page, gpus))
        for pod in self.state.index.foreign_waiting.values():
            if _is_training(pod) and not pod.nominated and pod.deleting_s is None and not pod.is_gated:
                place = self._could_start(pod, now_s)
                if place is not None:
                    found.append(self._waiting(pod, place))
        return found

    def _trainer(self, pod: Pod, page: Page, gpus: int) -> Workload:
        """On a node, or promised its GPUs there by the scheduler."""
        if not pod.node and pod.uid not in page.visible:
            return self._waiting(pod, page)
        leaving_s = self.state.leaving_since(pod)
        phase = Phase.LEAVING if leaving_s is not None else Phase.RUNNING if pod.is_ready else Phase.STARTING
        return Workload(
            uid=pod.uid,
            kind=Kind.TRAINING,
            owner=pod.name,
            flavor=page.seat.policy_flavor,
            node=page.seat.node,
            phase=phase,
            started_s=self.state.clock.moment(pod.created_s),
            gpus=gpus,
            leaving_since_s=leaving_s,
        )

    def _waiting(self, pod: Pod, page: Page) -> Workload:
        return Workload(
            uid=pod.uid,
            kind=Kind.TRAINING,
            owner=pod.name,
            flavor=page.seat.policy_flavor,
            node="",
            phase=Phase.PENDING,
            started_s=self.state.clock.moment(pod.created_s),
            gpus=pod.gpus(page.seat.resource),
        )

    def _could_start(self, pod: Pod, now_s: float) -> Page | None:
        """A node that it fits, one with free GPUs if there is.

        None too if the scheduler can help it by itself: for whatever preempts, it preempts cleaning at once.
        """
        if pod.preempts or now_s - self.state.clock.moment(pod.created_s) < NOMINATION_S:
            return None
        fitting = [
            page
            for page in self.state.books.pages.values()
            if 0 < pod.gpus(page.seat.resource) <= page.seat.gpus - page.seat.broken
            and page.seat.is_schedulable
            and page.seat.suits(pod.wishes)
        ]
        return min(fitting, key=lambda page: (page.free < pod.gpus(page.seat.resource), page.seat.node), default=None)

    # --- jobs -------------------------------------------------------------------------------------

    def jobs(self, now_s: float) -> tuple[CleaningJob, ...]:
        """Each cleaning job's appetite, within its queue."""
        allowed, weights = self._queue_room(), self._weights()
        jobs = self.state.catalogue.jobs
        self._flavors = {uid: self._flavors_of(uid, job) for uid, job in jobs.items()}
        return tuple(self._job(uid, job, allowed, weights, now_s) for uid, job in sorted(jobs.items()))

    def _flavors_of(self, uid: str, job: cleaning.CleaningJob) -> tuple[cleaning.CleaningJob, tuple[str, ...]]:
        known = self._flavors.get(uid)
        return known if known is not None and known[0] is job else (job, flavors_of(job))

    def _job(
        self,
        uid: str,
        job: cleaning.CleaningJob,
        allowed: dict[str, int],
        weights: dict[tuple[str, str], float],
        now_s: float,
    ) -> CleaningJob:
        spec, owner = job.spec, self.state.owner(names.POD_CLEANING, uid)
        progress = self.state.progress.job(uid)
        workers = [pod for pod in self.state.pods_of(names.POD_CLEANING, uid) if pod.uid not in self.state.index.over]
        shards = None if progress is None else progress.shards_open
        if shards == 0 and not owner.is_done:
            owner.is_done = True
        is_off = spec.suspend or "Kubernetes" not in spec.placement or owner.is_stopped
        open_units = spec.max_workers
        if shards is not None:
            claimed = sum(
                (seen := self.state.progress.worker(uid, pod.name)) is not None and seen.shard is not None
                for pod in workers
            )
            open_units = max(0, shards - claimed)
        if not workers:  # whatever dead workers still hold on lease, one worker will wait for
            open_units = max(1, open_units)
        if is_off or not owner.may_start(now_s):
            open_units = 0
        here = max(0, spec.max_workers - (job.status.slurm.running if job.status.slurm is not None else 0))
        most = 0 if is_off else min(here, allowed.get(uid, here))
        return CleaningJob(
            uid=uid,
            min_workers=min(spec.min_workers, most) if open_units or workers else 0,
            max_workers=most,
            open_units=open_units,
            flavors=self._flavors[uid][1],
            weight=next((weights[key] for name in spec.pools if (key := (name, spec.queue or "")) in weights), 1.0),
            gpus=spec.gpus_per_worker,
            start_s=owner.start_s or DEFAULT_START_S,
            checkpoint_s=spec.checkpoint.flush_timeout_s,
        )

    def _weights(self) -> dict[tuple[str, str], float]:
        """By pool and queue."""
        pools = self.state.catalogue.pools
        return {(name, queue.name): float(queue.weight) for name, pool in pools.items() for queue in pool.spec.queues}

    def _queue_room(self) -> dict[str, int]:
        """By job, the most workers that its queue's `maxGPUs` allow: what it holds, and what is left, by name."""
        allowed: dict[str, int] = {}
        for pool in self.state.catalogue.pools.values():
            for queue in pool.spec.queues:
                if queue.max_gpus is None:
                    continue
                members = [
                    (uid, job)
                    for uid, job in sorted(self.state.catalogue.jobs.items())
                    if job.spec.queue == queue.name and pool.metadata.name in job.spec.pools
                ]
                held = {uid: self._held(uid, job) for uid, job in members}
                left = queue.max_gpus - sum(held.values())
                for uid, job in members if left >= 0 else reversed(members):
                    gpus = job.spec.gpus_per_worker
                    more = left // gpus if left >= 0 else -min(held[uid] // gpus, -(left // gpus))
                    left -= more * gpus
                    allowed[uid] = min(allowed.get(uid, job.spec.max_workers), held[uid] // gpus + more)
        return allowed

    def _held(self, uid: str, job: cleaning.CleaningJob) -> int:
        pods = self.state.pods_of(names.POD_CLEANING, uid)
        held = sum(not pod.is_over and self.state.leaving_since(pod) is None for pod in pods)
        return job.spec.gpus_per_worker * (held + len(self.state.beginning(uid)))

    # --- leads ------------------------------------------------------------------------------------

    def leads(self) -> tuple[tuple[str, float], ...]:
        """Each variant's measured time from a decision to a replica that serves."""
        services = self.state.catalogue.services
        self._variants = {uid: self._variants_of(uid, service) for uid, service in services.items()}
        return tuple(
            (variant, lead_s(self.state, variant) or DEFAULT_LEAD_S)
            for _, variants in self._variants.values()
            for variant in variants
        )

    def _variants_of(self, uid: str, service: InferenceDeployment) -> tuple[InferenceDeployment, tuple[str, ...]]:
        known = self._variants.get(uid)
        if known is not None and known[0] is service:
            return known
        metadata, spec = service.metadata, service.spec
        return service, tuple(
            names.variant_uid(metadata.namespace, metadata.name, pool, variant.flavor)
            for pool in spec.pools
            for variant in spec.variants
        )


def lead_s(state: State, variant: str) -> float | None:
    """Decision to serving, as measured; None before the first replica was ready."""
    wake_s = state.wake_s.get(variant)
    parts = names.split_variant_uid(variant)
    if wake_s is None or parts is None:
        return None
    return wake_s + state.reclaim_s.get(names.policy_flavor(parts[2], parts[3]), 0.0)


def _uid(workload: Workload) -> str:
    return workload.uid


def _is_training(pod: Pod) -> bool:
    return not pod.kind and pod.priority_class == names.PRIORITY_TRAINING.name and not pod.is_over


def _node(page: Page, unlendable: int) -> Node:
    seat, idle = page.seat, page.idle_since_s
    lendable = idle[: len(idle) - unlendable]
    return Node(
        name=seat.node,
        flavor=seat.policy_flavor,
        gpus=seat.gpus,
        broken_gpus=seat.broken,
        schedulable=seat.is_schedulable,
        idle_since_s=(*lendable, *[math.inf] * unlendable),
    )
