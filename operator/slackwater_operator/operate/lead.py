"""What only the leader does: ticks of the policy, children, rollouts, statuses, dry runs, and the sides beside them.

Owns their order and pace, and that one tick that fails does not end the others.  Begun anew each time that leadership
is won, from what the caches hold; ends when it is cancelled.  Called by `process` through the elector.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from slackwater_operator.cluster.kube.cluster import KubeCluster
from slackwater_operator.core import (
    Action,
    BudgetExceeded,
    Limits,
    PermanentError,
    Plan,
    Reason,
    Snapshot,
    TemporaryError,
    Verb,
)
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.types import JOBS, Key, Object
from slackwater_operator.loop import Loop, ServiceSpec
from slackwater_operator.operate.archive import tidy
from slackwater_operator.operate.catalog import Catalog
from slackwater_operator.operate.children import Children, Images
from slackwater_operator.operate.decisions import tell
from slackwater_operator.operate.endpoints import Endpoints
from slackwater_operator.operate.metrics import Books, Metrics
from slackwater_operator.operate.progress import Keepers
from slackwater_operator.operate.remote import Asker
from slackwater_operator.operate.revisions import CONTROLLER_REVISIONS, Ledger
from slackwater_operator.operate.rollout import Rollout
from slackwater_operator.operate.services import Specs, limits, with_bounds
from slackwater_operator.operate.settings import Settings
from slackwater_operator.operate.sides import Sides
from slackwater_operator.operate.signals import Gateways
from slackwater_operator.operate.statuses.conditions import Emit
from slackwater_operator.operate.statuses.round import Round
from slackwater_operator.operate.watches import Watches

logger = logging.getLogger(__name__)

FAILURES = 60  # of one kind in a row; then the process ends, and another one may do better
AFTER_FAILURE_S = 1.0
LONGEST_REST_S = 0.25  # after a tick, before what poked in the meantime is looked at
LENT_AT_ONCE = 256  # workers that are being created; with thousands in a queue nothing urgent would get through
TIDY_S = 60.0  # between two looks for old records


class FleetLoop(Loop):
    """The loop, with limits that people change while it runs."""

    def limit(self, limits: Limits) -> None:
        """These from the next tick on."""
        self._limits = limits

    def lend_at_most(self, workers: int) -> Plan:
        """Put off what the newest plan lends beyond so many workers; the next plan has it again."""
        self.plan = replace(self.plan, actions=tuple(within(self.plan.actions, workers)))
        self._taken = self.plan.actions
        return self.plan

    def look(self, now_s: float) -> Snapshot:
        """What a plan would be made from; nothing is planned."""
        self.snapshot = self._snapshot(self._cluster.observe(now_s), now_s)
        return self.snapshot


def within(actions: Iterable[Action], workers: int) -> Iterator[Action]:
    """The actions that start no more than so many workers on idle GPUs."""
    for action in actions:
        if action.verb is not Verb.START or action.reason is not Reason.IDLE:
            yield action
        elif count := min(action.count, workers):
            workers -= count
            yield replace(action, count=count)


def earliest_s(began_s: float, ended_s: float, shortest_s: float, early: int) -> float:
    """When a tick that is wanted early may begin, after one that took so long.

    With very many services something changes all the time; polls, watches and statuses need their turn too, and while
    hundreds of pods end a plan for each would slow down what frees the GPUs.  Whatever comes later than that is
    answered at once.   early: how many ticks in a row were wanted early.
    """
    return max(began_s + shortest_s, ended_s + min((ended_s - began_s) * max(1, early), LONGEST_REST_S))


@dataclass(frozen=True, slots=True)
class Means:
    """What the process has, and every leader's time uses."""

    kube: Kube
    watches: Watches
    catalog: Catalog
    endpoints: Endpoints
    settings: Settings
    metrics: Metrics
    emit: Emit
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sides: Sides = field(default_factory=lambda: Sides({}))
    leads: Callable[[], bool] = lambda: True
    """Whether this process leads, judged at each call: what the sides are held by."""


