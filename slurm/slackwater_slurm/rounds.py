"""A stage for preemption: cleaning on every GPU of a lab, training that comes and goes, every moment on record.

Owns what the tests and the bench share: jobs that write down when they start and end, and that hold a lock on each GPU
they were given.  A lock is the kernel's and goes with the process, so a GPU that two jobs use at one moment is seen
without any polling.  The scripts are those of `templates`, unchanged.
"""

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slackwater_slurm.core import SlurmUnavailable
from slackwater_slurm.lab import Lab
from slackwater_slurm.templates.scripts import CleanScript, TrainScript, clean_script, train_script

_POLL_S = 0.02

# watched KIND COMMAND…: writes a line for its start, locks its GPUs, and becomes the command.  A line is one write to
# a file opened for appending, so lines of many jobs do not mix.
_WATCHED = """#!/bin/bash
kind=$1; shift
say() {{
    printf '%s %s %s %s %s %s %s\\n' "$EPOCHREALTIME" "$kind" "$1" "${{SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}}" \
        "${{SLURM_RESTART_COUNT:-0}}" "$SLURMD_NODENAME" "$CUDA_VISIBLE_DEVICES" >>{folder}/events
}}
for gpu in ${{CUDA_VISIBLE_DEVICES//,/ }}; do
    exec {{lock}}>>"{folder}/locks/$SLURMD_NODENAME.$gpu"
    flock --nonblock "$lock" || say shared
done
say start
if [ "$kind" = clean ]; then exec "$@"; fi
"$@"
code=$?
say end
exit $code
"""

# A worker that cleans nothing: says when it hears SIGTERM, takes so many seconds to leave, and says that it leaves.
_STAND_IN = """#!/bin/bash
say() {{
    printf '%s %s %s %s %s %s %s\\n' "$EPOCHREALTIME" clean "$1" "$SLURM_ARRAY_TASK_ID" "${{SLURM_RESTART_COUNT:-0}}" \
        "$SLURMD_NODENAME" "$CUDA_VISIBLE_DEVICES" >>{folder}/events
}}
leave() {{ trap '' TERM; say term; sleep {leave_s}; say end; kill %1; exit 75; }}
trap leave TERM
sleep infinity &
while :; do wait; done
"""


@dataclass(frozen=True, slots=True)
class Event:
    """What a job wrote down.  `what`: start, term, end, or shared: a GPU of it was in use by another process."""

    at_s: float  # since the epoch
    kind: str  # clean, train
    what: str
    task: int  # index in the cleaning array, job id of training
    restarts: int
    node: str
    gpus: frozenset[str]  # indexes on that node


