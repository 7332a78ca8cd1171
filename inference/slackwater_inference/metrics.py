"""The engine's Prometheus metrics, in a registry of their own.

Owns names, labels and buckets; `/metrics` renders the registry.  Labels come from closed sets, never
an id.  Created with the engine.
"""

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from slackwater_inference.core import EndReason

TIERS = ("default", "starter", "elevated", "high-volume")
"""What a caller's tier may be; `default` is a caller without a key."""

_STEP_BUCKETS_S = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512)
_LATENCY_BUCKETS_S = (0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_REQUEST_BUCKETS_S = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_GAP_BUCKETS_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_RATIO_BUCKETS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0)
_GPU_MODEL = "cpu"


class EngineMetrics:
    """All metrics of one engine process that serves one model."""

    def __init__(self, model: str, slots: int) -> None:
        self.registry = registry = CollectorRegistry()
        self._model = model
        on_device = {"model": model, "gpu_model": _GPU_MODEL}

        def histogram(name: str, text: str, labels: list[str], buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        def counter(name: str, text: str, labels: list[str] | None = None) -> Counter:
            return Counter(name, text, labels or [], registry=registry)

        self._requests = counter(
            "tts_requests_total",
            "Speech requests answered, by status; that of a websocket is what its handshake and its end amount to.",
            ["model", "tier", "code", "transport"],
        )
        self._first_audio = histogram(
            "tts_first_audio_seconds",
            "From a stream's opening to its first audio.",
            ["model", "gpu_model", "tier"],
            _LATENCY_BUCKETS_S,
        )
        self._first_audio_from_text = histogram(
            "tts_first_audio_from_text_seconds",
            "From a stream's first text to its first audio.",
            ["model", "gpu_model", "tier"],
            _LATENCY_BUCKETS_S,
        )
        self._request_seconds = histogram(
            "tts_request_seconds", "From a stream's opening to its last audio.", ["model", "tier"], _REQUEST_BUCKETS_S
        )
        self._queue_seconds = histogram(
            "tts_queue_seconds", "From a stream's first text to its slot.", ["model", "tier"], _LATENCY_BUCKETS_S
        )
        self._stream_gap = histogram(
            "tts_stream_gap_seconds",
            "The longest time in which a stream's listener had text to hear and nothing to play.",
            ["model"],
            _GAP_BUCKETS_S,
        ).labels(model)
        self._realtime_ratio = histogram(
            "tts_realtime_ratio",
            "A stream's audio seconds per second in which it had text to speak.",
            ["model", "gpu_model"],
            _RATIO_BUCKETS,
        ).labels(**on_device)
        self._underruns = counter(
            "tts_underruns_total", "Times that a listener had text to hear and nothing to play.", ["model"]
        ).labels(model)
        self.requests_running = self._gauge("tts_requests_running", "Sequences that hold a slot.")
        self.requests_waiting = self._gauge("tts_requests_waiting", "Sequences that wait for a slot.")
        self._gauge("tts_slots", "Decode slots.").set(slots)
        self._queue_age = self._gauge("tts_queue_age_seconds", "Age of the oldest text that waits for a slot.")
        self.audio_seconds_total = counter(
            "tts_audio_seconds_total", "Seconds of audio made.", ["model", "gpu_model"]
        ).labels(**on_device)
        tokens = counter("tts_tokens_total", "Tokens made.", ["model", "gpu_model", "kind"])
        self._semantic_tokens = tokens.labels(**on_device, kind="semantic")
        self._codebook_tokens = tokens.labels(**on_device, kind="codebook")
        self._parts = counter("tts_parts_total", "Text parts spoken, by how they ended.", ["reason"])
        self._rejected = counter("tts_rejected_total", "Requests refused, by reason.", ["reason"])
        self._client_aborts = counter("tts_client_aborts_total", "Streams whose client went away, by phase.", ["phase"])
        self._step_seconds = histogram(
            "tts_step_seconds", "One step's part, by phase and batch size.", ["phase", "batch_bucket"], _STEP_BUCKETS_S
        )
        self.kv_used_ratio = Gauge("tts_kv_used_ratio", "Share of the KV blocks that is held.", registry=registry)
        self.kv_waits = counter("tts_kv_waits_total", "Frames put off by a step, for want of a KV block.")
        self.prefix_hit_tokens = counter(
            "tts_prefix_hit_tokens_total", "Prompt positions that the prefix cache spared."
        )
        self._voice_cache = counter("tts_voice_cache_total", "Look-ups of a voice's codes in memory.", ["result"])
        self._model_load = histogram(
            "tts_model_load_seconds",
            "Time to make the model ready, by where it came from.",
            ["source"],
            _REQUEST_BUCKETS_S,
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model"], registry=self.registry).labels(self._model)

    def watch_queue_age(self, age_s: Callable[[], float]) -> None:
        """Ask `age_s` for the queue's age whenever the metrics are read."""
        self._queue_age.set_function(age_s)

    def count_request(self, code: int, transport: Literal["http", "ws"] = "http", tier: str = "default") -> None:
        """One speech request was answered with `code`."""
        self._requests.labels(self._model, _known(tier), str(code), transport).inc()

    def count_rejected(self, reason: Literal["queue_full", "rate", "too_long", "draining"]) -> None:
        """One request was refused."""
        self._rejected.labels(reason).inc()

    def count_abort(self, phase: str) -> None:
        """One client went away: queued, first_audio or streaming."""
        self._client_aborts.labels(phase).inc()

    def count_part(self, reason: EndReason) -> None:
        """One part of a text was spoken to its end, or to where it was ended."""
        self._parts.labels(reason.value).inc()

    def count_tokens(self, num_frames: int, num_codebooks: int) -> None:
        """So many frames were made."""
        self._semantic_tokens.inc(num_frames)
        self._codebook_tokens.inc(num_frames * (num_codebooks - 1))

    def count_voice(self, result: Literal["hit", "miss", "evict"]) -> None:
        """A voice was looked up in memory, or dropped from it."""
        self._voice_cache.labels(result).inc()

    def observe_load(self, source: Literal["memory", "folder"], seconds: float) -> None:
        """The model was made ready, from seeded weights or from a checkpoint's folder."""
        self._model_load.labels(source).observe(seconds)

    def observe_queue(self, tier: str, seconds: float) -> None:
        """A stream's first text waited so long for its slot."""
        self._queue_seconds.labels(self._model, _known(tier)).observe(seconds)

    def observe_first_audio(self, tier: str, from_open_s: float, from_text_s: float) -> None:
        """A stream's first audio was made."""
        self._first_audio.labels(self._model, _GPU_MODEL, _known(tier)).observe(from_open_s)
        self._first_audio_from_text.labels(self._model, _GPU_MODEL, _known(tier)).observe(from_text_s)

    def observe_stream(self, tier: str, *, total_s: float, speaking_s: float, audio_s: float) -> None:
        """A stream was spoken to its end; for `speaking_s` of its `total_s` seconds it had text to speak."""
        self._request_seconds.labels(self._model, _known(tier)).observe(total_s)
        self._realtime_ratio.observe(audio_s / max(speaking_s, 1e-3))

    def observe_gaps(self, num_underruns: int, longest_s: float) -> None:
        """A stream is over; its listener ran dry so often, for so long at most."""
        self._underruns.inc(num_underruns)
        self._stream_gap.observe(longest_s)

    def observe_step(self, phase: Literal["prefill", "decode", "codec"], batch: int, seconds: float) -> None:
        """A step's part took `seconds` for `batch` rows."""
        # The next power of two, so that the label stays one of a few.
        self._step_seconds.labels(phase, str(1 << (batch - 1).bit_length())).observe(seconds)


def _known(tier: str) -> str:
    if tier not in TIERS:
        raise ValueError(f"tier must be one of {', '.join(TIERS)}, got {tier!r}; labels are a closed set")
    return tier
