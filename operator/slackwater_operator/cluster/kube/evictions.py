"""Taking GPUs back: one Reclaim for a need, its victims told to go, replicas in their places.

Owns the order of writes.  One replica on trial, so that nobody is sent away for a pod that the server does not take;
the Reclaim, so that a new leader can finish what was begun; then all victims at once.  A GPU that is seen free is given
on by the next plan.  Only where a pod of somebody else waits for GPUs does a replica keep the place of each victim's:
nominated for the GPU before that victim is told to go, so that the scheduler counts it as taken for whatever is less
important, and gated, so that the scheduler does not bind it itself.  Once the GPU is seen free, the replica that runs
is made there, bound, and the one that kept the place goes: at no moment does the GPU look free.
Everything here may be done again: whatever is there already is not done twice.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from slackwater_operator.cluster.base import Refusal
from slackwater_operator.cluster.kube.pods import Pod
from slackwater_operator.cluster.kube.starts import Running, running
from slackwater_operator.cluster.kube.state import RECLAIMS, State, together
from slackwater_operator.cluster.kube.takes import Take, Victim, reservations, take_name
from slackwater_operator.core import Action, PermanentError, Reason, SlackwaterError, TemporaryError
from slackwater_operator.kube.errors import AlreadyExists, NotFound, Unreachable
from slackwater_operator.resources import names
from slackwater_operator.resources.conditions import EventReason

logger = logging.getLogger(__name__)

DEFAULT_DEADLINE_S = 15.0


@dataclass(slots=True)
class Need:
    """Evictions of one plan that belong together."""

    beneficiary: str
    ref_kind: str
    ref_name: str
    namespace: str
    policy_flavor: str
    actions: list[Action] = field(default_factory=list)
    pods: list[Pod] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Opening:
    """A take-back that is decided and not written down yet.   source: the replica that its GPUs are for, if one."""

    take: Take
    source: Running | None
    need: Need


def decide(state: State, actions: Sequence[Action], now_s: float) -> tuple[list[Opening], list[Refusal]]:
    """The take-backs of one plan, and what cannot be begun.  From now on their victims count as leaving."""
    refusals: list[Refusal] = []
    needs: dict[tuple[str, ...], Need] = {}
    for action in actions:
        pod = state.index.ours.get(action.uid)
        if pod is None or pod.is_over:
            refusals.append(Refusal(action, TemporaryError(f"{action.uid} is gone already")))
        elif state.leaving_since(pod) is not None:
            refusals.append(Refusal(action, TemporaryError(f"{action.uid} is leaving already")))
        else:
            need = _need(action, pod)
            key = (need.beneficiary, need.ref_kind, need.ref_name, need.namespace, need.policy_flavor)
            need = needs.setdefault(key, need)
            need.actions.append(action)
            need.pods.append(pod)
    openings = []
    for need in needs.values():
        try:
            openings.append(_opening(state, need, now_s))
        except (TemporaryError, PermanentError) as error:
            refusals += [Refusal(action, error) for action in need.actions]
    return openings, refusals


async def evict(state: State, openings: Sequence[Opening], now_s: float) -> list[Refusal]:
    """Begin all take-backs of one plan."""
    refusals: list[Refusal] = []
    results = await together([partial(_begin, state, opening, now_s) for opening in openings])
    for opening, error in zip(openings, results, strict=True):
        if isinstance(error, TemporaryError | PermanentError):
            refusals += [Refusal(action, error) for action in opening.need.actions]
    return refusals


def _need(action: Action, pod: Pod) -> Need:
    """Who the GPUs of a victim are for."""
    parts = names.split_variant_uid(action.beneficiary)
    if parts is not None:
        kind, name, namespace = names.INFERENCE_DEPLOYMENT.kind, parts[1], parts[0]
    elif action.beneficiary:
        kind = "Pod"
        namespace, _, name = action.beneficiary.partition("/")
    elif action.reason is Reason.NODE:
        kind, name, namespace = "Node", pod.node, pod.namespace
    else:
        kind, name, namespace = names.CLEANING_JOB.kind, pod.owner.partition("/")[2], pod.namespace
    return Need(action.beneficiary, kind, name, namespace, pod.policy_flavor)


def _opening(state: State, need: Need, now_s: float) -> Opening:
    """Plan one take-back.  Raises what keeps it from being begun."""
    source = None
    if names.split_variant_uid(need.beneficiary) is not None:
        source = running(state, need.beneficiary, now_s)
    pool_name, flavor = names.split_policy_flavor(need.policy_flavor)
    pool = state.catalogue.pools.get(pool_name)
    take = Take(
        namespace=need.namespace,
        name=take_name(need.ref_name, need.pods, state.clock.wall(now_s)),
        ref_kind=need.ref_kind,
        ref_name=need.ref_name,
        pool=pool_name,
        flavor=flavor,
        reason=need.actions[0].reason,
        deadline_s=pool.spec.reclaim.deadline_s if pool else DEFAULT_DEADLINE_S,
        decided_s=now_s,
        victims={pod.uid: _victim(state, pod, now_s) for pod in need.pods},
        variant=need.beneficiary if source is not None else "",
        replica_gpus=source.variant.gpus if source is not None else 1,
        spike_s=state.sample_s.get(source.service.key) if source is not None else None,
        is_planned=True,
    )
    adopt(state, take)
    return Opening(take, source, need)


async def _begin(state: State, opening: Opening, now_s: float) -> None:
    """Write one take-back down and begin it.  Raises what kept it from being begun."""
    take, need = opening.take, opening.need
    try:
        if opening.source is not None:
            await _try_out(state, opening.source, need, now_s)
        await _write(state, take)
    except BaseException:
        if not take.in_doubt:
            drop(state, take)
        raise
    finally:
        take.is_planned = False
    logger.info(
        "reclaim=%s/%s for=%s flavor=%s victims=%d reason=%s",
        *(take.namespace, take.name, need.beneficiary or need.ref_name, need.policy_flavor, len(take.victims)),
        take.reason,
    )
    await advance(state, take, now_s)


async def _try_out(state: State, source: Running, need: Need, now_s: float) -> None:
    """Raises if the server would not take a replica."""
    try:
        await state.try_out(source.body(state, need.pods[0].place, need.actions[0].reason))
    except PermanentError as error:
        _book_refused(state, source, error, now_s)
        raise


def _book_refused(state: State, source: Running, error: PermanentError, now_s: float) -> None:
    """The service backs off, and says what the server said."""
    owner = state.owner(names.POD_INFERENCE, source.service.key)
    owner.failed(now_s, str(error))
    owner.refused = str(error)


def _victim(state: State, pod: Pod, now_s: float) -> Victim:
    gpus = max(1, pod.gpus(state.catalogue.resource_of(pod.flavor)))
    seen = state.progress.worker(pod.owner, pod.name)
    durable_s = None if seen is None else seen.durable_s
    since_s = durable_s if durable_s is not None else state.clock.moment(pod.running_s) if pod.running_s else now_s
    lost_s = max(0.0, now_s - since_s) * gpus
    return Victim(pod.uid, pod.k8s_uid, pod.owner, pod.place, gpus, lost_s, durable_s=durable_s)


def adopt(state: State, take: Take) -> None:
    """A take-back is open from now on; its living victims are leaving."""
    state.takes[take.key] = take
    for victim in take.living:
        state.victims[victim.pod] = take


def drop(state: State, take: Take) -> None:
    """A take-back is open no longer."""
    state.takes.pop(take.key, None)
    for uid in take.victims:
        if state.victims.get(uid) is take:
            del state.victims[uid]


async def _write(state: State, take: Take) -> None:
    try:
        async with state.limiter:
            made = await state.kube.create(RECLAIMS, take.body(), manager=names.MANAGER_RECLAIM)
    except AlreadyExists:
        return  # the same victims at the same moment: it is this one
    except Unreachable as error:
        take.in_doubt = error.unknown  # `settle_doubt` looks; until then its victims count as leaving
        raise
    state.caches.reclaims.remember(made)
    state.emit(
        made,
        "Normal",
        EventReason.RECLAIM_STARTED,
        f"{len(take.victims)} workers give {sum(victim.gpus for victim in take.victims.values())} GPUs of "
        f"{take.policy_flavor} back: {take.reason}",
        "Reclaim",
    )


async def settle_doubt(state: State, take: Take) -> None:
    """A Reclaim whose answer was lost: it is there, or it never was and its victims stay."""
    try:
        state.caches.reclaims.remember(await state.kube.get(RECLAIMS, take.name, take.namespace))
    except NotFound:
        logger.warning("reclaim=%s/%s was not written, so nobody is sent away for it", take.namespace, take.name)
        drop(state, take)
    else:
        take.in_doubt = False


async def advance(state: State, take: Take, now_s: float) -> None:
    """Do what is left to do: victims that were not told to go, and replicas that wait where others do too."""
    victims = _untold(state, take)
    source: Running | None = None
    if take.variant:
        try:
            source = running(state, take.variant, now_s)
        except SlackwaterError as error:
            if names.object_uid(take.namespace, take.ref_name) not in state.catalogue.services:
                await _spare(state, take, victims, str(error))
                return
    if victims and now_s - take.decided_s > take.deadline_s and not _is_begun(state, take):
        await _spare(state, take, victims, "it could not be begun before its deadline")
        return
    places: list[str] = []
    if source is not None and _is_contested(state, take):
        for pod in state.replicas(take):
            if not pod.node and not pod.nominated and pod.target and not pod.is_over:
                await state.nominate(pod, pod.target)
        places = _places(state, take, source)
    for problem in await together(_chains(state, take, victims, places, source, now_s)):
        if isinstance(problem, SlackwaterError):
            logger.warning("reclaim=%s/%s goes on later: %s", take.namespace, take.name, problem)


def _is_contested(state: State, take: Take) -> bool:
    """Whether a pod of somebody else might be bound to the GPUs that the victims leave."""
    pages = [page for node in {v.node for v in take.living} if (page := state.books.pages.get(node)) is not None]
    return any(
        pod.gpus(page.seat.resource)
        and not pod.is_gated
        and pod.nominated in ("", page.seat.node)
        and page.seat.suits(pod.wishes)
        for pod in state.index.foreign_waiting.values()
        for page in pages
    )


def _is_begun(state: State, take: Take) -> bool:
    """Whether anybody was told to go for it."""
    return len(_untold(state, take)) < len(take.victims)


def _untold(state: State, take: Take) -> list[Pod]:
    """Living victims that nobody has told to go."""
    found = []
    for victim in take.living:
        pod = state.index.ours.get(victim.pod)
        is_same = pod is not None and pod.k8s_uid == victim.k8s_uid and not pod.is_over
        if pod is not None and is_same and pod.deleting_s is None and victim.pod not in state.sent:
            found.append(pod)
    return found


def _places(state: State, take: Take, source: Running) -> list[str]:
    """A node for each replica that is still to wait for GPUs of this take-back's victims."""
    freed: dict[str, tuple[int, int]] = {}
    for victim in take.living:
        gpus, count = freed.get(victim.node, (0, 0))
        freed[victim.node] = (gpus + victim.gpus, count + 1)
    made = state.replicas(take)
    asked = [at for uid, at in take.replicas.items() if uid in state.books.promises]  # their answers were lost
    room = {node: _room(state, take, node) for node in freed}
    wanted = reservations(freed, room, source.variant.gpus)
    places = []
    for node, count in sorted(wanted.items()):
        there = sum(pod.place == node for pod in made) + asked.count(node)
        if node not in take.forsaken:
            places += [node] * max(0, count - there)
    alive = sum(
        not pod.is_over and state.leaving_since(pod) is None and pod.draining_s is None
        for pod in state.index.of(names.POD_INFERENCE, source.service.key)
    )
    return places[: max(0, source.service.spec.max_replicas - alive)]


