"""The controller: of `slackwater slurm run`, and of an operator's Slurm side (`side`).

Puts client, cluster, ledgers and metrics together and ticks until every job is done or it is told to stop.
Leaves its arrays as they are when it ends: Slurm goes on with them, and the next controller adopts them.  Sets no
signal handler, and leaves nothing open when it ends, so that it may be run in a thread and again.
"""

import logging
import os
import pwd
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server

from slackwater_operator.core import PermanentError
from slackwater_operator.status import StateFolder
from slackwater_slurm.changes import EARLY_S, Changes
from slackwater_slurm.client import open_client
from slackwater_slurm.client.base import SlurmClient
from slackwater_slurm.cluster import SlurmCluster
from slackwater_slurm.config import CleaningJob, Config
from slackwater_slurm.core import SlurmError
from slackwater_slurm.exporter import Exporter
from slackwater_slurm.ledger import LedgerWatch, Progress
from slackwater_slurm.observation import Array
from slackwater_slurm.sources import JobState, Listed, Source

logger = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0  # between tries while Slurm does not answer

Connect = Callable[[Exporter], SlurmClient]


def connector(config: Config, environ: Mapping[str, str]) -> Connect:
    """How a service of this configuration reaches its Slurm.   environ: this process's environment."""
    return lambda exporter: open_client(
        environ,
        config.client,
        conf=config.slurm_conf,
        timeout_s=config.command_timeout_s,
        watch=exporter.called,
    )


def this_user() -> str:
    """The name under which Slurm runs what this process submits.

    Raises PermanentError when there is none: our jobs could not be told from others'.
    """
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError as error:
        raise PermanentError(
            f"user id {os.geteuid()} has no name on this machine; run as a user whom Slurm knows"
        ) from error


@dataclass(slots=True)
class JobWatch:
    """What the service remembers of one job: how far it is, and whether its workers are any good."""

    spec: CleaningJob
    ledger: LedgerWatch
    settled: int = 0
    ended_early: int = 0  # workers that ended soon after their start, since an item was last settled
    is_wanted: bool = True  # False: its source has it no longer; its arrays are closed
    is_finished: bool = False
    failure: str = ""
    _answers: int = 0

    @property
    def is_known(self) -> bool:
        return self.ledger.progress is not None

    @property
    def is_open(self) -> bool:
        return self.is_wanted and not self.is_finished and not self.failure

    def look(self, now_s: float) -> None:
        """Ask the ledger when it is time; what is finished stays finished."""
        if not self.is_finished:
            self.ledger.poll(now_s)
        if self.ledger.progress is not None and self.ledger.answers > self._answers:
            self._answers = self.ledger.answers
            self._judge(self.ledger.progress)

    def _judge(self, progress: Progress) -> None:
        """Stop a job whose workers end and end and settle nothing; else they would be started for ever."""
        if progress.items_settled > self.settled:
            self.settled, self.ended_early = progress.items_settled, 0
        if progress.is_finished:
            self.is_finished = True
            logger.info("finished job=%s items=%d", self.spec.name, progress.items_settled)
        elif self.ended_early >= self.spec.max_failures and not self.failure:
            self.failure = (
                f"job {self.spec.name}: {self.ended_early} workers ended within {EARLY_S:g} s of their start and"
                f" settled nothing; their last words are in {self.spec.logs_folder}; mend that and start again"
            )
            logger.error("%s", self.failure)

    def count(self, changes: Changes) -> None:
        """Take note of ended workers; the ledger's next answer says whether they did anything."""
        if dict(changes.ended).get(self.spec.name):
            self.ledger.ask_soon()
        self.ended_early += dict(changes.ended_early).get(self.spec.name, 0)


