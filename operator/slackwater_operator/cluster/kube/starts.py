"""Starting replicas and workers on GPUs that are seen free.

Owns the choice of a node and the creation of the pod there: created with its node named is bound, so no scheduler can
give the GPU to somebody else in between.  Called by `cluster` with the STARTs of a plan.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from slackwater_operator.cluster.base import Refusal
from slackwater_operator.cluster.kube import making
from slackwater_operator.cluster.kube.books import Page
from slackwater_operator.cluster.kube.lending import lent_room
from slackwater_operator.cluster.kube.owners import Owner
from slackwater_operator.cluster.kube.state import Begun, State, together
from slackwater_operator.cluster.kube.takes import Take
from slackwater_operator.core import (
    Action,
    Kind,
    PermanentError,
    Phase,
    Reason,
    SlackwaterError,
    TemporaryError,
    Workload,
)
from slackwater_operator.kube.types import Object
from slackwater_operator.resources import names
from slackwater_operator.resources.cleaning import CleaningJob
from slackwater_operator.resources.flavor import GPUFlavor
from slackwater_operator.resources.inference import InferenceDeployment, Variant

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Running:
    """A service that can be started: its variant, what it is made from."""

    service: InferenceDeployment
    variant: Variant
    flavor: GPUFlavor
    pool: str
    revision: str
    template: Object

    def body(self, state: State, node: str, reason: str, reclaim: str = "", *, is_bound: bool = True) -> Object:
        """A replica's pod; one that is not bound waits for a GPU of that node."""
        place = making.Place(node, self.pool, self.flavor, is_bound)
        name = pod_name(self.service.metadata.name, state.suffix())
        return making.replica(
            self.service, self.template, self.revision, place, self.variant.gpus, name, reason, reclaim
        )


def pod_name(owner: str, suffix: str) -> str:
    """A pod's name; it is never used again."""
    return f"{owner[:40].rstrip('-.')}-{suffix}"


def running(state: State, uid: str, now_s: float) -> Running:
    """What a variant's replicas are made from.

    Raises TemporaryError or PermanentError, in one sentence, when none may be started now.
    """
    parts = names.split_variant_uid(uid)
    assert parts is not None, f"{uid} is no variant"
    namespace, name, pool, flavor = parts
    key = names.object_uid(namespace, name)
    service = state.catalogue.services.get(key)
    if service is None:
        raise TemporaryError(f"InferenceDeployment {key} is gone")
    variant = next((one for one in service.spec.variants if one.flavor == flavor), None)
    if variant is None or flavor not in state.catalogue.flavors:
        raise TemporaryError(f"{key} has no variant for flavor {flavor}")
    owner = state.owner(names.POD_INFERENCE, key)
    if not owner.may_start(now_s):
        raise TemporaryError(f"{key}: {owner.why_not(now_s)}", max(0.0, owner.not_before_s - now_s))
    revision = state.revisions.serving(key)
    if revision is None:
        raise TemporaryError(f"{key}: no revision of its template has passed its gate yet")
    return Running(service, variant, state.catalogue.flavors[flavor], pool, revision.name, revision.template)


@dataclass(frozen=True, slots=True)
class NewPod:
    """A pod that is about to be created, on GPUs that are promised to it.  take: what made room for it."""

    body: Object
    node: str
    gpus: int
    policy_flavor: str
    take: Take | None = None

    @property
    def uid(self) -> str:
        """Of the pod, as `Pod.uid`."""
        return names.object_uid(self.body["metadata"]["namespace"], self.body["metadata"]["name"])


