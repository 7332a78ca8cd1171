"""The adapter that reads through the library pyslurm; every change is `text`'s.

Optional: pyslurm is compiled for one Slurm release and must match the cluster's.  Owns the probe and what
pyslurm's objects mean.  Changes stay with the commands on purpose: pyslurm's cancel sends SIGKILL at once,
so a worker could not save, and it has no word for the waiting tasks of an array.

The library ends the whole process when it is imported where no slurm.conf is found, so it is tried in a
child process first; and it reads SLURM_CONF once, at its import.
"""

import importlib
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from slackwater_slurm.client import gres, show
from slackwater_slurm.client.command import Commands, Watch, failure
from slackwater_slurm.client.text import TextClient, array_tasks
from slackwater_slurm.core import ENDED, GpuCount, Job, Node, Partition, SlurmMissing, SlurmVersion

_PROBE = "import pyslurm; pyslurm.Partitions.load(); print(pyslurm.__version__)"


def probe(environ: Mapping[str, str], timeout_s: float = 20.0) -> SlurmVersion:
    """The Slurm release that pyslurm here is compiled for, once it has read something in a child process.

    Raises SlurmMissing with the reason: not installed, no slurm.conf, no controller.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], env=dict(environ), capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmMissing(f"pyslurm gave no answer within {timeout_s:g} s; use the text adapter") from error
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["it ended the process and said nothing; is there a slurm.conf?"])[
            -1
        ]
        raise SlurmMissing(f"pyslurm cannot be used here ({said[:200]}); use the text adapter")
    return SlurmVersion.parse(done.stdout)


class PyslurmClient(TextClient):
    """A SlurmClient whose jobs, nodes and partitions are read without a command.

    environ: this process's own environment: the library takes its SLURM_CONF from there, and the commands
    are given the same.  timeout_s: of a command; the library has Slurm's own, MessageTimeout (10 s).
    Raises SlurmMissing when pyslurm does not work here or was compiled for another release.
    """

    def __init__(self, environ: Mapping[str, str], *, timeout_s: float = 10.0, watch: Watch | None = None) -> None:
        super().__init__(Commands(environ, timeout_s=timeout_s, watch=watch))
        self._watch = watch
        compiled_for = probe(environ)
        cluster = self.version()
        if (compiled_for.major, compiled_for.minor) != (cluster.major, cluster.minor):
            raise SlurmMissing(
                f"pyslurm is compiled for Slurm {compiled_for.major}.{compiled_for.minor:02d}, this is {cluster}; "
                "install the pyslurm of that release or use the text adapter"
            )
        self._pyslurm = importlib.import_module("pyslurm")

    def partitions(self) -> tuple[Partition, ...]:
        return tuple(sorted((_partition(one) for one in self._load("Partitions")), key=lambda one: one.name))

    def nodes(self) -> tuple[Node, ...]:
        # Node.allocated_gres stays empty while GPUs are in use; what jobs hold is true.
        used: dict[str, GpuCount] = {}
        indexes: dict[str, dict[str, set[int]]] = {}
        for job in self._load("Jobs"):
            for name, text in _layout(job):
                used[name] = used.get(name, GpuCount()) + gres.gpus(text)
                for kind, some in gres.gpu_indexes(text):
                    indexes.setdefault(name, {}).setdefault(kind, set()).update(some)
        found = []
        for node in self._load("Nodes"):
            base, *flags = str(node.state).split("+")
            if base == "ALLOCATED" and node.idle_cpus:
                base = "MIXED"  # sinfo tells the two apart by CPUs, pyslurm does not
            state, responding = show.node_state_of_flags(base, flags)
            found.append(
                Node(
                    name=node.name,
                    state=state,
                    state_text=str(node.state).lower(),
                    gpus=gres.gpus(_text(node.configured_gres)),
                    gpus_used=used.get(node.name, GpuCount()),
                    partitions=tuple(sorted(node.partitions)),
                    responding=responding,
                    gpu_indexes_used=tuple(
                        sorted((kind, tuple(sorted(some))) for kind, some in indexes.get(node.name, {}).items())
                    ),
                    reason=node.reason or "",
                )
            )
        return tuple(sorted(found, key=lambda node: node.name))

    def jobs(self, *, detail: bool = False) -> tuple[Job, ...]:
        del detail  # always there
        found = [_job(job) for job in self._load("Jobs") if job.state not in ENDED]
        return tuple(
            sorted(found, key=lambda job: (job.array_id or job.job_id, -1 if job.task_id is None else job.task_id))
        )

    def _load(self, what: str) -> list[Any]:
        began_s = time.monotonic()
        is_ok = False
        try:
            found = list(getattr(self._pyslurm, what).load().values())
            is_ok = True
        except self._pyslurm.PyslurmError as error:
            raise failure("pyslurm", 1, str(error)) from error
        finally:
            if self._watch is not None:
                self._watch("pyslurm", time.monotonic() - began_s, is_ok)
        return found


def _partition(one: Any) -> Partition:
    return Partition(
        name=one.name,
        state=one.state,
        nodes=gres.hosts(one.nodes or ""),
        priority_tier=one.priority_tier or 0,
        preempt_mode=one.preempt_mode,
        grace_time_s=one.preemption_grace_time or 0,
        over_subscribe=one.oversubscribe,
        max_time_s=None if one.max_time in (None, "UNLIMITED") else int(one.max_time) * 60,
        is_default=bool(one.is_default),
    )


def _job(job: Any) -> Job:
    waiting = job.array_tasks_waiting or ""
    names = gres.hosts(job.allocated_nodes or "")
    layout = _layout(job)
    held = GpuCount()
    for _, text in layout:
        held = held + gres.gpus(text)
    task_id = None
    if job.array_id is not None and not waiting:
        task_id = job.array_task_id or 0  # pyslurm says None for task 0
    indexes = {name: tuple(sorted(i for _, some in gres.gpu_indexes(text) for i in some)) for name, text in layout}
    reason = job.state_reason or ""
    return Job(
        job_id=job.id,
        array_id=job.array_id,
        task_id=task_id,
        name=job.name or "",
        user=job.user_name or "",
        partition=job.partition or "",
        state=job.state,
        reason="" if reason in gres.NOTHING else reason,
        # A waiting `--gpus` request is not shown by this library and counts as none; `--gres` is.
        gpus=held if names else gres.gpus(_text(job.gres_per_node)).times(job.num_nodes or 1),
        nodes=names,
        restarts=job.requeue_count or 0,
        num_tasks=array_tasks(waiting)[0] if waiting else 1,
        throttle=(job.array_tasks_parallel or 0) if job.array_id is not None else None,
        comment=job.comment or "",
        reservation=job.reservation or "",
        submit_s=float(job.submit_time) if job.submit_time else None,
        start_s=float(job.start_time) if job.start_time else None,
        gpu_indexes=tuple(sorted((name, some) for name, some in indexes.items() if some)),
    )


def _layout(job: Any) -> list[tuple[str, str]]:
    """(node, GRES text) for each node on which a job holds something."""
    if job.state in ENDED or not job.allocated_nodes:
        return []
    layout = job.get_resource_layout_per_node()
    return [(node, _text(held["gres"])) for node, held in layout.items() if held.get("gres")]


def _text(found: Mapping[str, Any] | None) -> str:
    """pyslurm's `{"gpu:h200": 4}` or `{"gpu:h200": {"count": "1", "indexes": "0"}}` as Slurm writes it."""
    parts = []
    for key, value in (found or {}).items():
        is_held = isinstance(value, Mapping)
        parts.append(f"{key}:{value['count']}(IDX:{value['indexes']})" if is_held else f"{key}:{value}")
    return ",".join(parts)
