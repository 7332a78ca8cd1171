"""The gateway as `LocalCluster` sees it: a child that serves clients, is told the replicas and tells the traffic."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slackwater_operator.cluster.child import Child
from slackwater_operator.cluster.members import BAD_INPUT, Member, Owner
from slackwater_operator.core import Kind, Phase, TrafficSample

logger = logging.getLogger(__name__)


class Front:
    """Keeps one gateway alive.

    signals: the newest event of that name, {} before the first.
    """

    def __init__(
        self,
        command: list[str],
        log: Path,
        *,
        clock: Callable[[], float],
        on_event: Callable[[str, dict[str, Any]], None],
        poke: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> None:
        self._command = command
        self._log = log
        self._clock = clock
        self._on_event = on_event
        self._poke = poke
        self._on_ready = on_ready
        self._child: Child | None = None
        self._ready = False
        self._stopping = False
        self._samples: list[TrafficSample] = []
        self._queued = 0
        self.state = Owner()
        self.signals: dict[str, Any] = {}

    @property
    def child(self) -> Child | None:
        """None while it is down."""
        return self._child

    async def tend(self, now_s: float) -> None:
        """Start it when it is not there and may be."""
        if self._child is None and self.state.may_start(now_s):
            try:
                self._child = await Child.start(
                    "gateway", self._command, log=self._log, on_event=self._hear, on_exit=self._gone
                )
            except OSError as error:  # too many processes or files
                logger.warning("the gateway could not be started backoff_s=%.0f: %s", self.state.failed(now_s), error)

    def tell(self, members: list[Member]) -> None:
        """Name the replicas that take requests: all that serve and do not leave."""
        if self._child is not None and self._ready:
            serving = [m for m in members if m.kind is Kind.INFERENCE and m.phase is Phase.RUNNING and m.url]
            replicas = [{"uid": m.uid, "url": m.url, "slots": m.decode_slots} for m in serving]
            self._child.say({"set": "replicas", "replicas": replicas})

    def take_samples(self) -> tuple[TrafficSample, ...]:
        """The samples since the last call, in time order."""
        samples, self._samples = tuple(self._samples), []
        return samples

    def stop(self) -> None:
        """It will not be started again."""
        self._stopping = True

    def _hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "ready":
            self._ready = True
            self._on_event("gateway", {"url": event.get("url")})
            self._on_ready()
        elif event["event"] == "signals":
            self.signals = event
            sample = TrafficSample(
                t_s=self._clock(),
                in_flight=int(event.get("in_flight") or 0),
                queued=int(event.get("queued") or 0),
                arrivals_total=int(event.get("arrivals_total") or 0),
                oldest_queued_s=float(event.get("oldest_queued_s") or 0.0),
                first_audio_p95_s=event.get("first_audio_p95_s"),
            )
            self._samples.append(sample)
            if sample.queued > self._queued:
                self._poke()
            self._queued = sample.queued

    def _gone(self, code: int) -> None:
        child, self._child, self._ready = self._child, None, False
        if self._stopping:
            return
        words = child.last_words() if child else ""
        if code == BAD_INPUT:
            self.state.broken = words or "bad input"
        else:
            delay_s = self.state.failed(self._clock())
            logger.error("the gateway ended code=%d backoff_s=%.0f %s", code, delay_s, words)
        self._on_event("exit", {"uid": "gateway", "slot": None, "code": code, "reason": None})
        self._poke()
