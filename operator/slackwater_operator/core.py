"""The types that every part of the operator speaks, and its errors.

Owns: the frozen values that flow `TrafficSample -> Load -> Snapshot -> Plan -> Action`.
Owns no behaviour beyond trivial look-ups.  Imported by every other module of this room and by
`slackwater_slurm`; imports nothing of ours.  Seconds end in `_s`, ratios in `_ratio`; every
`*_s` that is a moment is on one monotonic clock, the one that fills `Snapshot.now_s`.
"""

from dataclasses import dataclass
from enum import StrEnum


class SlackwaterError(Exception):
    """Root of the operator room's errors."""


class TemporaryError(SlackwaterError):
    """Try again after `delay_s`: a write conflict, a server that is starting."""

    def __init__(self, message: str, delay_s: float = 1.0) -> None:
        super().__init__(message)
        self.delay_s = delay_s


class PermanentError(SlackwaterError):
    """Trying again cannot help; a person has to change something.  The message says what."""


class BudgetExceeded(SlackwaterError):
    """A plan would allocate more GPUs than there are.  Our own fault: it is never applied."""


class Kind(StrEnum):
    """What a workload is for.  `PRIORITY` orders them."""

    INFERENCE = "inference"
    TRAINING = "training"
    CLEANING = "cleaning"


PRIORITY: dict[Kind, int] = {Kind.INFERENCE: 2, Kind.TRAINING: 1, Kind.CLEANING: 0}


class Phase(StrEnum):
    """Where a workload is in its life.  All but PENDING hold their GPUs."""

    PENDING = "pending"  # wants GPUs, holds none (a training job in a queue)
    STARTING = "starting"  # holds GPUs, does no useful work yet
    RUNNING = "running"
    DRAINING = "draining"  # inference: takes no new request, finishes its live streams
    LEAVING = "leaving"  # told to go (SIGTERM sent); its GPUs are not free before it is gone


class Verb(StrEnum):
    """What a cluster can be asked to do.  `Action.uid` names the object of the verb."""

    START = "start"  # uid = Variant.uid or CleaningJob.uid; `count` new workloads
    DRAIN = "drain"  # uid = Workload.uid of a replica: finish streams, then leave
    EVICT = "evict"  # uid = Workload.uid of a victim: make durable, then leave
    CANCEL = "cancel"  # uid = Workload.uid of a DRAINING replica: serve on


class Reason(StrEnum):
    """Why an action is taken.  One closed set: metric label, Event reason and status text."""

    TRAFFIC = "traffic"  # measured load needs more inference
    FLOOR = "floor"  # fewer replicas than `min_replicas`, or workers than `min_workers`
    TRAINING = "training"  # a training job waits for GPUs
    NODE = "node"  # the node is broken or cordoned
    RETARGET = "retarget"  # an earlier victim hangs past its deadline
    QUIET = "quiet"  # the survivors carry the load, and did all through the window
    IDLE = "idle"  # the GPU has been idle long enough to lend
    LIMIT = "limit"  # more replicas or workers than the spec allows


class Condition(StrEnum):
    """What is worth telling a person about a plan that holds back."""

    SIGNALS_STALE = "SignalsStale"  # no fresh traffic sample: nothing shrinks, nothing is evicted for it
    UNMET_NEED = "UnmetNeed"  # inference needs more than can be freed
    NO_WORK = "NoWork"  # idle GPUs, but no cleaning job has open work


@dataclass(frozen=True, slots=True)
class TrafficSample:
    """What the gateway saw at `t_s`.  One a second or oftener; `arrivals_total` only ever grows
    (a fall means that the gateway restarted)."""

    t_s: float
    in_flight: int  # requests that hold a decode slot
    queued: int  # requests that wait for one
    arrivals_total: int
    oldest_queued_s: float = 0.0
    first_audio_p95_s: float | None = None  # over the gateway's last window; None = no request