class Starts:
    """The pods that the STARTs of one plan are to make.

    From the beginning of the block their GPUs are promised and they count as starting; at its end whatever was not
    made does not any more.   refusals: actions for which there is no pod to make.
    """

    def __init__(self, state: State, actions: Sequence[Action], now_s: float) -> None:
        self.refusals: list[Refusal] = []
        self._state = state
        self._actions = actions
        self._now_s = now_s
        self._new_pods: list[tuple[Action, list[NewPod]]] = []

    def __enter__(self) -> "Starts":
        try:
            self._decide()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _decide(self) -> None:
        for action in self._actions:
            try:
                new_pods = _new_pods(self._state, action, self._now_s)
            except (TemporaryError, PermanentError) as error:
                self.refusals.append(Refusal(action, error))
                continue
            self._new_pods.append((action, new_pods))
            for new_pod in new_pods:
                self._state.books.promise(new_pod.uid, new_pod.node, new_pod.gpus, self._now_s)
                self._state.begun[new_pod.uid] = _begun(action, new_pod, self._now_s)

    def __exit__(self, *_error: object) -> None:
        for _, new_pods in self._new_pods:
            for new_pod in new_pods:
                self._state.books.abandon(new_pod.uid, self._now_s)
                self._state.begun.pop(new_pod.uid, None)

    async def create(self, kind: str) -> list[Refusal]:
        """Make the pods of one kind; for each action what kept all of its pods from being made, if anything did.

        All at once: with hundreds of jobs it would take a minute to wait for each one's answers.
        """
        state, now_s = self._state, self._now_s
        chosen = [(action, new_pods) for action, new_pods in self._new_pods if _kind(action) == kind]
        results = await together([partial(_create, state, action, new_pods, now_s) for action, new_pods in chosen])
        return [
            Refusal(action, result)
            for (action, _), result in zip(chosen, results, strict=True)
            if isinstance(result, TemporaryError | PermanentError)
        ]


def _kind(action: Action) -> str:
    return names.POD_CLEANING if names.split_variant_uid(action.uid) is None else names.POD_INFERENCE


def _begun(action: Action, new_pod: NewPod, now_s: float) -> Begun:
    """Not to be evicted before it is there."""
    parts = names.split_variant_uid(action.uid)
    workload = Workload(
        uid=new_pod.uid,
        kind=Kind.CLEANING if parts is None else Kind.INFERENCE,
        owner=action.uid if parts is None else names.object_uid(parts[0], parts[1]),
        flavor=new_pod.policy_flavor,
        node=new_pod.node,
        phase=Phase.STARTING,
        started_s=now_s,
        gpus=new_pod.gpus,
    )
    return Begun(workload, new_pod.take.name if new_pod.take else "")


def _new_pods(state: State, action: Action, now_s: float) -> list[NewPod]:
    """Up to `action.count` pods and their places.  Raises if there is none."""
    if names.split_variant_uid(action.uid) is not None:
        return _replicas(state, action, now_s)
    return _workers(state, action, now_s)


def _replicas(state: State, action: Action, now_s: float) -> list[NewPod]:
    found = running(state, action.uid, now_s)
    owner = state.owner(names.POD_INFERENCE, found.service.key)
    policy_flavor = names.policy_flavor(found.pool, found.variant.flavor)
    nodes = _nodes(state, policy_flavor, found.variant.gpus, action.count, owner, now_s, lambda page: page.free)
    if not nodes:
        raise TemporaryError(f"no node of {policy_flavor} has {found.variant.gpus} GPUs free for {action.uid}")
    return [
        NewPod(
            found.body(state, node, action.reason, take.name if take else ""),
            node,
            found.variant.gpus,
            policy_flavor,
            take,
        )
        for node, take in zip(nodes, _claims(state, action.uid, nodes), strict=True)
    ]


def _claims(state: State, variant: str, nodes: list[str]) -> list[Take | None]:
    """For each new replica the take-back that made room for it there, if one did."""
    takes = [take for take in state.takes.values() if take.variant == variant]
    left = {
        (take.key, node): sum(victim.is_freed and victim.node == node for victim in take.victims.values())
        - sum(pod.place == node for pod in state.replicas(take))
        - sum(one.reclaim == take.name and one.workload.node == node for one in state.begun.values())
        for take in takes
        for node in set(nodes)
    }
    found: list[Take | None] = []
    for node in nodes:
        take = next((take for take in takes if left[take.key, node] > 0), None)
        if take is not None:
            left[take.key, node] -= 1
        found.append(take)
    return found


