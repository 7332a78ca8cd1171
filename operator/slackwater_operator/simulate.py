"""A fleet played in discrete time: a trace of requests against the real policy on a simulated cluster.

Owns a queueing model of replicas and workers, and the player that samples, plans, checks and applies
as the loop does.  Nothing here is measured on hardware: service times, start, flush and wake times are
parameters.  Deterministic for equal arguments.  Called by tests and benchmarks.
"""

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from slackwater_operator.accounts import Accounts
from slackwater_operator.cluster.base import Observation, Refusal
from slackwater_operator.core import (
    Action,
    BudgetExceeded,
    CleaningJob,
    Kind,
    Limits,
    Node,
    Phase,
    Plan,
    Service,
    Snapshot,
    TrafficSample,
    Variant,
    Verb,
    Workload,
)
from slackwater_operator.policy import check_budget, plan
from slackwater_operator.traces import FRAME_S, TraceRequest
from slackwater_operator.traffic import History, Window

FLAVOR = "gpu"
SERVICE = "tts"
VARIANT = f"{SERVICE}/{FLAVOR}"
JOB = "clean"


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is simulated.  All GPUs are of one flavor; a replica and a worker take one each."""

    gpus: int
    slots_per_replica: int
    gpus_per_node: int = 8
    frames_per_s: float = 1.0 / FRAME_S  # of one stream; the default makes speech as fast as it is heard
    wake_s: float = 1.0  # a resident standby takes the GPU and serves
    worker_start_s: float = 2.0
    checkpoint_s: float = 1.0  # between two durable points of a worker
    flush_s: float = 0.5  # from SIGTERM until a worker has made its work durable and is gone
    kill_after_s: float = 15.0  # a worker that hangs is killed then
    hang_ratio: float = 0.0  # of the victims that do not leave by themselves
    seed: int = 0  # which of them
    min_replicas: int = 1
    burst_slots: int = 0
    deadband_replicas: int = 1
    open_units: int = 1_000_000  # of the cleaning job; 0 = nothing to fill with
    tick_s: float = 1.0
    window: Window = field(default_factory=Window)
    limits: Limits = field(default_factory=Limits)
    deaf_s: tuple[float, float] = (0.0, 0.0)  # from, until: no traffic sample arrives

    @property
    def lead_s(self) -> float:
        """From the sample that shows a need to the replica that serves it."""
        return self.flush_s + self.tick_s + self.wake_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it.  Waits are from a request's arrival to its decode slot."""

    requests: int
    wait_p50_s: float
    wait_p99_s: float
    wait_max_s: float
    late_ratio: float  # of the requests that waited longer than `late_after_s`
    useful_ratio: float
    useful_ratio_without_filling: float
    seconds: dict[str, float]  # GPU-seconds by state
    committed_s: float
    lost_s: float
    max_lost_s: float  # by one eviction
    actions: dict[str, int]  # by "verb reason", workloads
    killed: int  # victims that hung
    turns: int  # changes of direction: a shrink after a growth or the other way round
    peak_replicas: int

    @property
    def evictions(self) -> int:
        """Workers that were sent away, for whatever reason."""
        return sum(count for name, count in self.actions.items() if name.startswith(Verb.EVICT))


@dataclass(slots=True)
class Member:
    """A replica or a worker."""

    uid: str
    kind: Kind
    node: str
    started_s: float
    phase: Phase = Phase.STARTING
    ready_s: float = math.inf
    leaving_since_s: float | None = None
    running: int = 0
    settled_s: float | None = None  # committed at its end, once that is known