class Stage:
    """One lab's jobs in one folder."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        (folder / "locks").mkdir(parents=True)
        (folder / "events").touch()
        self._watched = folder / "watched"
        self._watched.write_text(_WATCHED.format(folder=shlex.quote(str(folder))))
        self._watched.chmod(0o755)

    def stand_in(self, leave_s: float) -> tuple[str, ...]:
        """The command of a worker without work that ends `leave_s` after SIGTERM."""
        path = self.folder / "stand-in"
        path.write_text(_STAND_IN.format(folder=shlex.quote(str(self.folder)), leave_s=leave_s))
        path.chmod(0o755)
        return (str(path),)

    def start_cleaning(self, command: Sequence[str]) -> int:
        """Fill every GPU with workers and return their array's id once all run."""
        num_gpus = self.lab.settings.num_gpus
        script = CleanScript(
            (str(self._watched), "clean", *command), max_workers=num_gpus, mem_per_cpu_mb=100, output=self._log("clean")
        )
        array = self.lab.submit(clean_script(script), f"--chdir={self.folder}")
        self.wait(lambda: len(self.of("clean", "start")) >= num_gpus, 30.0, "not every GPU has a worker")
        return array

    def submit_training(
        self, gpu_type: str, gpus_per_node: int, command: Sequence[str] = ("sleep", "1"), num_nodes: int = 1
    ) -> int:
        """sbatch training; returns its job id."""
        script = TrainScript(
            (str(self._watched), "train", *command),
            gpu_type=gpu_type,
            gpus_per_node=gpus_per_node,
            num_nodes=num_nodes,
            cpus_per_task=1,
            mem_per_cpu_mb=100,
        )
        return self.lab.submit(train_script(script), f"--chdir={self.folder}")

    def events(self) -> list[Event]:
        """All that was written down so far, in order of time."""
        events = []
        for line in (self.folder / "events").read_text().splitlines():
            at, kind, what, task, restarts, node, gpus = line.split()
            events.append(Event(float(at), kind, what, int(task), int(restarts), node, frozenset(gpus.split(","))))
        return sorted(events, key=lambda event: event.at_s)

    def of(self, kind: str, what: str, task: int | None = None, since_s: float = 0.0) -> list[Event]:
        """Events of one sort; of one task or training job when given."""
        return [
            event
            for event in self.events()
            if (event.kind, event.what) == (kind, what) and task in (None, event.task) and event.at_s >= since_s
        ]

    def running_tasks(self) -> frozenset[int]:
        """Indexes of the cleaning tasks that run, as Slurm sees it."""
        printed = self.lab.run("squeue", "-h", "-r", "-p", "cleaning", "-t", "RUNNING", "-O", "ArrayTaskID:12")
        return frozenset(map(int, printed.split()))

    def wait_for(self, kind: str, what: str, task: int, timeout_s: float) -> Event:
        """The first such event, once it is there."""
        self.wait(lambda: bool(self.of(kind, what, task)), timeout_s, f"no {what} of {kind} {task}")
        return self.of(kind, what, task)[0]

    def wait_refilled(self, timeout_s: float) -> None:
        """Return when cleaning runs on every GPU again."""
        num_gpus = self.lab.settings.num_gpus

        def is_full() -> bool:
            # Both views: a task runs for Slurm some milliseconds before its script has written a line.
            tasks = self.running_tasks()
            newest = {event.task: event.what for event in self.events() if event.kind == "clean"}
            return len(tasks) == num_gpus and all(newest.get(task) == "start" for task in tasks)

        self.wait(is_full, timeout_s, "cleaning did not come back")

    def wait(self, is_done: Callable[[], bool], timeout_s: float, complaint: str) -> None:
        """Raises SlurmUnavailable with the queue as it stands when it takes longer."""
        deadline_s = time.monotonic() + timeout_s
        while not is_done():
            if time.monotonic() > deadline_s:
                raise SlurmUnavailable(
                    f"{complaint} within {timeout_s:g} s; the queue:\n{self.lab.run('squeue', '-r')}"
                )
            time.sleep(_POLL_S)

    def _log(self, name: str) -> str:
        return f"{self.folder}/{name}-%A_%a.log"


@dataclass(frozen=True, slots=True)
class Round:
    """One training job through a cluster that is full of cleaning.

    train_start_s: from just before sbatch to the job's first line.
    worker_back_s: from the training program's end until the last worker that had to go runs again.
    """

    train_start_s: float
    worker_back_s: float


def play_round(stage: Stage, gpu_type: str, num_gpus: int, back_timeout_s: float) -> Round:
    """Submit training of one second over running workers, and wait until everything is as before.

    Raises SlurmUnavailable when training does not start within a minute or workers are not back in time.
    """
    submitted_s = time.time()
    job = stage.submit_training(gpu_type, num_gpus)
    start = stage.wait_for("train", "start", job, 60.0)
    end = stage.wait_for("train", "end", job, 30.0)

    def returned() -> list[Event]:
        return stage.of("clean", "start", since_s=submitted_s)

    stage.wait(lambda: len(returned()) >= num_gpus, back_timeout_s, "cleaning did not come back")
    stage.wait_refilled(10.0)
    return Round(start.at_s - submitted_s, max(event.at_s for event in returned()) - end.at_s)
