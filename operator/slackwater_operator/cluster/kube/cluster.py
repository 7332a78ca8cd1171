"""`KubeCluster`: a Kubernetes cluster as the loop sees it.

Owns the order of the parts; each part's own module owns what it does.  Observes from caches alone and never waits for
it; `apply` waits for its writes, never for pods.  Keeps nothing that matters: a new one, on the same caches, goes on
where the last one was stopped, whichever write that was.
"""

import time
from collections.abc import Awaitable, Callable, Sequence

from slackwater_operator.cluster.base import Observation, Refusal
from slackwater_operator.cluster.kube import drains, views
from slackwater_operator.cluster.kube.books import Books
from slackwater_operator.cluster.kube.catalogue import Catalogue
from slackwater_operator.cluster.kube.clock import Clock
from slackwater_operator.cluster.kube.endings import Endings
from slackwater_operator.cluster.kube.evictions import adopt, decide, evict
from slackwater_operator.cluster.kube.index import Index
from slackwater_operator.cluster.kube.observing import Observer
from slackwater_operator.cluster.kube.owners import smoothed
from slackwater_operator.cluster.kube.ports import (
    Caches,
    JobView,
    PoolView,
    Progress,
    ReclaimView,
    Replica,
    Revisions,
    ServiceView,
    Signals,
)
from slackwater_operator.cluster.kube.records import Records
from slackwater_operator.cluster.kube.starts import Starts
from slackwater_operator.cluster.kube.state import Emit, State, no_event, together
from slackwater_operator.cluster.kube.takes import OVER, resumed
from slackwater_operator.cluster.kube.tending import Tending
from slackwater_operator.core import Action, PermanentError, TemporaryError, Verb
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.types import Object
from slackwater_operator.resources import names