class SimulatedCluster:
    """Replicas, workers and the gateway's queue; implements `cluster.base.Cluster`."""

    def __init__(self, fleet: Fleet, requests: Sequence[TraceRequest]) -> None:
        self.fleet = fleet
        self.members: dict[str, Member] = {}
        self.waits_s: list[float] = []
        self.settled: list[tuple[str, float]] = []  # (uid, committed_s) of workers that are gone
        self.losses_s: list[float] = []  # of each worker that is gone
        self.killed = 0
        self._nodes = [f"node-{index:03d}" for index in range(math.ceil(fleet.gpus / fleet.gpus_per_node))]
        sizes = [min(fleet.gpus_per_node, fleet.gpus - i * fleet.gpus_per_node) for i in range(len(self._nodes))]
        self._sizes = dict(zip(self._nodes, sizes, strict=True))
        self._idle = {node: [0.0] * size for node, size in self._sizes.items()}
        self._requests = deque(requests)
        self._queue: deque[TraceRequest] = deque()
        self._arrivals = 0
        self._events: list[tuple[float, int, str, Member]] = []  # (moment, number, what, to whom), a heap
        self._offers: list[tuple[int, str]] = []  # (streams, uid) of replicas with a free slot
        self._numbers = itertools.count(1)
        self._samples: list[tuple[str, TrafficSample]] = []
        self._random = random.Random(fleet.seed)

    def advance(self, until_s: float) -> None:
        """Play everything that happens up to `until_s`, then take the gateway's sample."""
        while True:
            arrival_s = self._requests[0].t_s if self._requests else math.inf
            event_s = self._events[0][0] if self._events else math.inf
            if min(arrival_s, event_s) > until_s:
                break
            if event_s <= arrival_s:
                _, _, what, member = heapq.heappop(self._events)
                self._happen(what, member, event_s)
            else:
                self._queue.append(self._requests.popleft())
                self._arrivals += 1
            self._dispatch(min(arrival_s, event_s))
        if not self.fleet.deaf_s[0] <= until_s < self.fleet.deaf_s[1]:
            oldest_s = until_s - self._queue[0].t_s if self._queue else 0.0
            in_flight = sum(member.running for member in self.members.values())
            sample = TrafficSample(until_s, in_flight, len(self._queue), self._arrivals, oldest_s)
            self._samples.append((SERVICE, sample))

    def observe(self, now_s: float) -> Observation:
        """What a real cluster would report at `now_s`, up to which the play must have advanced."""
        samples, self._samples = tuple(self._samples), []
        return Observation(
            nodes=tuple(
                Node(name, FLAVOR, size, idle_since_s=tuple(self._idle[name])) for name, size in self._sizes.items()
            ),
            workloads=tuple(self._workload(member, now_s) for member in self.members.values()),
            jobs=(
                CleaningJob(
                    uid=JOB,
                    min_workers=0,
                    max_workers=self.fleet.gpus,
                    open_units=self.fleet.open_units,
                    flavors=(FLAVOR,),
                    start_s=self.fleet.worker_start_s,
                    checkpoint_s=self.fleet.checkpoint_s,
                ),
            ),
            samples=samples,
            lead_s=((VARIANT, self.fleet.lead_s),),
        )

    async def apply(self, actions: Sequence[Action], now_s: float) -> tuple[Refusal, ...]:
        """`carry_out`, for the loop; nothing is refused."""
        for action in actions:
            self.carry_out(action, now_s)
        return ()

    def carry_out(self, action: Action, now_s: float) -> None:
        """Begin one action.  Raises BudgetExceeded for a start without a free GPU."""
        match action.verb:
            case Verb.START:
                for _ in range(action.count):
                    self._start(action.uid, now_s)
            case Verb.EVICT:
                self._send_away(self.members[action.uid], now_s)
            case Verb.DRAIN:
                member = self.members[action.uid]
                member.phase, member.leaving_since_s = Phase.DRAINING, now_s
                self._leave_if_drained(member, now_s)
            case Verb.CANCEL:
                member = self.members[action.uid]
                member.phase, member.leaving_since_s = Phase.RUNNING, None
                self._offer(member)
                self._dispatch(now_s)

    def waiting_s(self, now_s: float) -> list[float]:
        """How long each request that still queues has waited."""
        return [now_s - request.t_s for request in self._queue]

    def _start(self, uid: str, now_s: float) -> None:
        node = max(self._nodes, key=lambda node: len(self._idle[node]))
        if not self._idle[node]:
            raise BudgetExceeded(f"start of {uid} with no free GPU")
        self._idle[node].pop(0)
        kind = Kind.INFERENCE if uid == VARIANT else Kind.CLEANING
        member = Member(f"{kind}-{next(self._numbers):06d}", kind, node, now_s)
        self.members[member.uid] = member
        self._later(
            now_s + (self.fleet.wake_s if kind is Kind.INFERENCE else self.fleet.worker_start_s), "ready", member
        )

    def _send_away(self, worker: Member, now_s: float) -> None:
        worker.phase, worker.leaving_since_s = Phase.LEAVING, now_s
        if self._random.random() < self.fleet.hang_ratio:
            worker.settled_s = self._durable_s(worker, now_s)
            self.killed += 1
            self._later(now_s + self.fleet.kill_after_s, "gone", worker)
        else:
            worker.settled_s = max(0.0, now_s - worker.ready_s)
            self._later(now_s + self.fleet.flush_s, "gone", worker)
        self.losses_s.append(max(0.0, now_s - worker.ready_s) - worker.settled_s)

    def _happen(self, what: str, member: Member, now_s: float) -> None:
        match what:
            case "ready":
                if member.phase is Phase.STARTING:
                    member.phase, member.ready_s = Phase.RUNNING, now_s
                    if member.kind is Kind.INFERENCE:
                        self._offer(member)
            case "finished":
                member.running -= 1
                self._offer(member)
                self._leave_if_drained(member, now_s)
            case _:
                del self.members[member.uid]
                self._idle[member.node].append(now_s)
                if member.settled_s is not None:
                    self.settled.append((member.uid, member.settled_s))

    def _leave_if_drained(self, replica: Member, now_s: float) -> None:
        if replica.phase is Phase.DRAINING and replica.running == 0:
            replica.phase, replica.leaving_since_s = Phase.LEAVING, now_s
            self._later(now_s, "gone", replica)

    def _dispatch(self, now_s: float) -> None:
        """Give queued requests to the replicas with the fewest streams."""
        while self._queue and (replica := self._least_loaded()) is not None:
            request = self._queue.popleft()
            replica.running += 1
            self._offer(replica)
            self.waits_s.append(now_s - request.t_s)
            self._later(now_s + request.generated_tokens / self.fleet.frames_per_s, "finished", replica)

    def _offer(self, replica: Member) -> None:
        """Note how loaded a replica is now; notes that no longer hold are passed over later."""
        if replica.phase is Phase.RUNNING and replica.running < self.fleet.slots_per_replica:
            heapq.heappush(self._offers, (replica.running, replica.uid))

    def _least_loaded(self) -> Member | None:
        """A replica with a free slot, taken off the offers; None if there is none."""
        while self._offers:
            running, uid = heapq.heappop(self._offers)
            replica = self.members.get(uid)
            if replica is not None and replica.phase is Phase.RUNNING and replica.running == running:
                return replica
        return None

    def _later(self, t_s: float, what: str, member: Member) -> None:
        heapq.heappush(self._events, (t_s, next(self._numbers), what, member))

    def _durable_s(self, worker: Member, now_s: float) -> float:
        """Seconds of work up to the worker's last durable point."""
        worked_s = max(0.0, now_s - worker.ready_s)
        return worked_s // self.fleet.checkpoint_s * self.fleet.checkpoint_s

    def _workload(self, member: Member, now_s: float) -> Workload:
        cleaning = member.kind is Kind.CLEANING
        until_s = now_s if member.leaving_since_s is None else member.leaving_since_s
        committed_s = self._durable_s(member, until_s) if cleaning else 0.0
        return Workload(
            uid=member.uid,
            kind=member.kind,
            owner=JOB if cleaning else SERVICE,
            flavor=FLAVOR,
            node=member.node,
            phase=member.phase,
            started_s=member.started_s,
            preemptible=cleaning,
            leaving_since_s=member.leaving_since_s,
            durable_s=member.ready_s + committed_s if cleaning and member.ready_s < math.inf else None,
            restart_cost_s=self.fleet.worker_start_s if cleaning else self.fleet.wake_s,
            running_slots=member.running,
            committed_s=committed_s,
        )


