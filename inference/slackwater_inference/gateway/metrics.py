"""The gateway's own numbers in Prometheus's text form.

Owns the `edge_` names and their registry.  `app` counts; nothing else reads them in this process.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from slackwater_inference.gateway.routing import Router

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
TTFB_BUCKETS_S = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 30.0)


class EdgeMetrics:
    """Counters and histograms with closed label sets, and gauges read from the router."""

    def __init__(self, router: Router) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "edge_requests_total",
            "Requests that ended, by status sent (499: the client left before it)",
            ["code"],
            registry=self._registry,
        )
        self.rejected = Counter(
            "edge_rejected_total",
            "Requests refused here (queue_full, no_slot, no_replica, too_large, memory)",
            ["reason"],
            registry=self._registry,
        )
        self.retries = Counter(
            "edge_retries_total",
            "Tries on a replica that ended before a byte (unreachable, died, declined)",
            ["reason"],
            registry=self._registry,
        )
        self.client_aborts = Counter(
            "edge_client_aborts_total",
            "Requests whose client left (queued, first_byte, streaming)",
            ["phase"],
            registry=self._registry,
        )
        self.broken = Counter(
            "edge_broken_streams_total", "Answers that a replica ended in their middle", registry=self._registry
        )
        self.ttfb = Histogram(
            "edge_ttfb_seconds",
            "Arrival to first body byte of requests that hold a slot",
            buckets=TTFB_BUCKETS_S,
            registry=self._registry,
        )
        in_flight = Gauge("edge_in_flight", "Requests that hold a slot", registry=self._registry)
        in_flight.set_function(lambda: router.in_flight)
        queued = Gauge("edge_queued", "Requests that wait for a slot", registry=self._registry)
        queued.set_function(lambda: router.queued)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)
