"""The controller's Prometheus metrics, `slurm_bridge_*`.

Owns the names and how a tick becomes numbers.  Owns no port (`service`).  States: training, background (our
cleaning), idle, drain (nobody's, on a node that takes no jobs).  Slurm's own exporters, and its OpenMetrics
since 25.11, say nothing of GPUs by use.
"""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from slackwater_slurm.changes import Cause
from slackwater_slurm.cluster import Tick
from slackwater_slurm.ledger import Progress
from slackwater_slurm.observation import Observation, Use

STATES = {Use.TRAINING: "training", Use.CLEANING: "background", Use.IDLE: "idle", Use.UNAVAILABLE: "drain"}
WAITS = (0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120, 300)
LONGEST_GAP_S = 60.0  # GPU seconds across a longer silence are not made up


class Exporter:
    """One registry a controller; `add` after each tick, from the loop's thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._cluster = ""
        self._last: Observation | None = None
        self._pending: set[tuple[str, str]] = set()
        gpu = ["cluster", "gpu_type", "state"]
        self._gpus = Gauge("slurm_bridge_gpus", "GPUs by state", gpu, registry=self.registry)
        self._gpu_seconds = Counter("slurm_bridge_gpu_seconds", "GPU seconds by state", gpu, registry=self.registry)
        self._pending_gpus = Gauge(
            "slurm_bridge_pending_gpus",
            "GPUs that other people's jobs wait for",
            ["cluster", "partition", "reason"],
            registry=self.registry,
        )
        self._workers = Gauge(
            "slurm_bridge_workers", "Cleaning workers by state", ["cluster", "job", "state"], registry=self.registry
        )
        self._throttle = Gauge(
            "slurm_bridge_throttle", "Workers that may run at once", ["cluster", "job"], registry=self.registry
        )
        self._items = Gauge("slurm_bridge_items", "Items by state", ["cluster", "job", "state"], registry=self.registry)
        self._requeues = Counter(
            "slurm_bridge_requeues", "Workers sent back, by cause", ["cluster", "reason"], registry=self.registry
        )
        self._preempt = Histogram(
            "slurm_bridge_preempt_seconds",
            "From submission to start, of jobs that took GPUs from cleaning (whole seconds)",
            ["cluster"],
            registry=self.registry,
            buckets=WAITS,
        )
        self._return = Histogram(
            "slurm_bridge_return_seconds",
            "From a worker seen sent back until it ran again",
            ["cluster"],
            registry=self.registry,
            buckets=WAITS,
        )
        self._api = Histogram(
            "slurm_bridge_api_seconds",
            "One call of Slurm",
            ["call"],
            registry=self.registry,
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
        )
        self._errors = Counter(
            "slurm_bridge_api_errors", "Calls of Slurm that failed", ["call"], registry=self.registry
        )
        self._seen_s = Gauge(
            "slurm_bridge_last_look_timestamp_seconds", "When Slurm last answered in full", registry=self.registry
        )

    def called(self, call: str, took_s: float, is_ok: bool) -> None:
        """One call of Slurm; given to the client as its watch."""
        self._api.labels(call).observe(took_s)
        if not is_ok:
            self._errors.labels(call).inc()

    def add(self, cluster: str, tick: Tick, progress: Mapping[str, Progress]) -> None:
        """Carry one tick into the metrics.  progress: of every job that is controlled."""
        self._cluster = cluster
        self._count_gpus(tick.seen)
        self._count_workers(tick.seen, progress)
        for reason in Cause:
            self._requeues.labels(cluster, reason.value)  # a rate needs a zero to begin at
        for (_, cause), count in tick.changes.requeues:
            self._requeues.labels(self._cluster, cause.value).inc(count)
        for waited_s in tick.changes.training_waited_s:
            self._preempt.labels(self._cluster).observe(waited_s)
        for returned_s in tick.changes.returned_s:
            self._return.labels(self._cluster).observe(returned_s)
        self._seen_s.set(tick.seen.now_s)
        self._last = tick.seen

    def _count_gpus(self, seen: Observation) -> None:
        gap_s = 0.0 if self._last is None else min(LONGEST_GAP_S, max(0.0, seen.now_s - self._last.now_s))
        for gpu_type in sorted({*seen.gpu_types, *(self._last.gpu_types if self._last else ())}):
            for use, state in STATES.items():
                labels = (self._cluster, gpu_type, state)
                self._gpus.labels(*labels).set(seen.gpus_of(gpu_type, use))
                self._gpu_seconds.labels(*labels).inc(gap_s * (self._last.gpus_of(gpu_type, use) if self._last else 0))
        pending = dict(seen.pending_gpus)
        for gone in self._pending - set(pending):
            self._pending_gpus.remove(self._cluster, *gone)
        for (partition, reason), count in pending.items():
            self._pending_gpus.labels(self._cluster, partition, reason).set(count)
        self._pending = set(pending)

    def _count_workers(self, seen: Observation, progress: Mapping[str, Progress]) -> None:
        for job, ledger in progress.items():
            arrays = [array for array in seen.arrays if array.job == job]
            counts = {
                "running": sum(array.held_workers for array in arrays),
                "displaced": sum(array.displaced for array in arrays),
                "waiting": sum(array.waiting for array in arrays),
            }
            for state, count in counts.items():
                self._workers.labels(self._cluster, job, state).set(count)
            self._throttle.labels(self._cluster, job).set(sum(array.throttle or 0 for array in arrays))
            items = {
                "cleaned": ledger.items_done,
                "quarantined": ledger.items_quarantined,
                "open": (ledger.items_total or ledger.items_settled) - ledger.items_settled,
            }
            for state, count in items.items():
                self._items.labels(self._cluster, job, state).set(count)