@dataclass(frozen=True, slots=True)
class Load:
    """Demand of one service, in decode slots, as `traffic` derives it from the samples."""

    now_slots: float  # in flight + queued in the newest sample
    panic_slots: float  # mean over the short window
    stable_slots: float  # mean over the long window
    slope_slots_per_s: float  # of the demand, over the panic window; may be negative
    window_max_slots: float  # maximum over the scale-down window
    rise_slots: float  # quantile of the rise seen over one lead time; sizes the headroom
    arrival_rps: float
    age_s: float  # of the newest sample
    stale: bool  # True when there is no sample, or the newest is older than stated
    first_audio_p95_s: float | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A machine with GPUs of one flavor.

    idle_since_s: one entry for each GPU *seen free*, the moment since when it is.  GPUs of
    workloads that leave are not free before they are gone.
    """

    name: str
    flavor: str
    gpus: int
    broken_gpus: int = 0
    schedulable: bool = True
    idle_since_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """One replica, worker or training job, with the GPUs that it holds on one node."""

    uid: str
    kind: Kind
    owner: str  # Service.name, CleaningJob.uid or the training job's name
    flavor: str
    node: str  # "" while PENDING
    phase: Phase
    started_s: float
    gpus: int = 1
    preemptible: bool = False
    leaving_since_s: float | None = None  # LEAVING or DRAINING since when
    durable_s: float | None = None  # the last moment that all its work was durable
    restart_cost_s: float = 0.0  # what starting it again elsewhere costs
    running_slots: int = 0  # replicas: decode slots in use
    committed_s: float = 0.0  # workers: GPU-seconds whose results are durable


@dataclass(frozen=True, slots=True)
class Variant:
    """How a service runs on one flavor."""

    uid: str  # "<service>/<flavor>"
    flavor: str
    slots_per_replica: int
    lead_s: float  # measured reclaim + wake time of this flavor
    gpus: int = 1
    preference: int = 0  # higher is filled first


@dataclass(frozen=True, slots=True)
class Service:
    """An inference service: its bounds, its variants and its present demand."""

    name: str
    min_replicas: int
    max_replicas: int
    variants: tuple[Variant, ...]
    load: Load
    burst_slots: int = 0  # headroom never lent, beside `Load.rise_slots`
    deadband_replicas: int = 1  # surplus replicas that are tolerated before any shrink


@dataclass(frozen=True, slots=True)
class CleaningJob:
    """A cleaning job's appetite.  `open_units` is work that no worker has claimed yet."""

    uid: str
    min_workers: int
    max_workers: int
    open_units: int
    flavors: tuple[str, ...]
    weight: float = 1.0
    gpus: int = 1
    start_s: float = 2.0  # a worker's start until its first useful second
    checkpoint_s: float = 1.0  # the longest time between two durable points


@dataclass(frozen=True, slots=True)
class Limits:
    """Lending and reclaim settings of a pool."""

    lend_after_s: float = 2.0
    retarget_after_s: float = 8.0  # a victim still there after this is given up on
    max_parallel: int = 64  # evictions in progress at once


@dataclass(frozen=True, slots=True)
class Flavor:
    """A GPU type in one pool, or a CPU slot of one machine, with limits of its own if it has any."""

    name: str
    limits: Limits | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a plan is made from.  Equal snapshots give equal plans.

    flavors: those with limits of their own; `limits` holds for the others, and its `max_parallel` for
    all of them together.
    """

    now_s: float
    nodes: tuple[Node, ...]
    workloads: tuple[Workload, ...]
    services: tuple[Service, ...] = ()
    jobs: tuple[CleaningJob, ...] = ()
    flavors: tuple[Flavor, ...] = ()
    limits: Limits = Limits()

    def limits_of(self, flavor: str) -> Limits:
        """What holds on the GPUs of one flavor."""
        return next((own.limits for own in self.flavors if own.name == flavor and own.limits), self.limits)


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a plan.

    beneficiary: who waits for the GPUs of an EVICT: Variant.uid, a training job's uid, or "" if nobody.
    """

    verb: Verb
    uid: str
    count: int
    reason: Reason
    beneficiary: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The actions of one tick, in the order to apply them, and what held it back.

    need_replicas: (service, replicas wanted now), for status and metrics.
    """

    actions: tuple[Action, ...] = ()
    need_replicas: tuple[tuple[str, int], ...] = ()
    conditions: tuple[Condition, ...] = ()
