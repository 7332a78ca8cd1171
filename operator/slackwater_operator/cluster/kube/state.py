"""What the parts of `KubeCluster` share: what is known, and what is under way and not seen yet.

Owns the tables and the few writes to pods, each counted against one bound on parallel writes.  Everything here is
made again from the caches after a restart; what is only in memory (clocks, back-off, smoothed durations) may be lost.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from slackwater_operator.cluster.kube.books import Books
from slackwater_operator.cluster.kube.catalogue import Catalogue
from slackwater_operator.cluster.kube.clock import Clock
from slackwater_operator.cluster.kube.index import Index
from slackwater_operator.cluster.kube.owners import Owner
from slackwater_operator.cluster.kube.pods import Pod, read_pod
from slackwater_operator.cluster.kube.ports import Caches, Progress, ReclaimView, Replica, Revisions, Signals
from slackwater_operator.cluster.kube.takes import Key, Take, Victim
from slackwater_operator.core import PermanentError, SlackwaterError, TemporaryError, Workload
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.errors import NotFound, Unreachable
from slackwater_operator.kube.types import PODS, Object, custom, micro_stamp
from slackwater_operator.resources import names
from slackwater_operator.resources.cleaning import CleaningJob
from slackwater_operator.resources.inference import InferenceDeployment

PARALLEL_WRITES = 64
RECLAIMS = custom(names.RECLAIM.plural, names.RECLAIM.kind, names.RECLAIM.namespaced)
T = TypeVar("T")


class Emit(Protocol):
    """`kube.events.Recorder.emit`."""

    def __call__(self, obj: Object, type_: str, reason: str, message: str, action: str, /) -> None: ...


def no_event(obj: Object, type_: str, reason: str, message: str, action: str, /) -> None:
    """An `Emit` that says nothing."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A delete that was sent."""

    k8s_uid: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Begun:
    """A pod that was decided on, and that no cache shows yet.   reclaim: what made room for it."""

    workload: Workload
    reclaim: str = ""