def _room(state: State, take: Take, node: str) -> int:
    """GPUs of a node that are free or coming anyway, less those that others wait for there."""
    page = state.books.pages.get(node)
    if page is None:
        return 0
    coming = waiting = 0
    for pod in state.index.on_node(node):
        gpus = pod.gpus(page.seat.resource)
        if pod.is_over or pod.uid in take.victims:
            continue
        if pod.node and state.leaving_since(pod) is not None:
            coming += gpus
        elif not pod.node and pod.uid not in page.visible and pod.reclaim != take.name:
            waiting += gpus
    return max(0, page.free + coming - waiting)


def _chains(
    state: State, take: Take, victims: list[Pod], places: list[str], source: Running | None, now_s: float
) -> list[Callable[[], Awaitable[None]]]:
    """What to do at once: each victim's end, after the promise of its GPU if somebody is to wait for it."""
    waiting = list(places)

    async def send(pod: Pod | None, node: str) -> None:
        if node:
            assert source is not None, "only replicas wait"
            await _reserve(state, take, source, node, now_s)
        if pod is not None:
            await _tell(state, take, pod, now_s)

    chains: list[Callable[[], Awaitable[None]]] = []
    for pod in victims:
        node = waiting.pop(waiting.index(pod.place)) if pod.place in waiting else ""
        chains.append(partial(send, pod, node))
    return [*chains, *(partial(send, None, node) for node in waiting)]


