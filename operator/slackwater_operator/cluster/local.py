"""One machine as a cluster: its accelerators are slots, its workloads real child processes.

Owns starting, waking, draining, evicting and reaping; decides nothing.  A slot is free when its
process was reaped.  An eviction counts as lossless only after the worker's last receipt was read
back from disk.
"""

import asyncio
import itertools
import logging
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from slackwater_operator.cluster.base import Observation, Refusal, one_by_one
from slackwater_operator.cluster.child import Child, end
from slackwater_operator.cluster.front import Front
from slackwater_operator.cluster.members import BAD_INPUT, PREEMPTED, Member, Owner, Reclaim
from slackwater_operator.cluster.programs import GATEWAY_GRACE_S, Programs
from slackwater_operator.cluster.proof import receipt_holds
from slackwater_operator.cluster.slots import Slot
from slackwater_operator.config import Cleaning, Config
from slackwater_operator.core import (
    Action,
    CleaningJob,
    Kind,
    Node,
    Phase,
    Reason,
    TemporaryError,
    Verb,
    Workload,
)

logger = logging.getLogger(__name__)

SETTLE_S = 1.5  # an engine says once a second how many streams it has, so a drained one may still hear of one
STEADY_S = 30.0  # a child that ran for so long clears its owner's back-off
KEPT_LOGS = 64
KEPT_RECLAIMS = 64
SMOOTHING = 0.3  # weight of the newest lead time