def simulate(fleet: Fleet, requests: Sequence[TraceRequest], late_after_s: float = 1.0) -> Outcome:
    """Play `requests` until the last one has arrived.

    Every plan is checked against the budget, and the cluster refuses to give a GPU away twice, so a
    BudgetExceeded that is raised from here is a fault of the policy.
    """
    cluster = SimulatedCluster(fleet, requests)
    accounts = Accounts()
    counts: Counter[str] = Counter()
    directions: list[Verb] = []
    peak = 0
    before: Snapshot | None = None
    done: tuple[Action, ...] = ()
    for snapshot, made in ticks(cluster, requests[-1].t_s if requests else 0.0):
        if before is not None:
            accounts.add(before, snapshot.now_s, done)
        before, done = snapshot, made.actions
        while cluster.settled:
            accounts.settle(*cluster.settled.pop())
        replicas = sum(w.kind is Kind.INFERENCE and w.phase is not Phase.LEAVING for w in snapshot.workloads)
        peak = max(peak, replicas)
        for action in made.actions:
            counts[f"{action.verb} {action.reason}"] += action.count
            if action.verb is Verb.DRAIN or action.uid == VARIANT:
                directions.append(action.verb)
    waits_s = sorted([*cluster.waits_s, *cluster.waiting_s(snapshot.now_s)])
    return Outcome(
        requests=len(waits_s),
        wait_p50_s=quantile(waits_s, 0.5),
        wait_p99_s=quantile(waits_s, 0.99),
        wait_max_s=waits_s[-1] if waits_s else 0.0,
        late_ratio=sum(wait_s > late_after_s for wait_s in waits_s) / len(waits_s) if waits_s else 0.0,
        useful_ratio=accounts.useful_ratio,
        useful_ratio_without_filling=accounts.useful_ratio_without_filling,
        seconds=dict(accounts.seconds),
        committed_s=accounts.committed_s,
        lost_s=accounts.lost_s,
        max_lost_s=max(cluster.losses_s, default=0.0),
        actions=dict(counts),
        killed=cluster.killed,
        turns=sum(one is not other for one, other in itertools.pairwise(directions)),
        peak_replicas=peak,
    )


