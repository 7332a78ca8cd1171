"""The default adapter: Slurm's commands with explicit columns, the same on every release since 22.05.

Owns the columns and how a line becomes a value.  Columns end in a mark that nobody else can know, so a
job's name or comment, which may hold any byte, cannot pass for another column or another job.
"""

import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from slackwater_slurm.client import gres, show
from slackwater_slurm.client.command import Commands
from slackwater_slurm.core import (
    GpuCount,
    Job,
    Node,
    OutputCut,
    Partition,
    Reservation,
    SlurmUnavailable,
    SlurmVersion,
    Submission,
    UnknownShape,
)

logger = logging.getLogger(__name__)

_NODE_COLUMNS = ("NodeList", "StateLong", "Gres", "GresUsed", "Partition", "Reason")
_JOB_COLUMNS = (
    "JobID",
    "JobArrayID",
    "State",
    "Partition",
    "Reason",
    "NodeList",
    "NumNodes",
    "NumTasks",
    "tres-per-job",
    "tres-per-node",
    "tres-per-task",
    "tres-per-socket",
    "RestartCnt",
    "SubmitTime",
    "StartTime",
    "Reservation",
    "UserName",
    "Name",
    "Comment",
)
_GONE = ("invalid job id", "already completing or completed", "already finished", "no error")
# `Nodes=h[1-2] CPU_IDs=0 Mem=100 GRES=gpu:h200:1(IDX:2)`, once for each group of like nodes.
_GROUP = re.compile(r"\sNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_REFS_A_CALL = 200  # keeps argument lists far below the kernel's limit


class TextClient:
    """A SlurmClient over `squeue`, `sinfo`, `scontrol`, `sbatch` and `scancel`."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._mark = secrets.token_hex(4)
        self._version: SlurmVersion | None = None

    def ping(self) -> None:
        said = self._commands.run("scontrol", "ping")
        if not re.search(r"\bis UP\b", said):
            raise SlurmUnavailable(f"scontrol ping: no controller is up ({' '.join(said.split())[:200]})", delay_s=5.0)

    def version(self) -> SlurmVersion:
        if self._version is None:
            self._version = SlurmVersion.parse(self._commands.run("scontrol", "--version"))
        return self._version

    def config(self) -> Mapping[str, str]:
        return show.config(self._commands.run("scontrol", "show", "config"))

    def partitions(self) -> tuple[Partition, ...]:
        return show.partitions(self._commands.run("scontrol", "-a", "-o", "show", "partition"))

    def reservations(self) -> tuple[Reservation, ...]:
        return show.reservations(self._commands.run("scontrol", "-a", "-o", "show", "reservation"))

    def nodes(self) -> tuple[Node, ...]:
        found: dict[str, Node] = {}
        memberships: dict[str, list[str]] = {}
        for row in self._table("sinfo", ("-h", "-a", "-N"), _NODE_COLUMNS):
            # One line a node and partition; the default partition carries a star.
            memberships.setdefault(row["NodeList"], []).append(row["Partition"].removesuffix("*"))
            found[row["NodeList"]] = _node(row)
        return tuple(
            replace(node, partitions=tuple(sorted(set(memberships[name]) - {""})))
            for name, node in sorted(found.items())
        )

    def jobs(self, *, detail: bool = False) -> tuple[Job, ...]:
        # -r: without it squeue joins tasks that were requeued with those that never ran, and their restarts are lost.
        rows = self._table("squeue", ("-h", "-a", "-r"), _JOB_COLUMNS)
        held = _held_gpus(self._commands.run("scontrol", "-a", "-d", "-o", "show", "job")) if detail and rows else {}
        found = _joined([_job(row, held.get(int(row["JobID"]))) for row in rows])
        return tuple(
            sorted(found, key=lambda job: (job.array_id or job.job_id, -1 if job.task_id is None else job.task_id))
        )

    def submit(self, submission: Submission) -> int:
        printed = self._commands.run("sbatch", "--parsable", *sbatch_options(submission), stdin=submission.script)
        number = printed.strip().split(";")[0]
        if not number.isdecimal():
            raise UnknownShape(f"sbatch --parsable: a job id was expected, got {printed[:80]!r}")
        logger.info("submitted job=%s name=%s tasks=%s", number, submission.name, submission.num_tasks)
        return int(number)

    def set_throttle(self, array_id: int, max_running: int) -> None:
        if max_running < 1:
            raise ValueError(f"max_running must be 1 or more, got {max_running}: Slurm takes 0 for no limit; use hold")
        self._commands.run("scontrol", "update", f"JobId={array_id}", f"ArrayTaskThrottle={max_running}")

    def hold(self, refs: Sequence[str]) -> None:
        self._each("scontrol", "hold", refs)

    def release(self, refs: Sequence[str]) -> None:
        self._each("scontrol", "release", refs)

    def resume(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            self._commands.run("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def requeue(self, refs: Sequence[str]) -> None:
        self._each("scontrol", "requeue", refs, "job is pending execution")

    def cancel(self, refs: Sequence[str]) -> None:
        self._each("scancel", "", refs)

    def _each(self, command: str, verb: str, refs: Sequence[str], *passing: str) -> None:
        for ref in refs:
            if not re.fullmatch(r"\d+(_\d+)?", ref):
                raise ValueError(f"a job is 12 or 12_3, got {ref!r}")
        for start in range(0, len(refs), _REFS_A_CALL):
            some = refs[start : start + _REFS_A_CALL]
            argv = (verb, ",".join(some)) if verb else some  # scancel takes words, scontrol a list
            self._commands.run(command, *argv, passing=(*_GONE, *passing))

    def _table(self, command: str, options: Sequence[str], columns: Sequence[str]) -> list[dict[str, str]]:
        between, end = f"\x1f{self._mark}", f"\x1e{self._mark}"
        marks = [between] * (len(columns) - 1) + [end]
        # Width 0: as long as the value is; any other width would cut it without a word.
        form = ",".join(f"{column}:0{mark}" for column, mark in zip(columns, marks, strict=True))
        output = self._commands.run(command, *options, "-O", form)
        *lines, rest = output.split(f"{end}\n")
        if rest:
            raise OutputCut(f"{command}: the output ends inside a record ({rest[-40:]!r})")
        rows = [line.split(between) for line in lines]
        for row in rows:
            if len(row) != len(columns):
                raise UnknownShape(
                    f"{command}: {len(columns)} columns were asked for, got {len(row)}: {row[0][:40]!r} …"
                )
        return [dict(zip(columns, (value.strip() for value in row), strict=True)) for row in rows]


def sbatch_options(submission: Submission) -> tuple[str, ...]:
    """What `sbatch` is told beside the script."""
    given: dict[str, str | int | None] = {
        "job-name": submission.name,
        "partition": submission.partition,
        "nodes": submission.num_nodes,
        "comment": submission.comment,
        "reservation": submission.reservation,
        "output": submission.output,
        "chdir": submission.work_dir,
        "time": submission.time_limit,
        "open-mode": "append" if submission.append_output else None,
    }
    if submission.gpus is not None:
        given["gres"] = ":".join(filter(None, ("gpu", submission.gpu_type, str(submission.gpus))))
    if submission.num_tasks is not None:
        given["array"] = f"0-{submission.num_tasks - 1}" + (
            f"%{submission.max_running}" if submission.max_running else ""
        )
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    if submission.requeue is not None:
        options.append("--requeue" if submission.requeue else "--no-requeue")
    if submission.hold:
        options.append("--hold")
    return (*options, *submission.options)


def array_tasks(text: str) -> tuple[int, int]:
    """(tasks, throttle) of what waits of an array, such as `6-7%6`; the throttle is 0 without one."""
    tasks, _, throttle = text.partition("%")
    return len(gres.numbers(tasks)), int(throttle or 0)


def asked_gpus(per_job: str, per_node: str, per_task: str, per_socket: str, num_nodes: int, num_tasks: int) -> GpuCount:
    """GPUs that a request amounts to.  `--gpus-per-socket` counts as one socket a node: sockets are not known here."""
    if total := gres.gpus(per_job):
        return total
    if of_node := gres.gpus(per_node):
        return of_node.times(num_nodes)
    if of_task := gres.gpus(per_task):
        return of_task.times(num_tasks)
    return gres.gpus(per_socket).times(num_nodes)


def _node(row: Mapping[str, str]) -> Node:
    state, responding = show.node_state(row["StateLong"])
    return Node(
        name=row["NodeList"],
        state=state,
        state_text=row["StateLong"],
        gpus=gres.gpus(row["Gres"]),
        gpus_used=gres.gpus(row["GresUsed"]),
        responding=responding,
        gpu_indexes_used=gres.gpu_indexes(row["GresUsed"]),
        reason="" if row["Reason"] in gres.NOTHING else row["Reason"],
    )


def _joined(jobs: Sequence[Job]) -> list[Job]:
    """Tasks that never ran as the one record per array that the controller keeps of them."""
    joined: list[Job] = []
    waiting: dict[int, list[Job]] = {}
    for job in jobs:
        if job.array_id is not None and job.job_id == job.array_id and job.is_pending and job.restarts == 0:
            waiting.setdefault(job.array_id, []).append(job)
        else:
            joined.append(job)
    for tasks in waiting.values():
        joined.append(replace(tasks[0], task_id=None, num_tasks=sum(task.num_tasks for task in tasks)))
    return joined


@dataclass(frozen=True, slots=True)
class _Held:
    """What `scontrol show job -d` adds to a line of squeue."""

    gpus: GpuCount
    indexes: tuple[tuple[str, tuple[int, ...]], ...]
    throttle: int


def _held_gpus(output: str) -> dict[int, _Held]:
    """What each job holds.  A job that is told of twice is left out: somebody's job name forged a record."""
    found: dict[int, _Held] = {}
    forged: set[int] = set()
    for record in re.split(r"^(?=JobId=\d)", output, flags=re.MULTILINE)[1:]:
        match = re.match(r"JobId=(\d+)", record)
        assert match is not None
        number = int(match[1])
        if number in found:
            forged.add(number)
        held = GpuCount()
        indexes: dict[str, tuple[int, ...]] = {}
        for nodes, text in _GROUP.findall(record):
            names = gres.hosts(nodes)
            held = held + gres.gpus(text).times(len(names))
            if mine := tuple(sorted(index for _, some in gres.gpu_indexes(text) for index in some)):
                indexes |= dict.fromkeys(names, mine)
        throttle = re.search(r" ArrayTaskThrottle=(\d+) ", record)
        found[number] = _Held(held, tuple(sorted(indexes.items())), int(throttle[1]) if throttle else 0)
    if forged:
        logger.warning("passing over what scontrol says of jobs=%s: each has two records", sorted(forged))
    return {number: held for number, held in found.items() if number not in forged}


def _job(row: Mapping[str, str], held: _Held | None) -> Job:
    array = re.fullmatch(r"(\d+)(?:_(?:(\d+)|\[(.+)\]))?", row["JobArrayID"])
    if array is None or not row["JobID"].isdecimal():
        raise UnknownShape(f"squeue: a job such as 12_3 or 12_[4-9%2] was expected, got {row['JobArrayID'][:80]!r}")
    num_tasks, throttle = (1, None) if array[3] is None else array_tasks(array[3])
    # After a requeue squeue no longer shows a throttle that is in force, so a missing one tells nothing.
    throttle = held.throttle if held is not None and "_" in row["JobArrayID"] else throttle or None
    is_running = row["NodeList"] not in gres.NOTHING
    asked = asked_gpus(
        row["tres-per-job"],
        row["tres-per-node"],
        row["tres-per-task"],
        row["tres-per-socket"],
        int(row["NumNodes"]),
        int(row["NumTasks"]),
    )
    return Job(
        job_id=int(row["JobID"]),
        array_id=int(array[1]) if "_" in row["JobArrayID"] else None,
        task_id=int(array[2]) if array[2] else None,
        name=row["Name"],
        user=row["UserName"],
        partition=row["Partition"],
        state=row["State"],
        reason="" if row["Reason"] in gres.NOTHING else row["Reason"],
        gpus=held.gpus if held is not None and is_running else asked,
        nodes=gres.hosts(row["NodeList"]),
        restarts=int(row["RestartCnt"]),
        num_tasks=num_tasks,
        throttle=throttle,
        comment="" if row["Comment"] == "(null)" else row["Comment"],
        reservation="" if row["Reservation"] in gres.NOTHING else row["Reservation"],
        submit_s=gres.moment_s(row["SubmitTime"]),
        start_s=gres.moment_s(row["StartTime"]),
        gpu_indexes=held.indexes if held is not None else None,
    )
