"""Everything that our programs say of themselves, with a sample of each, for tests of queries.

Owns which registries there are, and a stand-in for the metrics of others (`foreign`).  Owns no metric: a name that a
program does not have is not here.
"""

import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from slackwater_inference.gateway.metrics import EdgeMetrics
from slackwater_inference.gateway.routing import Router
from slackwater_inference.metrics import EngineMetrics
from slackwater_manifests.foreign import FOREIGN
from slackwater_operator.accounts import STATES
from slackwater_operator.operate.metrics import Metrics as OperatorMetrics
from slackwater_slurm.exporter import Exporter

ADDED = frozenset({"instance", "job", "namespace", "pod"})
"""Labels that a scrape adds."""
LABELS = {
    "DCGM": ("gpu", "Hostname", "modelName", "namespace", "pod", "xid"),
    "kube_pod": ("namespace", "pod", "container", "node", "resource", "unit"),
    "kube_node": ("node", "resource", "unit"),
    "up": (),
}
"""Start of a foreign metric's name -> its labels, as far as our queries use them."""
SAMPLES = {
    "state": STATES,
    "phase": ("spike_to_decision", "decision_to_free", "free_to_serving", "decode"),
    "resource": ("pods", "nvidia_com_gpu"),
    "verb": ("list", "create", "delete", "patch"),
    "code": ("200", "503"),
    "xid": ("48",),
}
"""Label -> values that our queries ask for; any other label gets one of no meaning."""


def registries() -> tuple[CollectorRegistry, ...]:
    """One of each program: operator, engine, gateway, Slurm's controller."""
    gateway = EdgeMetrics(Router(max_queued=1))
    return (
        OperatorMetrics().registry,
        EngineMetrics("voice", slots=64).registry,
        gateway._registry,  # its own affair: it is only rendered
        Exporter().registry,
    )


def exposed() -> dict[str, frozenset[str]]:
    """Sample name -> labels, of everything that our programs expose."""
    names: dict[str, frozenset[str]] = {}
    for collector in collectors(registries()):
        for name in _sample_names(collector):
            names[name] = frozenset(collector._labelnames) | ({"le"} if name.endswith("_bucket") else set())
    return names


def foreign() -> dict[str, frozenset[str]]:
    """The same of what others expose."""
    return {name: frozenset(_labels(name)) for name in FOREIGN}


def collectors(some: Iterable[CollectorRegistry]) -> Iterator[MetricWrapperBase]:
    """The metrics themselves.  prometheus_client tells their labels only here."""
    for registry in some:
        for collector in registry._collector_to_names:
            if isinstance(collector, MetricWrapperBase):
                yield collector


def _sample_names(collector: MetricWrapperBase) -> tuple[str, ...]:
    name = collector._name
    if isinstance(collector, Counter):
        return (f"{name}_total",)
    if isinstance(collector, Info):
        return (f"{name}_info",)
    if isinstance(collector, Histogram):
        return (f"{name}_bucket", f"{name}_sum", f"{name}_count")
    return (name,)


def _labels(name: str) -> tuple[str, ...]:
    return next(labels for start, labels in LABELS.items() if name.startswith(start))


class Stand:
    """An HTTP server whose every scrape finds all metrics, with counters that rose since the last."""

    def __init__(self, seed: int = 1) -> None:
        self._registries = (*registries(), self._others())
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def text(self) -> bytes:
        """The exposition, after a step."""
        with self._lock:
            for collector in collectors(self._registries):
                for labels in _combinations(collector._labelnames):
                    self._step(collector.labels(**labels) if labels else collector)
            return b"".join(generate_latest(registry) for registry in self._registries)

    def _step(self, child: MetricWrapperBase) -> None:
        if isinstance(child, Counter):
            child.inc(self._random.randint(1, 5))
        elif isinstance(child, Histogram):
            child.observe(self._random.choice((0.05, 0.2, 1.0)))
        elif isinstance(child, Gauge):
            child.set(self._random.randint(1, 3))

    @staticmethod
    def _others() -> CollectorRegistry:
        registry = CollectorRegistry()
        for name in FOREIGN:
            if name != "up":  # Prometheus makes that one
                Gauge(name, "of another program", _labels(name), registry=registry)
        return registry

    @contextmanager
    def served(self) -> Iterator[str]:
        """`host:port` to scrape."""
        stand = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = stand.text()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _combinations(labelnames: Iterable[str]) -> list[dict[str, str]]:
    combinations: list[dict[str, str]] = [{}]
    for label in labelnames:
        values = SAMPLES.get(label, ("some",))
        combinations = [one | {label: value} for one in combinations for value in values]
    return combinations