class Leader:
    """One time of leadership."""

    def __init__(self, means: Means, images: Images, poked: asyncio.Event) -> None:
        self._means = means
        self._poked = poked
        self._asker = Asker()
        watches = means.watches
        self._endpoints = means.endpoints
        self.gateways = Gateways(self._asker, means.clock, poked.set)
        self.keepers = Keepers(self._asker, means.clock, poked.set)
        self._ledger = Ledger(
            watches.children[JOBS.plural].get, watches.children[CONTROLLER_REVISIONS.plural].get, self._status_of
        )
        self.cluster = KubeCluster(
            means.kube,
            watches.caches(),
            self.gateways,
            self.keepers,
            self._ledger,
            wall=means.wall,
            poke=poked.set,
            emit=means.emit,
        )
        self.loop = FleetLoop(self.cluster, (), Limits())
        self._children = Children(means.kube, watches.children, images, means.clock)
        self._rollout = Rollout()
        self._specs = Specs()
        self._books = Books(means.metrics)
        self._round = Round(means.kube, watches, means.catalog, means.emit, means.clock, means.wall)
        self._failures = Counter[str]()
        self._group = asyncio.TaskGroup()
        self._tending: asyncio.Task[bool] | None = None
        self._tidy_s = means.clock() + TIDY_S

    async def run(self) -> None:
        """Until cancelled; raises what ticks fail with for too long."""
        means = self._means
        means.metrics.leader.set(1)
        try:
            async with self._group as group:
                group.create_task(self._ticks())
                group.create_task(self._looks())
                group.create_task(means.sides.run(means.leads, means.metrics.reconcile_errors.labels("side").inc))
        finally:
            self._books.end()
            await asyncio.gather(self.gateways.close(), self.keepers.close(), self.cluster.close())
            await self._asker.aclose()

    # --- ticks --------------------------------------------------------------------------------------

    async def _ticks(self) -> None:
        settings, clock = self._means.settings, self._means.clock
        early = 0
        while True:
            began_s = clock()
            self._poked.clear()
            failed = not await self._guarded("tick", self._tick)
            ended_s = clock()
            self._means.metrics.reconcile.observe(ended_s - began_s)
            if failed:
                await asyncio.sleep(AFTER_FAILURE_S)
                continue
            try:
                async with asyncio.timeout(max(0.0, began_s + settings.tick_s - clock())):
                    await self._poked.wait()
            except TimeoutError:
                early = 0
                continue
            await asyncio.sleep(max(0.0, earliest_s(began_s, ended_s, settings.shortest_tick_s, early) - clock()))
            early += 1

    async def _tick(self) -> None:
        means, now_s = self._means, self._means.clock()
        means.catalog.look()
        services = [*means.catalog.services.valid.values()]
        self._ledger.look(services)
        await self.gateways.follow(self._endpoints.gateways(services))
        await self.keepers.follow(self._endpoints.keepers(means.catalog.jobs.valid.values()))
        drains = self._prepare(now_s)
        try:
            self.loop.decide(now_s)
            decided = self.loop.lend_at_most(max(0, LENT_AT_ONCE - self.cluster.num_begun))
        except BudgetExceeded:
            means.metrics.reconcile_errors.labels("budget").inc()
            logger.exception("dropped a plan that breaks the budget; please report this with the operator's log")
            decided = Plan()
        if decided.actions or drains:
            self._begin("write", partial(self._carry_out, decided, now_s, drains))
        if self._tending is None or self._tending.done():
            self._tending = self._begin("tend", self._tend)

    def _begin(self, what: str, act: Callable[[], Awaitable[None]]) -> asyncio.Task[bool]:
        """Go on without waiting: the next tick must not be late because the API server is slow."""
        return self._group.create_task(self._guarded(what, act))

    async def _carry_out(self, decided: Plan, now_s: float, drains: Sequence[Action]) -> None:
        snapshot = self.loop.snapshot
        with self._means.metrics.write.time():
            taken = await self.loop.carry_out(decided, now_s, drains)
        tell(self._means.emit, self._means.watches, snapshot, taken)

    async def _tend(self) -> None:
        await self.cluster.tend(self._means.clock())

    def _prepare(self, now_s: float) -> tuple[Action, ...]:
        """Give the loop its services and limits; returns the drains of rollouts."""
        catalog = self._means.catalog
        pools = catalog.pools.valid
        specs: list[ServiceSpec] = []
        drains: list[Action] = []
        for service in catalog.services.valid.values():
            spec = self._specs.of(service, pools)
            serving = self._ledger.serving(spec.name)
            revision = serving.name if serving else None
            if (view := self.cluster.rolling(spec.name, revision)) is None:
                self._rollout.rest(spec.name)
            else:
                step = self._rollout.step(spec, view, revision, now_s)
                if step.bounds is not None:
                    spec = with_bounds(spec, *step.bounds)
                if step.drain is not None:
                    drains.append(Action(Verb.DRAIN, step.drain, 1, Reason.LIMIT))
            specs.append(spec)
        present = {spec.name for spec in specs}
        self._rollout.forget(present)
        self._specs.forget(present)
        self.loop.serve(specs)
        self.loop.limit(limits(pools.values()))
        return tuple(drains)

    # --- what is not urgent -------------------------------------------------------------------------

    async def _looks(self) -> None:
        while True:
            await asyncio.sleep(self._means.settings.look_s)
            await self._guarded("look", self._look)

    async def _look(self) -> None:
        """Children, statuses, gauges."""
        if self.loop.snapshot is None:
            return
        catalog = self._means.catalog
        services, jobs = [*catalog.services.valid.values()], [*catalog.jobs.valid.values()]
        ended = self.cluster.take_reclaims()
        self._books.reclaims(ended)
        self._books.services(self.cluster.services())
        self._books.look(self.loop.snapshot, self.loop.plan, self.loop.accounts, self._means.clock())
        await self._children.reconcile(services, jobs, self._ledger.choices)
        await self._round.write(self)
        self._books.children(self._means.watches.children, self._children.problems)
        if self._means.clock() >= self._tidy_s:
            self._tidy_s = self._means.clock() + TIDY_S
            await tidy(self._means.kube, self._means.watches.reclaims, self._means.wall())

    # --- for the statuses ---------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """Revisions."""
        return self._ledger

    @property
    def children(self) -> Children:
        """What the operator runs beside engines and workers."""
        return self._children

    def has_gateway(self, service: str) -> bool:
        """A gateway of it is followed."""
        return self.gateways.follows(service)

    def has_keeper(self, job: str) -> bool:
        """A keeper of it is followed."""
        return self.keepers.follows(job)

    def side_word(self, pool: str) -> str | None:
        """What keeps a pool's side from its work, "" = nothing; None if there is none, or it has said nothing yet."""
        return self._means.sides.word(pool)

    def _status_of(self, key: Key) -> Object:
        obj = self._means.watches.services.get(*key)
        status: Object = (obj or {}).get("status") or {}
        return status

    async def _guarded(self, what: str, act: Callable[[], Awaitable[None]]) -> bool:
        """Run it; True if it went well.  One object that nobody thought of must not stop the service of all others."""
        try:
            await act()
        except Exception as error:
            self._failures[what] += 1
            self._means.metrics.reconcile_errors.labels(what).inc()
            if self._failures[what] >= FAILURES:
                raise
            if isinstance(error, (TemporaryError, PermanentError)):
                logger.warning("a %s failed: %s", what, error)
            else:
                logger.exception("a %s failed; please report this", what)
            return False
        self._failures[what] = 0
        return True
