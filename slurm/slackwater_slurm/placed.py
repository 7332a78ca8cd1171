"""CleaningJobs of a Kubernetes cluster that have workers on this Slurm too, over one ledger.

Owns which of them are ours, how their fields read here, and what their status says of us.  Owns no decision on either
side.  A job's `maxWorkers` holds for both sides together: each takes what the other leaves, as the status says it.
This one leaves a worker to Kubernetes also before there is one, or the side that began first would have them all; and
what runs here is not sent back for what runs there, or the two would give way to each other for ever: Kubernetes does.
Runs its connection in a thread of its own, so that a cluster that is away costs the controller nothing: the jobs
stay as they were heard of last.
"""

import asyncio
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slackwater_operator.core import PermanentError, TemporaryError
from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.connection import Connection
from slackwater_operator.kube.types import Object, custom, name_of, namespace_of
from slackwater_operator.resources import names
from slackwater_operator.resources.cleaning import CleaningJob as Placed
from slackwater_operator.resources.flavor import GPUFlavor
from slackwater_operator.resources.parse import parse
from slackwater_slurm.config import CleaningJob, Kubernetes
from slackwater_slurm.sources import JobState

logger = logging.getLogger(__name__)

MANAGER = "slackwater/slurm"  # the field manager of what we say in a status
LONGEST_NAME = 40  # of a job of ours
RETRY_S = 5.0

JOBS = custom(names.CLEANING_JOB.plural, names.CLEANING_JOB.kind, names.CLEANING_JOB.namespaced)
FLAVORS = custom(names.GPU_FLAVOR.plural, names.GPU_FLAVOR.kind, names.GPU_FLAVOR.namespaced)


def job_name(namespace: str, name: str) -> str:
    """A job's name on this side.  A long one ends in a digest, so that two of them differ."""
    joined = f"{namespace}-{name}".replace(".", "-")
    if len(joined) <= LONGEST_NAME and namespace.count("-") == 0 and "." not in name:
        return joined
    digest = hashlib.sha256(f"{namespace}/{name}".encode()).hexdigest()[:8]
    return f"{joined[: LONGEST_NAME - 9].rstrip('-')}-{digest}"


def translated(placed: Placed, gres: Mapping[str, str], settings: Kubernetes) -> CleaningJob | str | None:
    """The job as it runs here; None if it is not for this cluster, or why it cannot run.

    gres: flavor to what Slurm calls it, such as gpu:h200.
    """
    spec = placed.spec
    if "Slurm" not in spec.placement or spec.suspend or not set(spec.pools) & set(settings.pools):
        return None
    if spec.slurm is None:
        return "slurm: inputPath and ledgerPath are required with Slurm in placement"
    types = tuple(dict.fromkeys(gres[flavor].partition(":")[2] for flavor in spec.flavors if flavor in gres))
    if not types:
        return f"flavors: none of {', '.join(spec.flavors)} has a slurmGres"
    if spec.gpus_per_worker != 1:
        return f"gpusPerWorker: must be 1 on Slurm, got {spec.gpus_per_worker}"
    gpu_types = () if "" in types else types
    elsewhere = sum((placed.status.workers.running, placed.status.workers.starting, placed.status.workers.leaving))
    theirs = 1 if "Kubernetes" in spec.placement else 0
    runs = placed.status.slurm.running if placed.status.slurm is not None else 0
    most = max(len(types), spec.max_workers - max(elsewhere, theirs), min(runs, spec.max_workers - theirs))
    return CleaningJob(
        name=job_name(placed.metadata.namespace or "", placed.metadata.name),
        input=Path(spec.slurm.input_path),
        output=Path(spec.slurm.ledger_path),
        ledger_job=placed.metadata.name,
        min_workers=min(1, most),
        max_workers=most,
        gpu_types=gpu_types,
        settings=dict(spec.slurm.settings),
        **settings.workers.model_dump(),
    )