class KubeCluster:
    """Implements `base.Cluster` and `ports.Views`.  All caches are synced before the first `observe`.

    poke: called when something happened that the next plan should know soon.
    """

    def __init__(
        self,
        kube: Kube,
        caches: Caches,
        signals: Signals,
        progress: Progress,
        revisions: Revisions,
        *,
        wall: Callable[[], float] = time.time,
        poke: Callable[[], None] = lambda: None,
        emit: Emit = no_event,
        suffix: Callable[[], str] | None = None,
    ) -> None:
        index = Index(list(caches.pods.values()))
        self._end_hearing = caches.pods.on_change(self._hear_pod)
        self._state = State(
            kube=kube,
            caches=caches,
            signals=signals,
            progress=progress,
            revisions=revisions,
            clock=Clock(wall),
            catalogue=Catalogue(caches, poke),
            index=index,
            books=Books(index),
            poke=poke,
            emit=emit,
        )
        if suffix is not None:
            self._state.suffix = suffix
        self._observer = Observer(self._state)
        self._endings = Endings(self._state)
        self._tending = Tending(self._state, self._endings, Records(self._state))
        self._now_s = 0.0

    async def close(self) -> None:
        """Hear no more of the caches, and end what goes on in the background."""
        self._end_hearing()
        self._state.catalogue.close()
        await self._endings.close()

    # --- base.Cluster -------------------------------------------------------------------------

    def observe(self, now_s: float) -> Observation:
        state = self._look(now_s)
        samples = state.signals.take_samples()
        for service, sample in samples:
            state.sample_s[service] = sample.t_s
        for service in state.catalogue.services:
            drains.tell(state, service)
        jobs = self._observer.jobs(now_s)
        departed, state.departed = tuple(state.departed), []
        return Observation(
            nodes=self._observer.nodes(),
            workloads=self._observer.workloads(now_s),
            jobs=jobs,
            samples=samples,
            lead_s=self._observer.leads(),
            departed=departed,
            flavors=self._observer.flavors(),
        )

    async def apply(self, actions: Sequence[Action], now_s: float) -> tuple[Refusal, ...]:
        """Replicas that are called back and marked first, then replicas on free GPUs, then evictions, then workers.

        Replicas before evictions, so that one which waits for a victim's GPU finds no free one beside it.  All is
        decided before the first write, so what is observed while they go on shows all of it.
        """
        state = self._look(now_s)
        by_verb: dict[Verb, list[Action]] = {verb: [] for verb in Verb}
        for action in actions:
            by_verb[action.verb].append(action)
        refusals: list[Refusal] = []
        with Starts(state, by_verb[Verb.START], now_s) as starts:
            openings, refused = decide(state, by_verb[Verb.EVICT], now_s)
            refusals += [*starts.refusals, *refused]
            marks: list[tuple[Action, Callable[[], Awaitable[None]]]] = []
            for action in (*by_verb[Verb.CANCEL], *by_verb[Verb.DRAIN]):
                try:
                    marks.append((action, drains.mark(state, action, now_s)))
                except TemporaryError as error:
                    refusals.append(Refusal(action, error))
            refusals += _refused([action for action, _ in marks], await together([write for _, write in marks]))
            refusals += await starts.create(names.POD_INFERENCE)
            refusals += await evict(state, openings, now_s)
            refusals += await starts.create(names.POD_CLEANING)
        return tuple(refusals)

    async def tend(self, now_s: float) -> None:
        """What no plan asks for; call it after each tick."""
        self._look(now_s)
        await self._tending.tend(now_s)

    @property
    def num_begun(self) -> int:
        """Pods that are being created."""
        return len(self._state.begun)

    # --- ports.Views ----------------------------------------------------------------------------

    def pools(self) -> tuple[PoolView, ...]:
        return views.pools(self._state)

    def services(self) -> tuple[ServiceView, ...]:
        return views.services(self._state)

    def rolling(self, service: str, revision: str | None) -> ServiceView | None:
        """A service that has replicas of another revision; None if it has none, or is not known yet."""
        state = self._state
        pods = state.pods_of(names.POD_INFERENCE, service)
        if service in state.catalogue.services and any(pod.revision != revision and not pod.is_over for pod in pods):
            return views.service(state, service)
        return None

    def jobs(self) -> tuple[JobView, ...]:
        return views.jobs(self._state, self._now_s)

    def take_reclaims(self) -> tuple[ReclaimView, ...]:
        found, self._state.finished = tuple(self._state.finished), []
        return found

    def endpoints(self, service: str) -> tuple[Replica, ...]:
        """The replicas of a service that may get requests."""
        return self._state.endpoints(service)

    # --- taking in ------------------------------------------------------------------------------

    def _look(self, now_s: float) -> State:
        """Everything that changed since the last look."""
        state, self._now_s = self._state, now_s
        if state.clock.sync(now_s):
            self._observer.forget()
        self._resume()
        self._endings.take_in(now_s)
        state.refresh(now_s)
        self._learn(now_s)
        return state

    def _hear_pod(self, event: str, obj: Object) -> None:
        if self._state.index.hear(event, obj):
            self._state.poke()  # somebody waits for what it held, or it is lent again

    def _resume(self) -> None:
        """Take up what another leader began."""
        state = self._state
        for reclaim in state.catalogue.take_reclaims():
            key = (reclaim.metadata.namespace, reclaim.metadata.name)
            if reclaim.spec.dry_run or key in state.takes or key in state.closed:
                continue
            take = resumed(reclaim, state.clock)
            service = state.catalogue.services.get(names.object_uid(take.namespace, take.ref_name))
            for variant in service.spec.variants if service is not None and take.variant else ():
                take.replica_gpus = variant.gpus if variant.flavor == take.flavor else take.replica_gpus
            waits = any(not pod.is_over and not pod.is_ready for pod in state.replicas(take))
            is_over = take.written in OVER or (take.written == "Freed" and take.is_settled and not waits)
            if is_over:
                state.closed.add(key)
            else:
                adopt(state, take)

    def _learn(self, now_s: float) -> None:
        """How long starts take."""
        state = self._state
        for uid, decided_s in list(state.decided.items()):
            pod = state.index.ours.get(uid)
            if pod is None:
                continue
            page = state.books.pages.get(pod.place)
            if pod.node or (page is not None and uid in page.visible):
                state.placed.setdefault(uid, now_s)
            if pod.is_ready:
                state.owner_of(pod).succeeded()
                if not state.is_former(pod):
                    variant, took_s = f"{pod.owner}/{pod.policy_flavor}", now_s - state.placed.get(uid, decided_s)
                    state.wake_s[variant] = smoothed(state.wake_s.get(variant), took_s)
                del state.decided[uid]
                state.placed.pop(uid, None)


def _refused(actions: Sequence[Action], results: Sequence[object]) -> list[Refusal]:
    return [
        Refusal(action, result)
        for action, result in zip(actions, results, strict=True)
        if isinstance(result, TemporaryError | PermanentError)
    ]