def _workers(state: State, action: Action, now_s: float) -> list[NewPod]:
    job = state.catalogue.jobs.get(action.uid)
    if job is None:
        raise TemporaryError(f"CleaningJob {action.uid} is gone")
    owner = state.owner(names.POD_CLEANING, action.uid)
    if not owner.may_start(now_s):
        raise TemporaryError(f"{action.uid}: {owner.why_not(now_s)}", max(0.0, owner.not_before_s - now_s))
    places = _worker_places(state, job, action, owner, now_s)
    if not places:
        wanted = ", ".join(flavors_of(job))
        raise TemporaryError(f"no node of {wanted} has {job.spec.gpus_per_worker} GPUs to lend to {action.uid}")
    return [
        NewPod(
            making.worker(job, place, pod_name(job.metadata.name, state.suffix()), action.reason),
            place.node,
            job.spec.gpus_per_worker,
            names.policy_flavor(place.pool, place.flavor.metadata.name),
        )
        for place in places
    ]


def flavors_of(job: CleaningJob) -> tuple[str, ...]:
    """The policy's flavors of a job, the first preferred: by the job's flavors, then its pools."""
    return tuple(names.policy_flavor(pool, flavor) for flavor in job.spec.flavors for pool in job.spec.pools)


def _worker_places(state: State, job: CleaningJob, action: Action, owner: Owner, now_s: float) -> list[making.Place]:
    """Where to put workers: the first flavor that has room, its fullest nodes first.

    An idle GPU is lent only after `lendAfter`, and never more than the pool lends.
    """
    gpus, places = job.spec.gpus_per_worker, list[making.Place]()
    for policy_flavor in flavors_of(job):
        pool_name, flavor_name = names.split_policy_flavor(policy_flavor)
        pool, flavor = state.catalogue.pools.get(pool_name), state.catalogue.flavors.get(flavor_name)
        if pool is None or flavor is None or len(places) == action.count:
            continue
        room = lent_room(state, pool) - gpus * sum(place.pool == pool_name for place in places)
        count = min(action.count - len(places), max(0, room) // gpus)
        lend_after_s = pool.spec.lending.lend_after_s if action.reason is Reason.IDLE else float("-inf")

        def rested(page: Page, after_s: float = lend_after_s) -> int:
            return sum(now_s - since_s >= after_s for since_s in page.idle_since_s)

        nodes = _nodes(state, policy_flavor, gpus, count, owner, now_s, rested)
        places += [making.Place(node, pool_name, flavor) for node in nodes]
    return places


def _nodes(
    state: State,
    policy_flavor: str,
    gpus: int,
    count: int,
    owner: Owner,
    now_s: float,
    room: Callable[[Page], int],
) -> list[str]:
    """A node for each of up to `count` pods: the fullest that still has room, to keep whole nodes whole."""
    pages = [
        page
        for page in state.books.pages.values()
        if page.free >= gpus
        and page.seat.policy_flavor == policy_flavor
        and page.seat.is_schedulable
        and not owner.avoids(page.seat.node, now_s)
    ]
    chosen: list[str] = []
    for page in sorted(pages, key=lambda page: (page.free, page.seat.node)):
        fits = min(count - len(chosen), min(page.free, room(page)) // gpus)
        chosen += [page.seat.node] * fits
        if len(chosen) == count:
            break
    return chosen


async def _create(state: State, action: Action, new_pods: list[NewPod], now_s: float) -> None:
    """Create the pods; books the first failure with the owner, and raises it if nothing was made."""
    parts = names.split_variant_uid(action.uid)
    owner = state.owner(_kind(action), action.uid if parts is None else names.object_uid(parts[0], parts[1]))

    async def one(new_pod: NewPod) -> None:
        try:
            pod = await state.create(new_pod.body, new_pod.node, new_pod.gpus, now_s)
        finally:
            state.begun.pop(new_pod.uid, None)
        if parts is not None:
            state.decided[pod.uid] = new_pod.take.decided_s if new_pod.take else now_s
            state.placed[pod.uid] = now_s

    results = await together([partial(one, new_pod) for new_pod in new_pods])
    errors = [result for result in results if isinstance(result, SlackwaterError)]
    if not errors:
        owner.refusal = owner.refused = ""
        return
    first = next((error for error in errors if isinstance(error, PermanentError)), errors[0])
    if isinstance(first, PermanentError):
        owner.failed(now_s, str(first))
        owner.refused = str(first)
    owner.refusal = str(first)
    if len(errors) == len(results):
        raise first
    logger.warning("started only %d of %d %s: %s", len(results) - len(errors), len(results), action.uid, first)