class PlacedJobs:
    """A `sources.Source`.  Made by `follow`."""

    is_endless = True

    def __init__(
        self, settings: Kubernetes, loop: asyncio.AbstractEventLoop, fence: Callable[[], None] = lambda: None
    ) -> None:
        self._settings = settings
        self._fence = fence
        self._loop = loop
        self._lock = threading.Lock()
        self._jobs: tuple[CleaningJob, ...] | None = None
        self._keys: dict[str, tuple[str, str]] = {}  # our name of a job to its own
        self._problems: dict[str, str] = {}
        self._said: dict[str, Object] = {}
        self._kube: Kube | None = None

    def jobs(self) -> tuple[CleaningJob, ...] | None:
        with self._lock:
            return self._jobs

    def report(self, cluster: str, states: Mapping[str, JobState]) -> None:
        with self._lock:
            known = {name: self._keys[name] for name in states if name in self._keys}
            problems = dict(self._problems)
        for name, key in known.items():
            state = states[name]
            said = {
                "cluster": cluster,
                "running": state.running,
                "waiting": state.waiting,
                "message": state.failure or problems.get(name, ""),
            }
            asyncio.run_coroutine_threadsafe(self._say(name, key, said), self._loop)

    async def run(self, connection: Connection) -> None:
        """Follow the cluster until cancelled."""
        async with Kube(connection, user_agent="slackwater/slurm") as kube:
            kube.before_write = self._before_write
            self._kube = kube
            jobs, flavors = Cache(kube, JOBS), Cache(kube, FLAVORS)

            def look(*_: object) -> None:
                if jobs.synced.is_set() and flavors.synced.is_set():
                    self._take(list(jobs.values()), list(flavors.values()))

            jobs.on_change(look)
            flavors.on_change(look)
            async with asyncio.TaskGroup() as group:
                group.create_task(jobs.run())
                group.create_task(flavors.run())
                await jobs.synced.wait()
                await flavors.synced.wait()
                look()

    async def _before_write(self, *_: object) -> None:
        self._fence()

    def _take(self, jobs: Sequence[Object], flavors: Sequence[Object]) -> None:
        gres = {}
        for obj in flavors:
            try:
                flavor = parse(GPUFlavor, obj)
            except PermanentError:
                continue  # the operator says it in that object's conditions
            if flavor.spec.slurm_gres:
                gres[name_of(obj)] = flavor.spec.slurm_gres
        ours: list[CleaningJob] = []
        keys: dict[str, tuple[str, str]] = {}
        problems: dict[str, str] = {}
        for obj in jobs:
            if "deletionTimestamp" in obj["metadata"]:
                continue
            key = namespace_of(obj), name_of(obj)
            try:
                job = translated(parse(Placed, obj), gres, self._settings)
            except PermanentError as error:
                job = str(error)
            if job is None:
                continue
            name = job_name(*key)
            keys[name] = key
            if isinstance(job, CleaningJob):
                ours.append(job)
            else:
                problems[name] = job
                if self._problems.get(name) != job:
                    logger.error("CleaningJob %s cannot run on Slurm: %s", "/".join(key), job)
        with self._lock:
            self._jobs, self._keys, self._problems = tuple(ours), keys, problems
            self._said = {name: said for name, said in self._said.items() if name in keys}

    async def _say(self, name: str, key: tuple[str, str], said: dict[str, Any]) -> None:
        """Write it to the job's status, if it is news."""
        if self._kube is None or self._said.get(name) == said:
            return
        self._said[name] = said
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.CLEANING_JOB.kind,
            "metadata": {"namespace": key[0], "name": key[1]},
            "status": {"slurm": said},
        }
        try:
            await self._kube.apply(JOBS, body, manager=MANAGER, subresource="status")
        except (TemporaryError, PermanentError) as error:
            self._said.pop(name, None)
            logger.warning("the status of CleaningJob %s could not be written: %s", "/".join(key), error)


@contextmanager
def follow(
    settings: Kubernetes, connection: Connection, fence: Callable[[], None] = lambda: None
) -> Iterator[PlacedJobs]:
    """Follow a cluster's jobs in a thread for as long as the block lasts.

    fence: called before each write of a status; what it raises prevents it.
    """
    loop = asyncio.new_event_loop()
    source = PlacedJobs(settings, loop, fence)
    thread = threading.Thread(target=_follow, args=(loop, source, connection), name="placed-jobs", daemon=True)
    thread.start()
    try:
        yield source
    finally:
        loop.call_soon_threadsafe(_cancel_all, loop)
        thread.join(timeout=5)


def _follow(loop: asyncio.AbstractEventLoop, source: PlacedJobs, connection: Connection) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(source.run(connection))
    except asyncio.CancelledError:
        pass
    finally:
        loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
