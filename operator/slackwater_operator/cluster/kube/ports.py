"""What `KubeCluster` and the operator process ask of each other.

Owns the protocols that the process implements (`Signals`, `Progress`, `Revisions`), the caches that it hands over, and
the values that the cluster shows it (`...View`).  Owns no behaviour.  Every `*_s` that is a moment is on the clock that
fills `now_s` of `Cluster.observe`; nothing here ever waits but `verify`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from slackwater_operator.core import Phase, Reason, TrafficSample

if TYPE_CHECKING:
    from slackwater_operator.kube.cache import Cache

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica as a gateway is told it.  uid: `Workload.uid`."""

    uid: str
    url: str
    slots: int


@dataclass(frozen=True, slots=True)
class Revision:
    """What a service's new replicas are made from.

    name: the template's hash, annotation `slackwater.dev/revision` of the pod.
    template: a pod template {metadata, spec}.
    """

    name: str
    template: Object


@dataclass(frozen=True, slots=True)
class JobProgress:
    """A keeper's newest answer.  None = not known (the index is not made yet)."""

    seen_s: float
    items_total: int | None = None
    items_done: int | None = None
    items_quarantined: int | None = None
    items_open: int | None = None
    shards_open: int | None = None
    audio_s: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """What the ledger shows of one worker.  durable_s: the moment of its newest durable record, None = none yet."""

    durable_s: float | None
    items: int
    shard: str | None


class Signals(Protocol):
    """What the gateways of the services say and are told.  The process polls them; the cluster never waits for them."""

    def take_samples(self) -> tuple[tuple[str, TrafficSample], ...]:
        """(Service.name, sample) in time order, since the last call; a service whose gateway is silent has none."""

    def tell(self, service: str, replicas: Sequence[Replica]) -> None:
        """All replicas that may get requests from now on: ready ones that do not drain.

        Level-triggered and cheap: call it with every observation and again right after a DRAIN, CANCEL or delete; only
        a change is sent, at once and in the background, and again until the gateway took it.
        """

    def told(self, service: str) -> frozenset[str] | None:
        """The uids that some gateway of the service may still send to: all that each took last, together.

        None = not known: a gateway was never told, or there is none.  A replica that drains is safe to end once it is
        not in here and its `in_flight` is 0.
        """

    def in_flight(self, service: str, uid: str) -> int | None:
        """Streams of one replica, summed over the gateways, newest count.

        None = not known: no fresh answer of each gateway.  A replica that a fresh answer does not list has 0.
        """


class Progress(Protocol):
    """What the keepers of the cleaning jobs say.  The process polls them."""

    def job(self, uid: str) -> JobProgress | None:
        """The newest answer for a CleaningJob.uid, None = never had one (no ledger, or its keeper is not up)."""

    def worker(self, uid: str, name: str) -> WorkerProgress | None:
        """A living worker of that job by its name in the ledger (`--worker`), which is its pod's name."""

    async def verify(self, uid: str, receipt: Mapping[str, Any]) -> bool | None:
        """Whether the ledger of that job holds a receipt; None = not to be told now (ask again), or no keeper."""


class Revisions(Protocol):
    """Which revision of its template a service's new replicas are made from; a gate may hold the newest back."""

    def serving(self, service: str) -> Revision | None:
        """None = no revision may serve yet: refuse the START with a TemporaryError that says so."""


@dataclass(frozen=True, slots=True)
class Caches:
    """The caches that the process runs; all of them are synced before the first `observe`.

    pods: of all namespaces, slimmed by `KEEP_POD` (this package defines it); the others whole.
    """

    pods: "Cache"
    nodes: "Cache"
    flavors: "Cache"
    pools: "Cache"
    services: "Cache"  # InferenceDeployments
    jobs: "Cache"  # CleaningJobs
    reclaims: "Cache"


# --- what the cluster shows the process, for status, conditions, metrics and the command line -------------------


@dataclass(frozen=True, slots=True)
class UsageView:
    """Who holds the GPUs of one flavor of one pool; the counts add up to `total`."""

    flavor: str  # GPUFlavor's own name
    total: int
    inference: int
    training: int  # and foreign pods
    cleaning: int
    releasing: int
    idle: int
    broken: int


@dataclass(frozen=True, slots=True)
class PoolView:
    """One CapacityPool.  disputed: nodes that another pool or flavor selects too, and so nobody uses."""

    name: str
    usage: tuple[UsageView, ...]
    disputed: tuple[str, ...] = ()
    missing_flavors: tuple[str, ...] = ()  # named by the pool, but there is no such GPUFlavor


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica's pod.  uid: `Workload.uid`."""

    uid: str
    flavor: str  # the policy's, "<pool>/<flavor>"
    node: str
    phase: Phase
    revision: str
    is_ready: bool
    reason: str  # why it was started


@dataclass(frozen=True, slots=True)
class ServiceView:
    """One InferenceDeployment.

    refusal: why the newest START was not possible, "" = none.
    refused: what the API server said of a pod that it will never take (a PermanentError), "" = nothing.
    """

    name: str  # Service.name
    replicas: tuple[ReplicaView, ...]
    lead_s: float | None
    refusal: str = ""
    refused: str = ""


@dataclass(frozen=True, slots=True)
class JobView:
    """One CleaningJob.

    failure: why it is not started again, in the container's own words; "" = it goes on.
    refusal, refused: as of a `ServiceView`.
    """

    uid: str
    running: int
    starting: int
    leaving: int
    lost: int  # workers whose newest receipt the ledger does not hold
    gpu_seconds: float
    durable_wall_s: float | None  # newest verified receipt, Unix time
    is_complete: bool = False
    failure: str = ""
    refusal: str = ""
    refused: str = ""
    unverified: int = 0  # workers whose newest receipt nobody could look for


@dataclass(frozen=True, slots=True)
class VictimView:
    """How one victim went.  outcome: Checkpointed, Unverified, Lost or Timeout."""

    pod: str
    job: str
    outcome: str
    gpus: int
    took_s: float  # decided -> seen free
    lost_s: float  # GPU-seconds
    durable_s: float | None = None  # decided -> the newest durable record, if it is known


@dataclass(frozen=True, slots=True)
class ReclaimView:
    """A take-back that is over.  Moments of its life in seconds since it was decided; None = never came."""

    namespace: str
    name: str
    pool: str
    flavor: str
    reason: Reason
    spike_to_decided_s: float | None
    freed_s: float | None
    serving_s: float | None
    victims: tuple[VictimView, ...]


class Views(Protocol):
    """What `KubeCluster` offers beside `Cluster`; all from memory, each call a fresh tuple."""

    def pools(self) -> tuple[PoolView, ...]:
        """Every valid CapacityPool."""

    def services(self) -> tuple[ServiceView, ...]:
        """Every valid InferenceDeployment, also one without replicas."""

    def jobs(self) -> tuple[JobView, ...]:
        """Every valid CleaningJob."""

    def take_reclaims(self) -> tuple[ReclaimView, ...]:
        """Those that ended since the last call, oldest first."""