def ticks(cluster: SimulatedCluster, length_s: float) -> Iterator[tuple[Snapshot, Plan]]:
    """Advance, observe, plan, check and apply, once every `tick_s`.

    Yields each snapshot and its plan, before the plan is applied.
    """
    fleet = cluster.fleet
    history = History(fleet.window)
    for number in range(math.ceil(length_s / fleet.tick_s) + 1):
        now_s = number * fleet.tick_s
        cluster.advance(now_s)
        seen = cluster.observe(now_s)
        for _, sample in seen.samples:
            history.append(sample)
        service = Service(
            name=SERVICE,
            min_replicas=fleet.min_replicas,
            max_replicas=fleet.gpus,
            variants=(Variant(VARIANT, FLAVOR, fleet.slots_per_replica, fleet.lead_s),),
            load=history.load(now_s, fleet.lead_s),
            burst_slots=fleet.burst_slots,
            deadband_replicas=fleet.deadband_replicas,
        )
        snapshot = Snapshot(now_s, seen.nodes, seen.workloads, (service,), seen.jobs, limits=fleet.limits)
        made = plan(snapshot)
        check_budget(snapshot, made)
        yield snapshot, made
        for action in made.actions:
            cluster.carry_out(action, now_s)


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest of the sorted `values` that a share `q` of them does not exceed; 0 for none."""
    return values[max(0, math.ceil(q * len(values)) - 1)] if values else 0.0
