"""Gateways, keepers, gate Jobs and kept templates: made, mended when somebody changed them, removed when not wanted.

Level-based: each `reconcile` compares what is wanted with what the caches hold and writes the difference, by
server-side apply.  Nothing of this is in the way of a reclaim.  What they look like is `containers`' part.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slackwater_operator.core import PermanentError, TemporaryError
from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.errors import NotFound
from slackwater_operator.kube.types import DEPLOYMENTS, JOBS, SERVICES, Key, Object, Resource, key_of, version_of
from slackwater_operator.operate import containers
from slackwater_operator.operate.revisions import CONTROLLER_REVISIONS, Choice, Gate, gate_job_name
from slackwater_operator.resources import names
from slackwater_operator.resources.cleaning import CleaningJob
from slackwater_operator.resources.inference import InferenceDeployment

logger = logging.getLogger(__name__)

RETRY_S = (1.0, 60.0)  # after a refused write, doubled each time
ABREAST = 8  # writes at once
SELECTOR = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"
KINDS = (DEPLOYMENTS, SERVICES, JOBS, CONTROLLER_REVISIONS)


@dataclass(frozen=True, slots=True)
class Images:
    """What gateways and keepers run; empty: the image of the owner's own template."""

    gateway: str = ""
    keeper: str = ""


@dataclass(slots=True)
class _Trouble:
    said: str
    is_permanent: bool  # a person has to change something
    tries: int
    not_before_s: float
    wanted: Object


_Owner = InferenceDeployment | CleaningJob


@dataclass(frozen=True, slots=True)
class _Made:
    """What one owner wants, as of its spec and the choice of its revision."""

    owner: _Owner
    choice: Choice | None
    has_gate: bool
    objects: Mapping[tuple[str, Key], Object]


