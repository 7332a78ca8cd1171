"""Sides of the operator: what runs beside the leader's ticks, such as the controller of a Slurm.

Owns what a side is, how one is found by its name (an entry point, so that no other room is imported here), and its
life: it begins when leadership is won, begins again with back-off when it fails, and has ended, or may change nothing
any more, before the Lease is released.  Each runs in a thread of its own, so that one that hangs costs no tick.  Owns
nothing of what a side does.  Called by `cli`, `process` and `lead`.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from slackwater_operator.core import PermanentError, TemporaryError
from slackwater_operator.kube.backoff import Backoff
from slackwater_operator.kube.connection import Connection

logger = logging.getLogger(__name__)

GROUP = "slackwater.sides"
END_S = 5.0  # for a side to end; one that hangs longer is left alone, its fence holds it
FIRST_S, LONGEST_S = 1.0, 60.0  # between a side's end and its next begin
STEADY_S = 300.0  # what ran for so long and fails begins again soon


@dataclass(frozen=True, slots=True)
class Term:
    """What a side is given for one time of leadership; all of it may be used from any thread."""

    stop: threading.Event
    """Set when it should end."""

    fence: Callable[[], None]
    """To be called before each change.  Raises TemporaryError when this replica leads no longer."""

    tell: Callable[[str], None]
    """Why it can do nothing just now; "" = it does its work.  Shown in the conditions of its pools."""

    show: Callable[[CollectorRegistry], None]
    """Its metrics, which the operator's port shows until it ends.  Their names must be no other's."""


class Side(Protocol):
    """Made from a configuration file and the operator's own connection."""

    @property
    def pools(self) -> Collection[str]:
        """The CapacityPools that it stands beside."""

    def run(self, term: Term) -> None:
        """Work until `term.stop` is set, in a thread of its own.  What it began in the world goes on without it.

        Raises PermanentError for what a person must mend, TemporaryError for what another try may: either way it is
        run again.
        """


Make = Callable[[Path, Connection, Mapping[str, str]], Side]
"""An entry point of `GROUP`: (file, connection, environment of this process) to a side.  Raises PermanentError with one
line when the file cannot be used."""


def open_sides(words: Iterable[str], connection: Connection, environ: Mapping[str, str]) -> dict[str, Side]:
    """The sides that `NAME=FILE` words ask for, by name; none has begun.

    Raises PermanentError with one line for a word that cannot be used.
    """
    found: dict[str, Side] = {}
    for word in words:
        name, _, file = word.partition("=")
        if not name or not file:
            raise PermanentError(f"a side is given as NAME=FILE, such as slurm=slurm.yaml; got {word!r}")
        if name in found:
            raise PermanentError(f"side {name} is given twice; one file has all its settings")
        make = _maker(name)
        path = Path(file)
        if not path.is_file():
            raise PermanentError(f"side {name}: there is no file {path}")
        found[name] = make(path, connection, environ)
    return found


def _maker(name: str) -> Make:
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        raise PermanentError(f"there is no side {name!r}; there are: {', '.join(sorted(points)) or 'none'}")
    point = points[name]
    try:
        make: Make = point.load()
    except ModuleNotFoundError as error:
        package = point.dist.name if point.dist is not None else point.module.partition(".")[0]
        wanted = f"pip install '{package}[{name}]'"
        raise PermanentError(f"side {name} needs the Python package {error.name!r}: {wanted}") from error
    return make


class Shown(Collector):
    """The metrics of the sides that run, as one part of the operator's own."""

    def __init__(self) -> None:
        self._registries: dict[str, CollectorRegistry] = {}

    def put(self, name: str, registry: CollectorRegistry) -> None:
        """Show a side's from now on."""
        self._registries[name] = registry

    def drop(self, name: str) -> None:
        """It has ended."""
        self._registries.pop(name, None)

    def collect(self) -> Iterator[Metric]:
        """Called by the metrics server, in a thread of its own."""
        for registry in [*self._registries.values()]:
            yield from registry.collect()


class Sides:
    """The sides of a process.   shown: to be registered with the operator's own metrics."""

    def __init__(
        self,
        sides: Mapping[str, Side],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.shown = Shown()
        self._sides = dict(sides)
        self._clock = clock
        self._sleep = sleep
        self._threads: dict[str, threading.Thread] = {}  # the newest of each
        self._words: dict[str, str] = {}  # what each that runs, or waits to run again, said last

    def word(self, pool: str) -> str | None:
        """What keeps the side of a pool from its work, "" = nothing; None if it has none, or has said nothing yet."""
        for name, side in self._sides.items():
            if pool in side.pools:
                return self._words.get(name)
        return None

    async def run(self, leads: Callable[[], bool], failed: Callable[[], None]) -> None:
        """Run all for one time of leadership, until cancelled.

        leads: whether this process leads, judged at each call and from any thread.   failed: called for each failure.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for name in self._sides:
                    group.create_task(self._keep(name, leads, failed), name=f"side {name}")
        finally:
            self._words.clear()

    async def _keep(self, name: str, leads: Callable[[], bool], failed: Callable[[], None]) -> None:
        backoff = Backoff(FIRST_S, LONGEST_S)
        said = ""
        while True:
            began_s = self._clock()
            error = await self._once(name, leads)
            if self._clock() - began_s >= STEADY_S:
                backoff.reset()
            failed()
            self._words[name] = word = str(error) or type(error).__name__
            if word != said:
                is_known = isinstance(error, (TemporaryError, PermanentError))
                logger.log(
                    logging.WARNING if is_known else logging.ERROR,
                    "side %s failed, begun again with back-off%s: %s",
                    name,
                    "" if is_known else "; please report this",
                    word,
                    exc_info=None if is_known else error,
                )
            said = word
            await self._sleep(backoff.next_s(error.delay_s if isinstance(error, TemporaryError) else 0.0))

    async def _once(self, name: str, leads: Callable[[], bool]) -> Exception:
        """Run it once, to its end; returns why it ended."""
        if (left := self._threads.get(name)) is not None and left.is_alive():
            return TemporaryError("its last run, of when this replica led before, has not ended yet")
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Exception] = loop.create_future()
        stop = threading.Event()

        def fence() -> None:
            if stop.is_set() or not leads():
                raise TemporaryError(f"side {name}: this replica does not lead")

        def in_loop(act: Callable[[], object]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(act)

        def heard(word: str) -> None:
            if not stop.is_set():
                self._words[name] = word

        def shown(registry: CollectorRegistry) -> None:
            if not stop.is_set():
                self.shown.put(name, registry)

        term = Term(stop, fence, lambda word: in_loop(lambda: heard(word)), lambda one: in_loop(lambda: shown(one)))

        def work() -> None:
            error: Exception = TemporaryError("it ended by itself")
            try:
                self._sides[name].run(term)
            except Exception as caught:  # noqa: BLE001 - whatever it is, it ends no tick, and `_keep` says it
                error = caught
            finally:
                in_loop(lambda: ended.set_result(error))

        # A daemon: a side that hangs must not keep the process from its end.
        thread = self._threads[name] = threading.Thread(target=work, name=f"side-{name}", daemon=True)
        logger.info("side %s begins", name)
        thread.start()
        try:
            await asyncio.wait([ended])
            return ended.result()
        finally:
            stop.set()
            self.shown.drop(name)
            if not ended.done():
                await asyncio.wait([ended], timeout=END_S)
                if ended.done():
                    logger.info("side %s ended", name)
                else:
                    logger.warning("side %s has not ended within %g s; it may change nothing any more", name, END_S)
            if ended.done():
                thread.join()  # it has nothing left to do
