"""The supervisor's Prometheus metrics; the names are the contract of operator/README.md."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """One registry a supervisor; update it from the loop's thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.gpu_seconds = Counter("fleet_gpu_seconds", "Slot-seconds by state", ["state"], registry=self.registry)
        self.useful = Gauge(
            "fleet_useful_ratio", "Useful share of all slot-seconds since the start", registry=self.registry
        )
        self.demand = Gauge("fleet_demand_gpus", "Replicas that the policy asks for", ["model"], registry=self.registry)
        self.evictions = Counter(
            "fleet_evictions",
            "Workers told to go, by why and how it ended",
            ["reason", "outcome"],
            registry=self.registry,
        )
        self.eviction_seconds = Histogram(
            "fleet_eviction_seconds",
            "From the decision until the slot was seen free",
            registry=self.registry,
            buckets=(0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 5, 10),
        )
        self.lost_seconds = Counter(
            "fleet_lost_gpu_seconds", "Worker seconds that were never committed", registry=self.registry
        )
        self.signal_age = Gauge("fleet_signal_age_seconds", "Since the newest traffic sample", registry=self.registry)
        self.reconcile = Histogram(
            "fleet_reconcile_seconds",
            "One tick of observe, plan and apply",
            registry=self.registry,
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1),
        )