class Children:
    """Keeps the children of all services and jobs.

    caches: by plural, of what `SELECTOR` selects.   problems: what could not be made, by (plural, namespace, name).
    """

    def __init__(self, kube: Kube, caches: Mapping[str, Cache], images: Images, clock: Callable[[], float]) -> None:
        self._kube = kube
        self._caches = caches
        self._images = images
        self._clock = clock
        self._troubles: dict[tuple[str, Key], _Trouble] = {}
        self._settled: dict[tuple[str, Key], tuple[int, Object]] = {}
        self._made: dict[str, _Made] = {}

    @property
    def problems(self) -> dict[tuple[str, Key], str]:
        """In words; what may pass by itself is not among them."""
        return {where: trouble.said for where, trouble in self._troubles.items() if trouble.is_permanent}

    async def reconcile(
        self,
        services: Sequence[InferenceDeployment],
        jobs: Sequence[CleaningJob],
        choices: Mapping[str, Choice],
    ) -> None:
        """Write what differs; waits for the answers, and raises nothing."""
        wanted: dict[tuple[str, Key], Object] = {}
        everybody: tuple[_Owner, ...] = (*services, *jobs)
        owners = {owner.metadata.uid for owner in everybody}
        made, self._made = self._made, {}
        for owner in everybody:
            self._made[owner.metadata.uid] = self._of(owner, choices, made.get(owner.metadata.uid))
            wanted |= self._made[owner.metadata.uid].objects
        room = asyncio.Semaphore(ABREAST)
        await asyncio.gather(
            *(self._apply(room, where, obj) for where, obj in wanted.items() if self._differs(where, obj)),
            *(self._delete(room, where, obj) for where, obj in self._unwanted(wanted, owners)),
        )
        for where in [where for where in self._troubles if where not in wanted]:
            del self._troubles[where]
        self._settled = {where: settled for where, settled in self._settled.items() if where in wanted}

    def _of(self, owner: _Owner, choices: Mapping[str, Choice], before: "_Made | None") -> "_Made":
        """The children of one owner; made again only when its spec or its revisions changed."""
        if isinstance(owner, InferenceDeployment):
            choice = choices.get(owner.key)
            has_gate = choice is not None and self._has_gate(owner, choice)
            if before is not None and before.owner is owner and (before.choice, before.has_gate) == (choice, has_gate):
                return before
            return _Made(owner, choice, has_gate, {_where(obj): obj for obj in self._of_service(owner, choice)})
        if before is not None and before.owner is owner:
            return before
        has_keeper = owner.spec.ledger is not None and owner.spec.keeper.url is None
        objects = containers.keeper(owner, self._images.keeper) if has_keeper else []
        return _Made(owner, None, False, {_where(obj): obj for obj in objects})

    def _of_service(self, service: InferenceDeployment, choice: Choice | None) -> Iterable[Object]:
        if service.spec.gateway.control_url is None:
            yield from containers.gateway(service, self._images.gateway)
        if choice is None:
            return
        kept = {revision.name: revision for revision in (choice.current, choice.serving) if revision is not None}
        for revision in kept.values():
            yield containers.record(service, revision.name, revision.template)
        gate = service.spec.revision_gate
        if gate is not None and (choice.gate is not Gate.PASSED or self._has_gate(service, choice)):
            yield containers.gate(service, gate.template, choice.current.name)

    def _has_gate(self, service: InferenceDeployment, choice: Choice) -> bool:
        """A gate that passed stays, for people to read; one that was never needed is not made."""
        name = gate_job_name(service.metadata.name, choice.current.name)
        return self._caches[JOBS.plural].get(service.metadata.namespace, name) is not None

    def _differs(self, where: tuple[str, Key], wanted: Object) -> bool:
        trouble = self._troubles.get(where)
        if trouble is not None and trouble.wanted == wanted and self._clock() < trouble.not_before_s:
            return False
        live = self._caches[where[0]].get(*where[1])
        if live is None:
            return True
        if where[0] == JOBS.plural:
            return False  # a Job's template cannot be changed; another revision has another name
        settled = self._settled.get(where)
        if settled is not None and settled == (version_of(live), wanted):
            return False  # the server has this from us in its own words
        return not covers(live, wanted)

    def _unwanted(
        self, wanted: Mapping[tuple[str, Key], Object], owners: set[str]
    ) -> Iterable[tuple[tuple[str, Key], Object]]:
        """What one of these owners has and no longer wants; an owner's own end takes its children by itself."""
        for resource in KINDS:
            for live in [*self._caches[resource.plural].values()]:
                where = (resource.plural, key_of(live))
                references = live["metadata"].get("ownerReferences") or ()
                is_ours = any(reference.get("uid") in owners for reference in references)
                if is_ours and where not in wanted and not live["metadata"].get("deletionTimestamp"):
                    yield where, live

    async def _apply(self, room: asyncio.Semaphore, where: tuple[str, Key], wanted: Object) -> None:
        resource = _RESOURCES[where[0]]
        async with room:
            try:
                live = await self._kube.apply(resource, wanted, manager=names.MANAGER_CHILDREN)
            except (TemporaryError, PermanentError) as error:
                self._trouble(where, wanted, error)
                return
        self._troubles.pop(where, None)
        self._settled[where] = (version_of(live), wanted)
        self._caches[where[0]].remember(live)
        logger.info("made %s %s/%s", resource.kind, *where[1])

    async def _delete(self, room: asyncio.Semaphore, where: tuple[str, Key], live: Object) -> None:
        resource = _RESOURCES[where[0]]
        async with room:
            try:
                await self._kube.delete(
                    resource, where[1][1], where[1][0], uid=live["metadata"]["uid"], propagation="Background"
                )
            except NotFound:
                return
            except (TemporaryError, PermanentError) as error:
                what = resource.title(where[1][1], where[1][0])
                logger.warning("%s is not wanted any more, and stays: %s", what, error)
                return
        logger.info("removed %s %s/%s: not wanted any more", resource.kind, *where[1])

    def _trouble(self, where: tuple[str, Key], wanted: Object, error: Exception) -> None:
        before = self._troubles.get(where)
        if before is not None and before.wanted != wanted:
            before = None  # another spec, or another object of that name
        tries = before.tries + 1 if before else 1
        delay_s = min(RETRY_S[1], RETRY_S[0] * 2.0 ** (tries - 1))
        if before is None or before.said != str(error):
            logger.warning("%s %s/%s could not be made: %s", where[0], *where[1], error)
        self._troubles[where] = _Trouble(
            str(error), isinstance(error, PermanentError), tries, self._clock() + delay_s, wanted
        )


_RESOURCES: dict[str, Resource] = {resource.plural: resource for resource in KINDS}
_PLURALS = {resource.kind: resource.plural for resource in KINDS}


def _where(obj: Object) -> tuple[str, Key]:
    return _PLURALS[obj["kind"]], key_of(obj)


def covers(live: Any, wanted: Any) -> bool:
    """Whether an object says all that is wanted of it; what the server added beside it does not count."""
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(
            key in live and covers(live[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(live, list)
            and len(live) == len(wanted)
            and all(covers(have, want) for have, want in zip(live, wanted, strict=True))
        )
    return bool(live == wanted)
