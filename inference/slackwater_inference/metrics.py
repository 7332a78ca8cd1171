"""The engine's Prometheus metrics, in a registry of their own.

Owns names, labels and buckets; `/metrics` renders the registry.  Labels come from closed sets, never
an id.  Created with the engine.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_STEP_BUCKETS_S = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512)
_LATENCY_BUCKETS_S = (0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_REQUEST_BUCKETS_S = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_TIER = "default"  # until API keys have tiers
_GPU_MODEL = "cpu"


class EngineMetrics:
    """All metrics of one engine process that serves one model."""

    def __init__(self, model: str, slots: int) -> None:
        self.registry = registry = CollectorRegistry()
        by_model = {"model": model, "tier": _TIER}
        on_device = {"model": model, "gpu_model": _GPU_MODEL}

        self._requests = Counter(
            "tts_requests_total",
            "Speech requests answered, by HTTP status.",
            ["model", "tier", "code", "transport"],
            registry=registry,
        )
        self._by_model = by_model
        self.first_audio_seconds = Histogram(
            "tts_first_audio_seconds",
            "From a request's arrival to its first audio.",
            ["model", "gpu_model", "tier"],
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        ).labels(**on_device, tier=_TIER)
        self.request_seconds = Histogram(
            "tts_request_seconds",
            "From a request's arrival to its last audio.",
            ["model", "tier"],
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        ).labels(**by_model)
        self.queue_seconds = Histogram(
            "tts_queue_seconds",
            "From a request's arrival to its slot.",
            ["model", "tier"],
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        ).labels(**by_model)
        self.requests_running = Gauge(
            "tts_requests_running", "Requests that hold a slot.", ["model"], registry=registry
        ).labels(model)
        self.requests_waiting = Gauge(
            "tts_requests_waiting", "Requests that wait for a slot.", ["model"], registry=registry
        ).labels(model)
        Gauge("tts_slots", "Decode slots.", ["model"], registry=registry).labels(model).set(slots)
        self.audio_seconds_total = Counter(
            "tts_audio_seconds_total", "Seconds of audio made.", ["model", "gpu_model"], registry=registry
        ).labels(**on_device)
        tokens = Counter("tts_tokens_total", "Tokens made.", ["model", "gpu_model", "kind"], registry=registry)
        self.semantic_tokens_total = tokens.labels(**on_device, kind="semantic")
        self.codebook_tokens_total = tokens.labels(**on_device, kind="codebook")
        self._rejected = Counter("tts_rejected_total", "Requests refused, by reason.", ["reason"], registry=registry)
        self._client_aborts = Counter(
            "tts_client_aborts_total", "Requests whose client went away, by phase.", ["phase"], registry=registry
        )
        self._step_seconds = Histogram(
            "tts_step_seconds",
            "One step's part, by phase and batch size.",
            ["phase", "batch_bucket"],
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )
        self.kv_used_ratio = Gauge("tts_kv_used_ratio", "Share of the KV blocks that is held.", registry=registry)
        self.model_load_seconds = Histogram(
            "tts_model_load_seconds",
            "Time to make the model ready.",
            ["source"],
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        ).labels("memory")

    def count_request(self, code: int) -> None:
        """One speech request over HTTP was answered with `code`."""
        self._requests.labels(**self._by_model, code=str(code), transport="http").inc()

    def count_rejected(self, reason: str) -> None:
        """One request was refused: queue_full, too_long or draining."""
        self._rejected.labels(reason).inc()

    def count_abort(self, phase: str) -> None:
        """One client went away: queued, first_audio or streaming."""
        self._client_aborts.labels(phase).inc()

    def observe_step(self, phase: str, batch: int, seconds: float) -> None:
        """A step's prefill, decode or codec part took `seconds` for `batch` rows."""
        # The next power of two, so that the label stays one of a few.
        self._step_seconds.labels(phase, str(1 << (batch - 1).bit_length())).observe(seconds)