@dataclass(slots=True)
class Service:
    """One controller.  `run` returns when `stop` is set, or every job is done and no more can come.

    source: where the jobs come from; the configuration's own by default.
    fence: called before each change at Slurm; what it raises ends the run.
    tell: told why Slurm cannot be worked with just now, "" when it can.
    show: is given the metrics; by default they are served on the configuration's own port.
    """

    config: Config
    connect: Connect
    source: Source | None = None
    user: str = field(default_factory=this_user)
    epoch_s: Callable[[], float] = time.time
    fence: Callable[[], None] = lambda: None
    tell: Callable[[str], None] = lambda _: None
    show: Callable[[CollectorRegistry], None] | None = None

    def run(self, stop: threading.Event) -> None:
        """Control until all is done.

        Raises PermanentError with one line for what a person must mend: an unknown partition or GPU type, no
        Slurm, a port in use, a job whose workers all fail.
        """
        if self.config.slurm_conf is not None and not self.config.slurm_conf.is_file():
            raise PermanentError(f"slurm_conf: {self.config.slurm_conf} is not a file")  # Slurm would search for 30 s
        source = self.source or Listed(self.config.jobs)
        exporter = Exporter()
        watches: dict[str, JobWatch] = {}
        with ExitStack() as stack:
            stack.enter_context(claimed(self.config.state_dir))
            stack.callback(_close, watches)
            cluster = SlurmCluster(
                self.connect(exporter),
                user=self.user,
                partition=self.config.partition,
                jobs=(),
                maintenance_lead_s=self.config.maintenance_lead_s,
                fence=self.fence,
            )
            if self.show is not None:
                self.show(exporter.registry)
            else:
                stack.enter_context(served(exporter.registry, self.config.metrics_port))
            self._keep_going(cluster, exporter, source, watches, stop)
        failures = [watch.failure for watch in watches.values() if watch.failure]
        if failures and not source.is_endless:
            raise PermanentError("; ".join(failures))

    def _keep_going(
        self,
        cluster: SlurmCluster,
        exporter: Exporter,
        source: Source,
        watches: dict[str, JobWatch],
        stop: threading.Event,
    ) -> None:
        wait_s = 0.0
        said = ""
        while not stop.is_set():
            try:
                if not cluster.is_connected:
                    cluster.connect()
                self._take(cluster, source, watches)
                for watch in watches.values():
                    watch.look(time.monotonic())
                is_done = self._tick(cluster, exporter, source, watches)
            except SlurmError as error:
                if isinstance(error, PermanentError) and not cluster.is_connected:
                    raise  # at the start a person is there; later a new release or a lost right may be mended
                wait_s = min(LONGEST_WAIT_S, max(FIRST_WAIT_S, 2 * wait_s))
                if str(error) != said:
                    logger.warning("no good answer from Slurm, trying again with back-off: %s", error)
                said = str(error)
                self.tell(said)
                stop.wait(wait_s)
                continue
            if said:
                logger.info("Slurm answers again")
            said, wait_s = "", 0.0
            self.tell("")
            if is_done:
                return
            stop.wait(self.config.tick_s)

    def _take(self, cluster: SlurmCluster, source: Source, watches: dict[str, JobWatch]) -> None:
        """Begin with new jobs, take changed ones as they are, close those that are wanted no longer.

        Raises PermanentError for a job of the configuration that could never run; another's is only said.
        """
        jobs = source.jobs()
        if jobs is None:
            return
        names = {job.name for job in jobs}
        for name, held in watches.items():
            held.is_wanted = name in names
        for job in jobs:
            watch = watches.get(job.name)
            if watch is not None and watch.spec == job:
                continue
            problem = cluster.unfit(job) or _make_logs_folder(job)
            if problem and not source.is_endless:
                raise PermanentError(problem)
            if problem:
                logger.error("%s", problem)
            if watch is not None and watch.spec.output == job.output and not watch.failure and not problem:
                watch.spec = job  # it wants more, or less
                continue
            if watch is not None:  # another ledger under the old name, or a person changed what had failed
                watch.ledger.close()
            watches[job.name] = JobWatch(job, LedgerWatch(job.output, self.config.progress_s), failure=problem)
        cluster.use([watch.spec for watch in watches.values()])

    def _tick(self, cluster: SlurmCluster, exporter: Exporter, source: Source, watches: dict[str, JobWatch]) -> bool:
        """One tick; True when every job is over, nothing of it is left in the queue, and no more can come."""
        open_jobs = {name: watch.is_open for name, watch in watches.items() if watch.is_known or not watch.is_wanted}
        tick = cluster.tick(self.epoch_s(), open_jobs)
        for watch in watches.values():
            watch.count(tick.changes)
        exporter.add(cluster.name, tick, {name: watch.ledger.progress or Progress() for name, watch in watches.items()})
        source.report(cluster.name, {name: _state(tick.seen.arrays, watch) for name, watch in watches.items()})
        left = {array.job for array in tick.seen.arrays}
        for name in [name for name, watch in watches.items() if not watch.is_wanted and name not in left]:
            watches.pop(name).ledger.close()
        is_over = not any(watch.is_open for watch in watches.values()) and not left & set(watches)
        return is_over and not source.is_endless


def _state(arrays: Sequence[Array], watch: JobWatch) -> JobState:
    mine = [array for array in arrays if array.job == watch.spec.name]
    return JobState(
        running=sum(array.held_workers for array in mine),
        waiting=sum(array.displaced + array.waiting - array.paused for array in mine),
        failure=watch.failure,
    )


def _close(watches: Mapping[str, JobWatch]) -> None:
    for watch in watches.values():
        watch.ledger.close()


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Be the folder's only controller for as long as the block lasts.  Raises PermanentError when another one is."""
    state = StateFolder(folder)
    state.claim()
    try:
        yield
    finally:
        state.release()


@contextmanager
def served(registry: CollectorRegistry, port: int | None) -> Iterator[None]:
    """Serve the metrics for as long as the block lasts.  Raises PermanentError when the port cannot be used."""
    if port is None:
        yield
        return
    try:
        server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise PermanentError(f"metrics_port {port} cannot be used: {error}") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _make_logs_folder(job: CleaningJob) -> str:
    """Slurm makes no folder for a job's output, and a job without one fails without a word.   "" = it is there."""
    try:
        job.logs_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"job {job.name}: the folder for logs cannot be made: {error}"
    return ""