async def _tell(state: State, take: Take, pod: Pod, now_s: float) -> None:
    """Tell a victim to go, with its own template's grace."""
    await state.delete(pod, None, now_s)
    take.victims[pod.uid].asked_s = now_s


async def _reserve(state: State, take: Take, source: Running, node: str, now_s: float) -> None:
    """A replica that keeps a victim's GPUs: the scheduler counts them as taken."""
    body = source.body(state, node, take.reason, take.name, is_bound=False)
    uid = names.object_uid(body["metadata"]["namespace"], body["metadata"]["name"])
    take.replicas[uid] = node
    pod = await state.create(body, node, 0, now_s)
    state.decided[pod.uid] = take.decided_s
    await state.nominate(pod, node)


async def let_in(state: State, take: Take, keeper: Pod, now_s: float) -> None:
    """The GPU that a replica kept is free: make the one that runs there, and let the other go.

    Not if as many run there as victims went: then it was made already, and somebody died before this one went.
    """
    freed = sum(victim.is_freed and victim.node == keeper.target for victim in take.victims.values())
    there = [pod for pod in state.replicas(take) if pod.node == keeper.target and not pod.is_over]
    if len(there) < freed:
        source = running(state, take.variant, now_s)
        body = source.body(state, keeper.target, take.reason, take.name)
        try:
            pod = await state.create(body, keeper.target, source.variant.gpus, now_s)
        except PermanentError as error:
            _book_refused(state, source, error, now_s)
            raise
        state.decided[pod.uid], state.placed[pod.uid] = take.decided_s, now_s
    await state.delete(keeper, 0, now_s)


async def _spare(state: State, take: Take, victims: list[Pod], why: str) -> None:
    """The need is gone, or cannot be met: who was not told to go stays."""
    if victims:
        logger.warning("reclaim=%s/%s spares %d workers: %s", take.namespace, take.name, len(victims), why)
    if _is_begun(state, take):
        for pod in victims:
            del take.victims[pod.uid]
            state.victims.pop(pod.uid, None)
        return
    drop(state, take)
    state.closed.add(take.key)
    body = {
        "metadata": {"namespace": take.namespace, "name": take.name},
        "status": take.status("Cancelled", state.clock, 1),
    }
    try:
        async with state.limiter:
            await state.kube.apply(RECLAIMS, body, manager=names.MANAGER_RECLAIM, subresource="status")
    except (TemporaryError, PermanentError) as error:
        logger.warning("reclaim=%s/%s: its end could not be written: %s", take.namespace, take.name, error)