@dataclass(slots=True)
class State:
    """See the module."""

    kube: Kube
    caches: Caches
    signals: Signals
    progress: Progress
    revisions: Revisions
    clock: Clock
    catalogue: Catalogue
    index: Index
    books: Books
    poke: Callable[[], None]
    emit: Emit = no_event
    owners: dict[tuple[str, str], Owner] = field(default_factory=dict)  # (pod kind, owner's uid)
    takes: dict[Key, Take] = field(default_factory=dict)
    closed: set[Key] = field(default_factory=set)  # take-backs that are over, as long as their objects are there
    victims: dict[str, Take] = field(default_factory=dict)  # Pod.uid -> the open take-back that it is a victim of
    sent: dict[str, Sent] = field(default_factory=dict)  # Pod.uid
    marks: dict[str, float | None] = field(default_factory=dict)  # Pod.uid -> draining since, while that is written
    begun: dict[str, Begun] = field(default_factory=dict)  # Pod.uid of a pod that is being created
    decided: dict[str, float] = field(default_factory=dict)  # Pod.uid of a replica that is not ready yet
    placed: dict[str, float] = field(default_factory=dict)  # of these, those whose GPU is free, since when
    sample_s: dict[str, float] = field(default_factory=dict)  # service -> its newest sample
    reclaim_s: dict[str, float] = field(default_factory=dict)  # policy flavor -> decision to free, smoothed
    wake_s: dict[str, float] = field(default_factory=dict)  # variant -> GPU free to ready, smoothed
    finished: list[ReclaimView] = field(default_factory=list)
    departed: list[tuple[str, float]] = field(default_factory=list)
    committed: dict[str, float] = field(default_factory=dict)  # Pod.uid of a worker -> GPU-seconds that are durable
    limiter: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARALLEL_WRITES))
    suffix: Callable[[], str] = lambda: secrets.token_hex(4)

    # --- reading --------------------------------------------------------------------------------

    def owner(self, kind: str, uid: str) -> Owner:
        """What is known of a service or job, with a clean sheet if its spec was edited or it was made again."""
        found, obj = self.owners.get((kind, uid)), self._object(kind, uid)
        if obj is None:
            return found or Owner()
        if found is None or found.k8s_uid != obj.metadata.uid:
            self._forget_owner(kind, uid)
            found = self.owners[(kind, uid)] = Owner(obj.metadata.uid)
            found.edited(obj.metadata.generation)
            if isinstance(obj, CleaningJob):
                self._recall(found, obj, uid)
        found.edited(obj.metadata.generation)
        return found

    def _recall(self, owner: Owner, job: CleaningJob, uid: str) -> None:
        """What another leader wrote down: the counts of the job, and what it found out about this very spec.

        GPU-seconds of pods whose end nobody has taken in are counted with these.
        """
        status = job.status
        owner.lost, owner.unverified = status.lost, status.unverified
        if status.last_durable_time is not None:
            owner.durable_wall_s = status.last_durable_time.timestamp()
        pods = (pod for pod in self.pods_of(names.POD_CLEANING, uid) if not pod.is_booked)
        counted_s = sum(self.gpu_seconds(pod, self.clock.now_s) for pod in pods)
        owner.gpu_seconds = max(0.0, status.gpu_seconds - counted_s)
        _recall_ends(owner, job)

    def gpu_seconds(self, pod: Pod, now_s: float) -> float:
        """For how long a pod of ours has held its GPUs, times their number."""
        return max(0.0, now_s - self.clock.moment(pod.running_s or pod.created_s)) * pod.any_gpus

    def owner_of(self, pod: Pod) -> Owner:
        """What is known of the very object that a pod was made for; of a former one, nobody's sheet."""
        return Owner() if self.is_former(pod) else self.owner(pod.kind, pod.owner)

    def is_former(self, pod: Pod) -> bool:
        """Its service or job was deleted, and made again under the same name: it is none of that one's."""
        if not pod.owner_uid or pod.owner_uid in self.catalogue.uids:  # nearly all; asked of each pod in each tick
            return False
        return self._object(pod.kind, pod.owner) is not None

    def pods_of(self, kind: str, uid: str) -> list[Pod]:
        """Pods of one service or job, none of a former one of its name."""
        obj, there = self._object(kind, uid), self.index.of(kind, uid)
        if obj is None:
            return list(there)
        its = obj.metadata.uid
        return [pod for pod in there if pod.owner_uid == its or not pod.owner_uid]

    def forget_owners(self) -> None:
        """Nothing is kept of a service or job that is gone."""
        caches = {names.POD_INFERENCE: self.caches.services, names.POD_CLEANING: self.caches.jobs}
        for kind, uid in list(self.owners):
            namespace, _, name = uid.partition("/")
            if caches[kind].get(namespace, name) is None:
                self._forget_owner(kind, uid)

    def _forget_owner(self, kind: str, uid: str) -> None:
        self.owners.pop((kind, uid), None)
        if kind == names.POD_INFERENCE:
            self.sample_s.pop(uid, None)
            for variant in [variant for variant in self.wake_s if variant.startswith(f"{uid}/")]:
                del self.wake_s[variant]

    def _object(self, kind: str, uid: str) -> InferenceDeployment | CleaningJob | None:
        if kind == names.POD_INFERENCE:
            return self.catalogue.services.get(uid)
        return self.catalogue.jobs.get(uid) if kind == names.POD_CLEANING else None

    def victim(self, pod: Pod) -> Victim | None:
        """The pod as the victim of an open take-back."""
        take = self.victims.get(pod.uid)
        found = take.victims.get(pod.uid) if take else None
        return found if found is not None and found.k8s_uid == pod.k8s_uid else None

    def replicas(self, take: Take) -> list[Pod]:
        """The replicas that a take-back made or makes room for."""
        if not take.variant:
            return []
        service = names.object_uid(take.namespace, take.ref_name)
        return [pod for pod in self.pods_of(names.POD_INFERENCE, service) if pod.reclaim == take.name]

    def beginning(self, owner: str) -> list[Begun]:
        """Pods of a service or job that are being created."""
        return [one for one in self.begun.values() if one.workload.owner == owner]

    def leaving_since(self, pod: Pod) -> float | None:
        """Since when a pod is on its way out: its end was decided, sent or seen."""
        uid = pod.uid
        if uid in self.sent and self.sent[uid].k8s_uid == pod.k8s_uid:
            return self.sent[uid].at_s
        if pod.deleting_s is not None:
            return self.clock.moment(pod.deleting_s - pod.grace_s)
        if uid in self.victims and self.victim(pod) is not None:
            return self.victims[uid].decided_s
        if pod.owner_uid not in self.catalogue.uids and self.is_former(pod):  # Kubernetes deletes it, sooner or later
            obj = self._object(pod.kind, pod.owner)
            made = obj.metadata.creation_timestamp if obj is not None else None
            return self.clock.moment(made.timestamp() if made is not None else pod.created_s)
        return None

    def draining_since(self, pod: Pod) -> float | None:
        """Since when a replica takes no new request."""
        if pod.uid in self.marks:
            return self.marks[pod.uid]
        return None if pod.draining_s is None else self.clock.moment(pod.draining_s)

    def refresh(self, now_s: float) -> None:
        """Take in what changed: nodes, pools, pods."""
        changed = self.index.take_changes()
        if self.catalogue.lay_out():
            self.books.lay_out(self.catalogue.layout, now_s)
        else:
            self.books.count(changed, now_s)

    def endpoints(self, service: str) -> tuple[Replica, ...]:
        """The replicas that may get requests: ready ones that neither drain nor leave."""
        found = self.catalogue.services.get(service)
        if found is None:
            return ()
        slots = {variant.flavor: variant.slots_per_replica for variant in found.spec.variants}
        return tuple(
            Replica(pod.uid, f"http://{_host(pod.ip)}:{names.ENGINE_PORT}", slots[pod.flavor])
            for pod in sorted(self.pods_of(names.POD_INFERENCE, service), key=lambda pod: pod.uid)
            if pod.is_ready
            and pod.ip
            and not pod.is_over
            and pod.flavor in slots
            and pod.draining_s is None
            and self.leaving_since(pod) is None
        )

    # --- writing --------------------------------------------------------------------------------

    async def create(self, body: Object, node: str, gpus: int, now_s: float) -> Pod:
        """Create a pod of ours; its GPUs are promised until it is seen.

        A lost answer leaves the promise, so that the GPUs go to nobody else before somebody has looked.
        """
        metadata = body["metadata"]
        uid = names.object_uid(metadata["namespace"], metadata["name"])
        self.books.promise(uid, node, gpus, now_s)
        try:
            async with self.limiter:
                made = await self.kube.create(PODS, body, manager=names.MANAGER_CHILDREN)
        except Unreachable as error:
            if error.unknown:
                self.books.doubt(uid)
            else:
                self.books.release(uid, now_s)
            raise
        except BaseException:
            self.books.release(uid, now_s)
            raise
        self.remember_pod(made)
        self.books.count((node,), now_s)
        return self.index.pods[uid] if uid in self.index.pods else read_pod(made)

    async def delete(self, pod: Pod, grace_s: float | None, now_s: float, *, again: bool = False) -> None:
        """Ask a pod to leave, once.   again: although it was asked before (a shorter grace)."""
        sent = self.sent.get(pod.uid)
        if not again and (pod.deleting_s is not None or (sent is not None and sent.k8s_uid == pod.k8s_uid)):
            return
        if sent is None:
            self.sent[pod.uid] = Sent(pod.k8s_uid, now_s)
        try:
            async with self.limiter:
                await self.kube.delete(PODS, pod.name, pod.namespace, grace_s=grace_s, uid=pod.k8s_uid)
        except NotFound:
            return  # gone by itself
        except BaseException:
            if sent is None:
                self.sent.pop(pod.uid, None)  # with a uid a delete may be sent again and again
            raise

    async def annotate(self, pod: Pod, key: str, value: str | None) -> None:
        """Set one of our annotations on a pod, or remove it."""
        patch: dict[str, Any] = {"metadata": {"annotations": {key: value}}}
        async with self.limiter:
            answer = await self.kube.merge(PODS, pod.name, patch, pod.namespace, manager=names.MANAGER_HOLD)
        self.remember_pod(answer)

    async def nominate(self, pod: Pod, node: str) -> None:
        """Keep a node's GPU for a pod: the scheduler counts it as taken for whatever is less important."""
        patch: dict[str, Any] = {"status": {"nominatedNodeName": node}}
        async with self.limiter:
            answer = await self.kube.merge(
                PODS, pod.name, patch, pod.namespace, subresource="status", manager=names.MANAGER_RECLAIM
            )
        self.remember_pod(answer)

    async def try_out(self, body: Object) -> None:
        """Would the server take this pod?  Raises as a create does."""
        async with self.limiter:
            await self.kube.create(PODS, body, manager=names.MANAGER_CHILDREN, dry_run=True)

    def remember_pod(self, obj: Object) -> None:
        """The answer to a write, into the cache at once."""
        self.caches.pods.remember(obj)

    def now_stamp(self, now_s: float) -> str:
        """RFC 3339 of a moment."""
        return micro_stamp(self.clock.wall(now_s))

    def forget(self, pod: Pod) -> None:
        """A pod of ours is gone."""
        sent = self.sent.get(pod.uid)
        if sent is not None and sent.k8s_uid == pod.k8s_uid:
            del self.sent[pod.uid]
        self.decided.pop(pod.uid, None)
        self.placed.pop(pod.uid, None)
        self.committed.pop(pod.uid, None)


async def together(calls: Iterable[Callable[[], Awaitable[T]]]) -> Sequence[T | SlackwaterError]:
    """Run them all at once; what each returned, or its TemporaryError or PermanentError.

    Anything else that one raises ends the others and is raised.
    """

    async def caught(call: Callable[[], Awaitable[T]]) -> T | SlackwaterError:
        try:
            return await call()
        except (TemporaryError, PermanentError) as error:
            return error

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(caught(call)) for call in calls]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # one is as good as another
    return [task.result() for task in tasks]


def _host(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip


def _recall_ends(owner: Owner, job: CleaningJob) -> None:
    """What another leader found out about this very spec, from the job's conditions."""
    failed, going = job.status.condition("Failed"), job.status.condition("Progressing")
    complete = job.status.condition("Complete")
    owner.is_done = (
        complete is not None and complete.status == "True" and complete.observed_generation == job.metadata.generation
    )
    for condition, reasons in ((failed, ("BadConfiguration", "Stopped", "Held")), (going, ("Held",))):
        if (
            condition is not None
            and condition.reason in reasons
            and condition.observed_generation == job.metadata.generation
        ):
            owner.broken = condition.message or condition.reason
            owner.is_stopped = condition.reason == "Stopped"
