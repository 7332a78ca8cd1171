"""`slackwater operator run`: one replica of the operator, from its first list to the release of its Lease.

Puts the parts together: client, caches, intake with probes, metrics, election, and the leader's work.  Owns the order
of beginning and ending, and which failures end the process.  Decides nothing about GPUs.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Mapping

from prometheus_client import start_http_server

from slackwater_operator.core import PermanentError, TemporaryError
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.connection import Connection
from slackwater_operator.kube.election import Elector
from slackwater_operator.kube.events import Recorder
from slackwater_operator.kube.types import PODS
from slackwater_operator.operate import garbage
from slackwater_operator.operate.catalog import Catalog
from slackwater_operator.operate.children import Images
from slackwater_operator.operate.endpoints import Endpoints
from slackwater_operator.operate.intake import Intake, hand_over
from slackwater_operator.operate.lead import Leader, Means
from slackwater_operator.operate.metrics import Books, Metrics
from slackwater_operator.operate.settings import Settings
from slackwater_operator.operate.sides import Side, Sides
from slackwater_operator.operate.watches import Watches

logger = logging.getLogger(__name__)

COMPONENT = "slackwater-operator"
GAUGES_S = 5.0
LAG_S = 30.0  # the loop did not run for so long: what it knows is old, whatever the watches say


class Operator:
    """One process.  `run` returns after a SIGTERM, with the Lease released; raises what it cannot go on with.

    sides: what runs beside the leader's ticks, by name.
    """

    def __init__(self, connection: Connection, settings: Settings, sides: Mapping[str, Side] | None = None) -> None:
        self._connection = connection
        self._settings = settings
        self._metrics = Metrics()
        self._sides = Sides(sides or {})
        self._metrics.registry.register(self._sides.shown)
        self._poked = asyncio.Event()
        self._stop = asyncio.Event()
        self._beat_s = time.monotonic()
        self._watches: Watches | None = None
        self.metrics_port = 0

    async def run(self, announce: Callable[[str], None]) -> None:
        """Until SIGTERM or SIGINT.  Raises PermanentError for what a person must mend first."""
        running = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            running.add_signal_handler(number, self.stop)
        stop_metrics = self._serve_metrics()
        try:
            # Which of the replicas it was stands in the API server's audit log.
            async with Kube(self._connection, f"{COMPONENT} ({self._settings.identity})") as kube:
                with garbage.spared():
                    await self._run(kube, announce)
        finally:
            stop_metrics()

    def stop(self) -> None:
        """As a SIGTERM does."""
        self._stop.set()

    async def _run(self, kube: Kube, announce: Callable[[str], None]) -> None:
        settings = self._settings
        watches = self._watches = Watches(kube)
        recorder = Recorder(kube, COMPONENT, instance=settings.identity)
        elector = Elector(
            kube,
            settings.namespace,
            settings.lease,
            settings.identity,
            lease_s=settings.lease_s,
            renew_s=settings.renew_s,
            retry_s=settings.retry_s,
        )
        kube.before_write = elector.fence
        heard = hand_over(asyncio.get_running_loop(), watches.ours)
        intake = Intake(self._connection, settings.host, settings.probes_port, heard, self._sick)
        intake.start()
        announce(
            f"{settings.identity} watches {self._connection.server}; metrics on port {self.metrics_port}, "
            f"probes on port {settings.probes_port}"
        )
        base: dict[str, Awaitable[None]] = {
            "watches": watches.run(),
            "events": recorder.run(),
            "gauges": self._gauges(kube, watches),
        }
        tasks = {name: asyncio.ensure_future(act) for name, act in base.items()}
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            means = Means(
                kube,
                watches,
                Catalog.of(watches),
                Endpoints(watches.pods),
                settings,
                self._metrics,
                recorder.emit,
                sides=self._sides,
                leads=lambda: elector.is_leader,
                wall=kube.wall,
            )
            tasks["election"] = asyncio.ensure_future(elector.run(lambda: self._lead(means)))
            await asyncio.wait([*tasks.values(), stopping], return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():
                self._raise_first(tasks)
        finally:
            stopping.cancel()
            # The leader's work first and its Lease, then what it stands on.
            for name in ("election", "events", "gauges", "watches"):
                if name in tasks:
                    tasks[name].cancel()
                    await asyncio.gather(tasks[name], return_exceptions=True)
            await asyncio.to_thread(intake.stop)
            logger.info("ended identity=%s", settings.identity)

    async def _lead(self, means: Means) -> None:
        await means.watches.synced()
        images = await self._images(means.kube)
        try:
            await Leader(means, images, self._poked).run()
        finally:
            garbage.collect_all()  # what a leader knew of the fleet is one large cycle

    @staticmethod
    def _raise_first(tasks: Mapping[str, "asyncio.Future[None]"]) -> None:
        for name, task in tasks.items():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
            if task.done():
                raise RuntimeError(f"{name} ended, and should not have")

    async def _images(self, kube: Kube) -> Images:
        """Gateways run in our own image unless another is named: it has the command, and is on some node already."""
        image = self._settings.gateway_image
        while not image and self._settings.pod:
            try:
                pod = await kube.get(PODS, self._settings.pod, self._settings.namespace)
                image = str(pod["spec"]["containers"][0]["image"])
            except PermanentError as error:  # not in a pod after all: the engines' image it is
                logger.info("own image not known: %s", error)
                break
            except TemporaryError as error:  # any other image than that of before would restart every gateway
                await asyncio.sleep(error.delay_s)
        return Images(gateway=image, keeper=self._settings.keeper_image)

    # --- the probe, which is called in the intake's thread --------------------------------------------

    def _sick(self) -> str:
        """Why this process should be started again, "" = it should not."""
        lag_s = time.monotonic() - self._beat_s
        if lag_s > LAG_S:
            return f"the event loop has not run for {lag_s:.0f} s"
        return self._watches.dead(self._settings.stalled_after_s) if self._watches is not None else ""

    # --- metrics ------------------------------------------------------------------------------------

    def _serve_metrics(self) -> Callable[[], None]:
        settings = self._settings
        try:
            server, thread = start_http_server(
                settings.metrics_port, addr=settings.host, registry=self._metrics.registry
            )
        except OSError as error:
            raise PermanentError(f"metrics port {settings.metrics_port} cannot be used: {error.strerror}") from error
        self.metrics_port = server.server_port

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join(2.0)

        return stop

    async def _gauges(self, kube: Kube, watches: Watches) -> None:
        """What both replicas show."""
        books = Books(self._metrics)
        next_s = 0.0
        while True:
            await asyncio.sleep(1.0)
            now_s = self._beat_s = time.monotonic()
            if now_s < next_s:
                continue
            next_s = now_s + GAUGES_S
            books.requests(kube.counts)
            for plural, stalled_s in watches.stalled_s().items():
                self._metrics.stalled.labels(plural).set(round(stalled_s, 1))
