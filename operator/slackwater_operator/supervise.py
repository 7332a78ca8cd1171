"""`slackwater up`: the supervisor of one machine.

Puts the parts together (slots, LocalCluster, Loop, status file, metrics), runs until it is told to
stop and then ends every child.  Decides nothing by itself.
"""

import asyncio
import contextlib
import json
import logging
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import start_http_server

from slackwater_operator.accounts import Accounts
from slackwater_operator.cluster.local import LocalCluster
from slackwater_operator.cluster.programs import Programs
from slackwater_operator.cluster.slots import Slot, find_slots
from slackwater_operator.config import EMBEDDED_VOICE, Config, Inference
from slackwater_operator.core import BudgetExceeded, Limits, PermanentError
from slackwater_operator.loop import Loop, ServiceSpec, VariantSpec
from slackwater_operator.metrics import Metrics
from slackwater_operator.status import StateFolder, document
from slackwater_operator.traffic import Window

logger = logging.getLogger(__name__)

SHORTEST_TICK_S = 0.1  # however often children ask for one
EVENT_LOG_BYTES = 8 << 20  # then the log is moved aside once


class EventLog:
    """events.jsonl in the state folder: one line for each start, wake, exit and reclaim."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        line = json.dumps({"t_s": round(time.monotonic(), 3), "event": event, **fields})
        with contextlib.suppress(OSError):  # a full disk must not stop the supervisor
            if self._path.exists() and self._path.stat().st_size > EVENT_LOG_BYTES:
                self._path.replace(self._path.with_suffix(".old.jsonl"))
            with self._path.open("a") as log:
                log.write(line + "\n")


class Supervisor:
    """Runs one configuration.  `run` returns once every child has ended."""

    def __init__(self, config: Config, programs: Programs | None = None) -> None:
        self._config = config
        self._folder = StateFolder(config.state_dir)
        self._programs = programs or Programs(config.inference)
        self._poked = asyncio.Event()
        self._stop = asyncio.Event()
        self._hard_stop = asyncio.Event()
        self._url = f"http://{config.inference.host}:{config.inference.port}" if config.inference else ""

    async def run(self, announce: Callable[[str], None]) -> None:
        """Start everything, keep it going, end everything.

        Raises PermanentError for what a person must mend first: a port in use, no slots, no input.
        """
        slots = find_slots(self._config.slots)
        self._check(slots)
        self._folder.claim()
        events = EventLog(self._config.state_dir / "events.jsonl")
        cluster = LocalCluster(self._config, slots, self._programs, on_event=events, poke=self._poked.set)
        loop = Loop(cluster, self._services(slots), self._limits())
        metrics = self._metrics()
        running = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            running.add_signal_handler(number, self._told_to_stop)
        announce(
            f"{len(slots)} {slots[0].flavor} slots; "
            + (f"speech at {self._url}/v1/tts; " if self._url else "")
            + f"status: slackwater status --state-dir {self._config.state_dir}"
        )
        try:
            await cluster.start()
            await self._keep_going(cluster, loop, slots, metrics)
        finally:
            await self._end(cluster, announce)
            self._folder.write(document(cluster, loop, slots, time.monotonic(), self._url))

    async def _keep_going(self, cluster: LocalCluster, loop: Loop, slots: tuple[Slot, ...], metrics: Metrics) -> None:
        observed = Observed(metrics)
        while not self._stop.is_set():
            began_s = time.monotonic()
            self._poked.clear()
            try:
                await loop.tick(began_s)
            except BudgetExceeded:
                logger.exception("dropped a plan that breaks the budget; please report this with the event log")
            await cluster.tend()
            if why := cluster.broken():
                raise PermanentError(why)
            if self._config.inference is None and cluster.jobs_ended():
                return
            self._folder.write(document(cluster, loop, slots, time.monotonic(), self._url))
            observed.update(cluster, loop, time.monotonic() - began_s)
            await self._sleep(began_s)

    async def _sleep(self, began_s: float) -> None:
        """Until the next tick is due, somebody pokes, or it is time to stop."""
        waits = [asyncio.ensure_future(self._poked.wait()), asyncio.ensure_future(self._stop.wait())]
        await asyncio.wait(waits, timeout=self._config.policy.tick_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        too_early_s = SHORTEST_TICK_S - (time.monotonic() - began_s)
        if too_early_s > 0 and not self._stop.is_set():
            await asyncio.sleep(too_early_s)

    def _told_to_stop(self) -> None:
        """The first signal ends in order, a second one at once."""
        if self._stop.is_set():
            self._hard_stop.set()
        self._stop.set()

    async def _end(self, cluster: LocalCluster, announce: Callable[[str], None]) -> None:
        grace_s = max([job.grace_s for job in self._config.cleaning], default=1.0)
        if self._config.inference:
            grace_s = max(grace_s, self._config.inference.drain_grace_s)
        announce("stopping: workers make their work durable, live streams finish (once more to stop at once)")
        orderly = asyncio.ensure_future(cluster.stop(grace_s))
        hurry = asyncio.ensure_future(self._hard_stop.wait())
        await asyncio.wait([orderly, hurry], return_when=asyncio.FIRST_COMPLETED)
        if not orderly.done():
            cluster.kill()
        await orderly
        hurry.cancel()

    # --- the parts from the configuration ----------------------------------------------------------

    def _check(self, slots: tuple[Slot, ...]) -> None:
        inference = self._config.inference
        if inference is not None:
            check_port(inference)
            if inference.min_replicas > len(slots):
                raise PermanentError(
                    f"inference.min_replicas is {inference.min_replicas}, but there are {len(slots)} slots"
                )
            if inference.keys_file is not None and not inference.keys_file.is_file():
                raise PermanentError(f"inference.keys_file: {inference.keys_file} is not a file")
            if inference.model != EMBEDDED_VOICE and not Path(inference.model).is_dir():
                raise PermanentError(
                    f"inference.model: {inference.model} is neither {EMBEDDED_VOICE} nor the folder of a checkpoint"
                )
        for index, job in enumerate(self._config.cleaning):
            if not job.input.is_dir():
                raise PermanentError(f"cleaning[{index}].input: {job.input} is not a folder")

    def _services(self, slots: tuple[Slot, ...]) -> tuple[ServiceSpec, ...]:
        inference = self._config.inference
        if inference is None:
            return ()
        return (
            ServiceSpec(
                name=inference.name,
                min_replicas=inference.min_replicas,
                max_replicas=inference.max_replicas,
                variants=tuple(
                    VariantSpec(f"{inference.name}/{flavor}", flavor, inference.slots_per_replica)
                    for flavor in sorted({slot.flavor for slot in slots})
                ),
                burst_slots=inference.burst_slots,
                deadband_replicas=inference.deadband_replicas,
                window=self._window(),
            ),
        )

    def _window(self) -> Window:
        policy = self._config.policy
        return Window(
            panic_s=policy.panic_s,
            stable_s=policy.stable_s,
            down_s=policy.down_s,
            stale_after_s=policy.stale_after_s,
            rise_quantile=policy.rise_quantile,
        )

    def _limits(self) -> Limits:
        policy = self._config.policy
        return Limits(
            lend_after_s=policy.lend_after_s,
            retarget_after_s=policy.retarget_after_s,
            max_parallel=policy.max_parallel,
        )

    def _metrics(self) -> Metrics:
        metrics = Metrics()
        if self._config.metrics_port is not None:
            try:
                start_http_server(self._config.metrics_port, addr="127.0.0.1", registry=metrics.registry)
            except OSError as error:
                raise PermanentError(f"metrics_port {self._config.metrics_port} cannot be used: {error}") from error
        return metrics


class Observed:
    """Carries the totals of loop and cluster into the metrics, as increments."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._seconds: dict[str, float] = {}
        self._reclaims = 0

    def update(self, cluster: LocalCluster, loop: Loop, tick_took_s: float) -> None:
        metrics = self._metrics
        metrics.reconcile.observe(tick_took_s)
        metrics.useful.set(loop.accounts.useful_ratio)
        self._add_seconds(loop.accounts)
        total = cluster.reclaims_by_reason.total()
        for reclaim in list(cluster.reclaims)[max(0, len(cluster.reclaims) - (total - self._reclaims)) :]:
            metrics.evictions.labels(reclaim.reason, reclaim.outcome).inc()
            metrics.eviction_seconds.observe(reclaim.took_s)
            metrics.lost_seconds.inc(reclaim.lost_s)
        self._reclaims = total
        for name, replicas in loop.plan.need_replicas:
            metrics.demand.labels(name).set(replicas)
        if loop.snapshot is not None and loop.snapshot.services:
            metrics.signal_age.set(min(1e9, loop.snapshot.services[0].load.age_s))

    def _add_seconds(self, accounts: Accounts) -> None:
        for state, seconds in accounts.seconds.items():
            self._metrics.gpu_seconds.labels(state).inc(max(0.0, seconds - self._seconds.get(state, 0.0)))
        self._seconds = dict(accounts.seconds)


def check_port(inference: Inference) -> None:
    """Raises PermanentError when the service's port cannot be listened on."""
    family = socket.AF_INET6 if ":" in inference.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((inference.host, inference.port))
        except OSError as error:
            raise PermanentError(
                f"inference.port {inference.port} on {inference.host} cannot be used: {error.strerror or error}"
            ) from error