class LocalCluster:
    """Implements `base.Cluster` with child processes.

    on_event: told of everything worth a line in the event log: (event name, fields).
    poke: called when something happened that the next plan should know soon.
    """

    def __init__(
        self,
        config: Config,
        slots: tuple[Slot, ...],
        programs: Programs,
        *,
        on_event: Callable[[str, dict[str, Any]], None] = lambda _event, _fields: None,
        poke: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._slots = slots
        self._programs = programs
        self._on_event = on_event
        self._poke = poke
        self._clock = clock
        self.jobs = {job.name: job for job in config.cleaning}
        self._logs = config.state_dir / "logs"
        self._numbers = itertools.count(1)
        self._departed: list[tuple[str, float]] = []
        self._free_since = {slot.index: clock() for slot in slots}
        self._reclaim_s = 1.0
        self._wake_s = 3.0
        self._stopping = False
        self._pending: set[asyncio.Task[None]] = set()
        self.members: dict[str, Member] = {}
        self.owners = {name: Owner() for name in [*self.jobs, *([config.inference.name] if config.inference else [])]}
        self.reclaims: deque[Reclaim] = deque(maxlen=KEPT_RECLAIMS)  # the newest
        self.reclaims_by_reason: Counter[Reason] = Counter()  # of all
        self.front: Front | None = None
        if config.inference is not None:
            self.front = Front(
                programs.gateway(),
                self._logs / "gateway.log",
                clock=clock,
                on_event=on_event,
                poke=poke,
                on_ready=self._tell_front,
            )

    async def start(self) -> None:
        """Start the gateway and the first engines; workers come by the plan."""
        self._logs.mkdir(parents=True, exist_ok=True)
        await self.tend()

    # --- base.Cluster -------------------------------------------------------------------------

    def observe(self, now_s: float) -> Observation:
        samples = self.front.take_samples() if self.front else ()
        departed, self._departed = tuple(self._departed), []
        lead_s = self._reclaim_s + self._wake_s
        inference = self._config.inference
        flavors = sorted({slot.flavor for slot in self._slots})
        return Observation(
            nodes=tuple(self._node(flavor) for flavor in flavors),
            workloads=self._workloads(),
            jobs=tuple(self._job(job, now_s) for job in self._config.cleaning),
            samples=tuple((inference.name, sample) for sample in samples) if inference else (),
            lead_s=tuple((f"{inference.name}/{flavor}", lead_s) for flavor in flavors) if inference else (),
            departed=departed,
        )

    async def apply(self, actions: Sequence[Action], now_s: float) -> tuple[Refusal, ...]:
        return await one_by_one(self._begin, actions, now_s)

    async def _begin(self, action: Action, now_s: float) -> None:
        match action.verb:
            case Verb.START:
                for _ in range(action.count):
                    await self._start(action, now_s)
            case Verb.EVICT:
                self._send_away(self._member(action.uid), action.reason, now_s)
            case Verb.DRAIN:
                member = self._member(action.uid)
                member.phase, member.leaving_since_s, member.reason = Phase.DRAINING, now_s, action.reason
                self._tell_front()
            case Verb.CANCEL:
                member = self._member(action.uid)
                if member.phase is not Phase.DRAINING:
                    raise TemporaryError(f"{action.uid} is {member.phase}, so its drain cannot be cancelled")
                member.phase, member.leaving_since_s, member.reason = Phase.RUNNING, None, None
                self._tell_front()

    # --- what no plan asks for ------------------------------------------------------------------

    async def tend(self) -> None:
        """Finish drains, enforce graces, keep the gateway and the standby engines; call it each tick."""
        if self._stopping:
            return
        now_s = self._clock()
        for member in list(self.members.values()):
            self._enforce_grace(member, now_s)
        if self.front is not None:
            await self.front.tend(now_s)
            await self._keep_standby(now_s)

    async def stop(self, grace_s: float) -> None:
        """End every child: workers make their work durable, engines finish their streams, then the gateway."""
        self._stopping = True
        now_s = self._clock()
        for member in self.members.values():
            if member.phase is not Phase.LEAVING:
                member.phase, member.leaving_since_s = Phase.LEAVING, now_s
                if member.child:
                    member.child.signal(signal.SIGTERM)
        await end([m.child for m in self.members.values() if m.child], grace_s)
        if self.front is not None:
            self.front.stop()
            if self.front.child is not None:
                self.front.child.signal(signal.SIGTERM)
                await end([self.front.child], GATEWAY_GRACE_S + 2.0)
        await asyncio.gather(*self._pending)

    def kill(self) -> None:
        """SIGKILL every child at once."""
        self._stopping = True
        for child in self.children():
            child.kill()

    def broken(self) -> str:
        """Why there is nothing left to do, in words; empty while there is.

        A cleaning job that cannot go on does not stop the others, nor the service.
        """
        states = {"gateway": self.front.state} if self.front else {}
        if self._config.inference is not None:
            states[self._config.inference.name] = self.owners[self._config.inference.name]
        elif all(self.owners[name].broken for name in self.jobs):
            states = self.owners
        return next((f"{name}: {state.broken}" for name, state in states.items() if state.broken), "")

    def jobs_ended(self) -> bool:
        """Whether no cleaning job has anything left to do."""
        return not self.members and all(self.owners[name].done or self.owners[name].broken for name in self.jobs)

    def children(self) -> list[Child]:
        """Every child that runs now."""
        front = [self.front.child] if self.front and self.front.child else []
        return [*(member.child for member in self.members.values() if member.child), *front]

    # --- views ------------------------------------------------------------------------------------

    def _node(self, flavor: str) -> Node:
        mine = [slot.index for slot in self._slots if slot.flavor == flavor]
        free = sorted(since for index, since in self._free_since.items() if index in mine)
        return Node(name=f"local-{flavor}", flavor=flavor, gpus=len(mine), idle_since_s=tuple(free))

    def _workloads(self) -> tuple[Workload, ...]:
        kept = self._floor_workers()
        found = []
        for member in self.members.values():
            if member.slot is not None:
                flavor = self._flavor(member.slot)
                preemptible = member.kind is Kind.CLEANING and member.uid not in kept
                found.append(member.workload(flavor, f"local-{flavor}", preemptible))
        return tuple(sorted(found, key=lambda workload: workload.uid))

    def _floor_workers(self) -> set[str]:
        """The oldest `min_workers` of each job: traffic never takes them."""
        kept: set[str] = set()
        for name, job in self.jobs.items():
            staying = [m for m in self.members.values() if m.owner == name and m.phase is not Phase.LEAVING]
            kept |= {m.uid for m in sorted(staying, key=lambda m: m.started_s)[: job.min_workers]}
        return kept

    def _job(self, job: Cleaning, now_s: float) -> CleaningJob:
        owner = self.owners[job.name]
        workers = sum(member.owner == job.name for member in self.members.values())
        open_units = owner.progress.get("shards_open", job.max_workers)
        if workers == 0:  # whatever dead workers still hold on lease, one worker will wait for
            open_units = max(1, open_units)
        if owner.done or owner.broken or now_s < owner.not_before_s:
            open_units = 0
        return CleaningJob(
            uid=job.name,
            min_workers=job.min_workers if open_units else 0,
            max_workers=job.max_workers,
            open_units=open_units,
            flavors=tuple(sorted({slot.flavor for slot in self._slots})),
            weight=job.weight,
        )

    def _flavor(self, index: int) -> str:
        return next(slot.flavor for slot in self._slots if slot.index == index)

    def _member(self, uid: str) -> Member:
        try:
            return self.members[uid]
        except KeyError:
            raise TemporaryError(f"{uid} is gone already") from None

    # --- starting ---------------------------------------------------------------------------------

    async def _start(self, action: Action, now_s: float) -> None:
        inference = self._config.inference
        service, _, flavor = action.uid.partition("/")
        is_engine = inference is not None and service == inference.name
        owner = self.owners[service]
        if not owner.may_start(now_s):
            raise TemporaryError(f"{service} is backing off after a failure", max(0.0, owner.not_before_s - now_s))
        free = [index for index in self._free_since if not flavor or self._flavor(index) == flavor]
        if not free:
            raise TemporaryError(f"no free slot for {action.uid}")
        index = min(free, key=lambda index: (self._free_since[index], index))
        if is_engine and (asleep := next((m for m in self.members.values() if m.slot is None and m.loaded), None)):
            del self._free_since[index]
            asleep.slot, asleep.started_s, asleep.phase = index, now_s, Phase.STARTING
            asleep.decided_s = now_s
            assert asleep.child is not None
            asleep.child.signal(signal.SIGUSR1)
            self._on_event("wake", {"uid": asleep.uid, "slot": index, "reason": action.reason})
            return
        slot = next(slot for slot in self._slots if slot.index == index)
        member = self._new_member(Kind.INFERENCE if is_engine else Kind.CLEANING, service, index, now_s)
        del self._free_since[index]
        self._on_event("start", {"uid": member.uid, "slot": index, "reason": action.reason})
        command = (
            self._programs.engine(standby=False) if is_engine else self._programs.worker(self.jobs[service], member.uid)
        )
        await self._run(member, command, dict(slot.environment))

    def _new_member(self, kind: Kind, owner: str, slot: int | None, now_s: float) -> Member:
        member = Member(f"{owner}-{next(self._numbers)}", kind, owner, slot, now_s, decided_s=now_s)
        self.members[member.uid] = member
        return member

    async def _keep_standby(self, now_s: float) -> None:
        """Start at most one standby engine at a time, and not while others are still waking."""
        inference = self._config.inference
        assert inference is not None
        engines = [m for m in self.members.values() if m.kind is Kind.INFERENCE and m.phase is not Phase.LEAVING]
        asleep = [m for m in engines if m.slot is None]
        waking = any(m.slot is not None and m.phase is Phase.STARTING for m in engines)
        wanted = min(inference.standby_replicas, inference.max_replicas - (len(engines) - len(asleep)))
        loading = any(not m.loaded for m in asleep)
        if len(asleep) < wanted and not loading and not waking and self.owners[inference.name].may_start(now_s):
            member = self._new_member(Kind.INFERENCE, inference.name, None, now_s)
            try:
                await self._run(member, self._programs.engine(standby=True), {})
            except TemporaryError as error:  # no plan asked for it, so no plan need hear of it
                logger.warning("%s", error)

    async def _run(self, member: Member, command: list[str], environment: dict[str, str]) -> None:
        logs = sorted(self._logs.glob("*.log"), key=lambda path: path.stat().st_mtime)
        for old in logs[:-KEPT_LOGS]:
            old.unlink(missing_ok=True)
        try:
            member.child = await Child.start(
                member.uid,
                command,
                log=self._logs / f"{member.uid}.log",
                on_event=lambda event: self._hear(member, event),
                on_exit=lambda code: self._gone(member, code),
                nice=self.jobs[member.owner].nice if member.kind is Kind.CLEANING else 0,
                environment=environment,
            )
        except OSError as error:  # too many processes or files: the slot is as free as before
            del self.members[member.uid]
            if member.slot is not None:
                self._free_since[member.slot] = self._clock()
            delay_s = self.owners[member.owner].failed(self._clock())
            raise TemporaryError(f"{member.uid} could not be started: {error}", delay_s) from error

    # --- hearing ------------------------------------------------------------------------------------

    def _hear(self, member: Member, event: dict[str, Any]) -> None:
        now_s = self._clock()
        before = member.phase
        member.hear(event, now_s)
        if event["event"] == "ready":
            if member.decided_s is not None and member.slot is not None:
                self._wake_s += SMOOTHING * ((now_s - member.decided_s) - self._wake_s)
            self._on_event("ready", {"uid": member.uid, "took_s": round(now_s - member.started_s, 3)})
            self._tell_front()
        if event["event"] in ("working", "idle"):
            counts = ("items_done", "items_total", "items_open", "shards_open")
            self.owners[member.owner].progress |= {key: int(event[key]) for key in counts if event.get(key) is not None}
        if event["event"] == "durable":
            self.owners[member.owner].settle_one()
        if member.phase is not before or event["event"] == "standby":
            self._poke()

    def _tell_front(self) -> None:
        if self.front is not None:
            self.front.tell(list(self.members.values()))

    # --- leaving ------------------------------------------------------------------------------------

    def _send_away(self, member: Member, reason: Reason, now_s: float) -> None:
        if member.phase is Phase.LEAVING:
            raise TemporaryError(f"{member.uid} is leaving already")
        member.phase, member.leaving_since_s = Phase.LEAVING, now_s
        member.reason, member.decided_s = member.reason or reason, now_s
        self._tell_front()  # before the signal, so that no request is sent to a replica that leaves
        if member.child is not None:
            member.child.signal(signal.SIGTERM)

    def _enforce_grace(self, member: Member, now_s: float) -> None:
        if member.leaving_since_s is None or member.child is None:
            return
        waited_s = now_s - member.leaving_since_s
        grace_s = self._grace_s(member)
        if member.phase is Phase.DRAINING:
            if (member.running == 0 and waited_s > SETTLE_S) or waited_s > grace_s:
                self._send_away(member, member.reason or Reason.QUIET, now_s)
            return
        if waited_s > grace_s and not member.killed:
            logger.warning("killing uid=%s it outlasted its grace_s=%s", member.uid, grace_s)
            member.killed = True
            member.child.kill()

    def _grace_s(self, member: Member) -> float:
        if self._config.inference is not None and member.kind is Kind.INFERENCE:
            return self._config.inference.drain_grace_s  # it may still have a stream to finish
        return self.jobs[member.owner].grace_s

    def _gone(self, member: Member, code: int) -> None:
        task = asyncio.get_running_loop().create_task(self._account_end(member, code))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _account_end(self, member: Member, code: int) -> None:
        """The process is reaped: free its slot at once, then read back what it left."""
        now_s = self._clock()
        self.members.pop(member.uid, None)
        self._departed.append((member.uid, member.committed_s))
        if member.slot is not None:
            self._free_since[member.slot] = now_s
        self._tell_front()
        self._learn_from_exit(member, code, now_s)
        self._on_event("exit", {"uid": member.uid, "slot": member.slot, "code": code, "reason": member.reason})
        self._poke()
        if member.kind is Kind.CLEANING and member.reason is not None and member.leaving_since_s is not None:
            verified = await asyncio.to_thread(receipt_holds, member.receipt)
            durable = verified and (code in (PREEMPTED, 0) or member.durable_s is None)  # None: it had not begun
            outcome = "timeout" if member.killed else "checkpointed" if durable else "lost"
            reclaim = Reclaim(
                uid=member.uid,
                owner=member.owner,
                reason=member.reason,
                decided_s=member.leaving_since_s,
                freed_s=now_s,
                outcome=outcome,
                verified=verified,
                items=member.items,
                lost_s=max(0.0, member.leaving_since_s - (member.mark_s or member.leaving_since_s)),
            )
            self._reclaim_s += SMOOTHING * (reclaim.took_s - self._reclaim_s)
            self.reclaims.append(reclaim)
            self.reclaims_by_reason[reclaim.reason] += 1
            self._on_event("reclaim", reclaim.as_json())

    def _learn_from_exit(self, member: Member, code: int, now_s: float) -> None:
        owner = self.owners[member.owner]
        asked = member.phase is Phase.LEAVING
        if code == 0 and member.kind is Kind.CLEANING and not asked:
            owner.finish()
        elif code == BAD_INPUT:
            owner.broken = member.child.last_words() if member.child else "bad input"
            logger.error("not starting owner=%s again: %s", member.owner, owner.broken)
        elif asked or code == PREEMPTED:
            owner.failures = 0
        else:
            if now_s - member.started_s > STEADY_S:
                owner.failures = 0
            delay_s = owner.failed(now_s)
            words = member.child.last_words() if member.child else ""
            logger.error("failed uid=%s code=%d backoff_s=%.0f %s", member.uid, code, delay_s, words)
