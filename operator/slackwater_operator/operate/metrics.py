"""The operator's Prometheus metrics; the names are the contract of operator/README.md.

Labels are from closed sets, or names of pools, flavors and services, which are few and made by people; never a uid.
"""

import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as Total

from slackwater_operator.accounts import STATES, Accounts, shares, slots_by_owner
from slackwater_operator.cluster.kube.ports import ReclaimView, ServiceView
from slackwater_operator.core import Kind, Phase, Plan, Snapshot
from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.types import Key, Object
from slackwater_operator.resources.names import LABEL_KIND, POD_GATE, POD_GATEWAY, POD_KEEPER, split_policy_flavor

STAGES = ("spike_to_decision", "decision_to_free", "free_to_serving")
ERRORS = ("budget", "tick", "write", "tend", "look", "side")  # what failed of a reconcile, or beside it
REPLICA_STATES = ("starting", "ready", "leaving")
CHILD_KINDS = (POD_GATEWAY, POD_KEEPER, POD_GATE)
CHILD_STATES = ("ready", "waiting", "failed", "refused")
FOREVER_S = 1e9  # the age of a signal that never came


class Metrics:
    """One registry a process; update it from the loop's thread."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.gpu_seconds = Total(
            "fleet_gpu_seconds", "GPU-seconds by state", ["pool", "flavor", "state"], registry=registry
        )
        self.gpus = Gauge("fleet_gpus", "GPUs now, by state", ["pool", "flavor", "state"], registry=registry)
        self.useful = Gauge("fleet_useful_ratio", "Useful share of GPU-seconds since this leader", registry=registry)
        self.serving_load = Gauge(
            "fleet_serving_load_gpus", "GPUs' worth of decode slots in use", ["service"], registry=registry
        )
        self.demand = Gauge("fleet_demand_gpus", "GPUs that the policy asks for", ["service"], registry=registry)
        self.replicas = Gauge("fleet_replicas", "Replicas by state", ["service", "state"], registry=registry)
        self.evictions = Total(
            "fleet_evictions", "Workers told to go, by why and how it ended", ["reason", "outcome"], registry=registry
        )
        self.eviction_gpus = Total("fleet_eviction_gpus", "GPUs taken back, by why", ["reason"], registry=registry)
        self.eviction_seconds = Histogram(
            "fleet_eviction_seconds",
            "How long each stage of a take-back took",
            ["phase"],
            registry=registry,
            buckets=(0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 8, 12, 20, 40),
        )
        self.lost_seconds = Total(
            "fleet_lost_gpu_seconds", "GPU-seconds of workers that were never committed", registry=registry
        )
        self.reclaims = Total("fleet_reclaims", "Take-backs that ended, by how", ["phase"], registry=registry)
        self.signal_age = Gauge(
            "fleet_signal_age_seconds", "Since the newest traffic sample", ["service"], registry=registry
        )
        self.reconcile = Histogram(
            "fleet_reconcile_seconds",
            "One tick: observe, plan, and hand the actions over to be written",
            registry=registry,
            # Fine where the bar is, a quarter second: a percentile is read between two of them.
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1, 2.5),
        )
        self.write = Histogram(
            "fleet_write_seconds",
            "From a plan until the API server has answered all that was written for it",
            registry=registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10),
        )
        self.reconcile_errors = Total("fleet_reconcile_errors", "Ticks that failed", ["kind"], registry=registry)
        self.leader = Gauge("fleet_leader", "1 while this process leads", registry=registry)
        self.build = Gauge("fleet_build_info", "1", ["version", "python"], registry=registry)
        self.api_requests = Total(
            "fleet_api_requests", "Requests to the API server", ["verb", "resource"], registry=registry
        )
        self.stalled = Gauge(
            "fleet_watch_stalled_seconds", "Since a watch last said anything", ["resource"], registry=registry
        )
        self.children = Gauge(
            "fleet_children", "Gateways, keepers and the like, by state", ["kind", "state"], registry=registry
        )
        self.build.labels(version("slackwater"), platform.python_version()).set(1)
        for kind in ERRORS:
            self.reconcile_errors.labels(kind)
        for stage in STAGES:
            self.eviction_seconds.labels(stage)


class Books:
    """Carries what the loop and the cluster know into the metrics, as increments.  One a leader.

    The GPU-seconds of each state are those of the newest look, times how long it stood.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._states: dict[tuple[str, str], float] = {}
        self._looked_s: float | None = None
        self._lost_s = 0.0
        self._requests: Counter[tuple[str, str]] = Counter()
        self._services: set[str] = set()

    def look(self, snapshot: Snapshot, plan: Plan, accounts: Accounts, now_s: float) -> None:
        """What the newest tick saw."""
        metrics = self._metrics
        took_s = 0.0 if self._looked_s is None else max(0.0, now_s - self._looked_s)
        for (flavor, state), gpus in self._states.items():
            metrics.gpu_seconds.labels(*split_policy_flavor(flavor), state).inc(gpus * took_s)
        self._looked_s = now_s
        states = gpus_by_state(snapshot)
        for gone in self._states.keys() - states.keys():
            metrics.gpus.remove(*split_policy_flavor(gone[0]), gone[1])
        for (flavor, state), gpus in states.items():
            metrics.gpus.labels(*split_policy_flavor(flavor), state).set(gpus)
        self._states = states
        metrics.useful.set(accounts.useful_ratio)
        metrics.lost_seconds.inc(max(0.0, accounts.lost_s - self._lost_s))
        self._lost_s = accounts.lost_s
        self._look_at_services(snapshot, plan)

    def services(self, views: Iterable[ServiceView]) -> None:
        """How many replicas each service has."""
        for view in views:
            counts = Counter(
                "leaving"
                if replica.phase in (Phase.DRAINING, Phase.LEAVING)
                else ("ready" if replica.is_ready else "starting")
                for replica in view.replicas
            )
            for state in REPLICA_STATES:
                self._metrics.replicas.labels(view.name, state).set(counts[state])

    def reclaims(self, ended: Iterable[ReclaimView]) -> None:
        """Take-backs that are over."""
        for reclaim in ended:
            metrics = self._metrics
            metrics.reclaims.labels("served" if reclaim.serving_s is not None else "freed").inc()
            if reclaim.spike_to_decided_s is not None:
                metrics.eviction_seconds.labels("spike_to_decision").observe(reclaim.spike_to_decided_s)
            if reclaim.freed_s is not None and reclaim.serving_s is not None:
                metrics.eviction_seconds.labels("free_to_serving").observe(
                    max(0.0, reclaim.serving_s - reclaim.freed_s)
                )
            for victim in reclaim.victims:
                metrics.eviction_seconds.labels("decision_to_free").observe(victim.took_s)
                metrics.evictions.labels(reclaim.reason, victim.outcome.lower()).inc()
                metrics.eviction_gpus.labels(reclaim.reason).inc(victim.gpus)

    def children(self, caches: Mapping[str, Cache], problems: Mapping[tuple[str, Key], str]) -> None:
        """Gateways, keepers and gates: how many are well."""
        counts = Counter(
            (kind, state)
            for cache in caches.values()
            for obj in cache.values()
            if (kind := (obj["metadata"].get("labels") or {}).get(LABEL_KIND, "")) in CHILD_KINDS
            and (state := child_state(obj))
        )
        for plural, _ in problems:
            counts["gate" if plural == "jobs" else "gateway", "refused"] += 1
        for kind in CHILD_KINDS:
            for state in CHILD_STATES:
                self._metrics.children.labels(kind, state).set(counts[kind, state])

    def requests(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Requests to the API server so far."""
        for (verb, plural), count in [*counts.items()]:
            more = count - self._requests[verb, plural]
            if more > 0:
                self._metrics.api_requests.labels(verb, plural).inc(more)
                self._requests[verb, plural] = count

    def end(self) -> None:
        """This process no longer leads: what it knew of the fleet is another's to say."""
        metrics = self._metrics
        told = (metrics.gpus, metrics.serving_load, metrics.demand, metrics.replicas, metrics.signal_age)
        for gauge in (*told, metrics.children):
            gauge.clear()
        metrics.leader.set(0)

    def _look_at_services(self, snapshot: Snapshot, plan: Plan) -> None:
        metrics = self._metrics
        need = dict(plan.need_replicas)
        slots = slots_by_owner(snapshot.services)
        load: dict[str, float] = {service.name: 0.0 for service in snapshot.services}
        for workload in snapshot.workloads:
            if workload.kind is Kind.INFERENCE and (of_one := slots.get((workload.owner, workload.flavor))):
                load[workload.owner] += workload.gpus * workload.running_slots / of_one
        names = {service.name for service in snapshot.services}
        for gone in self._services - names:
            for gauge in (metrics.serving_load, metrics.demand, metrics.signal_age):
                gauge.remove(gone)
            for state in REPLICA_STATES:
                metrics.replicas.remove(gone, state)
        self._services = names
        for service in snapshot.services:
            gpus = max(service.variants, key=lambda one: (one.preference, one.uid)).gpus if service.variants else 1
            metrics.demand.labels(service.name).set(need.get(service.name, 0) * gpus)
            metrics.serving_load.labels(service.name).set(load[service.name])
            metrics.signal_age.labels(service.name).set(min(FOREVER_S, service.load.age_s))


def child_state(obj: Object) -> str:
    """How a Deployment or a Job of ours is; "" for what has no state."""
    status = obj.get("status") or {}
    if "backoffLimit" in obj.get("spec", {}):
        conditions = {one["type"] for one in status.get("conditions") or () if one.get("status") == "True"}
        return "ready" if "Complete" in conditions else "failed" if "Failed" in conditions else "waiting"
    if "replicas" in obj.get("spec", {}):
        return "ready" if (status.get("readyReplicas") or 0) >= obj["spec"]["replicas"] else "waiting"
    return ""


def gpus_by_state(snapshot: Snapshot) -> dict[tuple[str, str], float]:
    """GPUs by (policy flavor, state); each GPU is in exactly one of `accounts.STATES`."""
    slots = slots_by_owner(snapshot.services)
    states: dict[tuple[str, str], float] = {}
    left = {node.name: node.gpus for node in snapshot.nodes}
    flavors = {node.name: node.flavor for node in snapshot.nodes}
    for node in snapshot.nodes:
        for state in STATES:
            states.setdefault((node.flavor, state), 0.0)
    for workload in snapshot.workloads:
        if workload.phase is Phase.PENDING or workload.node not in left:
            continue
        gpus = min(workload.gpus, left[workload.node])
        left[workload.node] -= gpus
        flavor = flavors[workload.node]
        for state, share in shares(workload, slots.get((workload.owner, workload.flavor), 0)):
            states[flavor, state] += share * gpus
    for node in snapshot.nodes:
        broken = min(node.broken_gpus, left[node.name])
        states[node.flavor, "broken"] += broken
        states[node.flavor, "free"] += left[node.name] - broken
    return states
