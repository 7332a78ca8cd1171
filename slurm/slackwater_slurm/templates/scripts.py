"""Batch scripts for sbatch: training that resumes, and an array of cleaning workers.

Owns the scripts' text.  Every line that matters for preemption carries its reason, since people copy scripts without
their documentation.  Pure.
"""

import re
import shlex
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z0-9._+-]+")


@dataclass(frozen=True, slots=True)
class TrainScript:
    """A training job.

    command: argv of the training program, which resumes by itself from its newest checkpoint.
    save_s: how long before the time limit it is told to save; above what its largest checkpoint takes.
    """

    command: tuple[str, ...]
    name: str = "train"
    partition: str = "train"
    gpus_per_node: int = 1
    gpu_type: str = ""
    num_nodes: int = 1
    cpus_per_task: int = 4
    mem_per_cpu_mb: int = 4096
    time_limit: str = "1-00:00:00"
    save_s: int = 120

    def __post_init__(self) -> None:
        _check(self.name, self.partition, self.gpu_type, self.command)
        if min(self.gpus_per_node, self.num_nodes, self.cpus_per_task, self.mem_per_cpu_mb, self.save_s) < 1:
            raise ValueError(f"GPUs, nodes, CPUs, memory and save_s must be 1 or more, got {self}")


@dataclass(frozen=True, slots=True)
class CleanScript:
    """An array of cleaning workers over one ledger.

    command: argv of the worker.   max_workers: tasks of the array; None when the submitter gives --array itself.
    max_running: how many of them may run at once, None = all.
    """

    command: tuple[str, ...]
    name: str = "clean"
    partition: str = "cleaning"
    gpu_type: str = ""
    max_workers: int | None = None
    max_running: int | None = None
    cpus_per_task: int = 1
    mem_per_cpu_mb: int = 4096
    output: str = "clean-%A_%a.log"

    def __post_init__(self) -> None:
        _check(self.name, self.partition, self.gpu_type, self.command)
        if "\n" in self.output or not self.output:
            raise ValueError(f"output must be one path, got {self.output!r}")
        if min(self.max_workers or 1, self.max_running or 1, self.cpus_per_task, self.mem_per_cpu_mb) < 1:
            raise ValueError(f"workers, CPUs and memory must be 1 or more, got {self}")


def worker_command(program: str, recordings: str, ledger: str, *options: str) -> tuple[str, ...]:
    """The argv of a worker over `recordings` and `ledger`, both on a file system that every node sees.

    program: `slackwater`, as an absolute path where the nodes' PATH does not have it.
    """
    return (program, "clean", "run", recordings, "--output", ledger, *options)


def train_script(script: TrainScript) -> str:
    """The text of train.sh."""
    return f"""#!/bin/bash
#SBATCH --job-name={script.name}
#SBATCH --partition={script.partition}
#SBATCH --nodes={script.num_nodes}
#SBATCH --gres={_gres(script.gpu_type, script.gpus_per_node)}
#SBATCH --cpus-per-task={script.cpus_per_task}
#SBATCH --mem-per-cpu={script.mem_per_cpu_mb}M
#SBATCH --time={script.time_limit}
# USR1 to this script (B:) so many seconds before the time limit: save, and queue again under the same job id.
#SBATCH --signal=B:USR1@{script.save_s}
# A node that fails puts the job back into the queue, and the log goes on instead of beginning anew.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={script.name}-%j.log

save_and_requeue() {{
    trap '' USR1
    kill -USR1 "$training"
    wait "$training"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}}
trap save_and_requeue USR1
# A shell in `wait` would die of SIGTERM and leave its child alone on the GPUs; so it is handed on.
trap 'kill -TERM "$training"; wait "$training"; exit' TERM

# Must look for its newest checkpoint when it starts: after a requeue nobody passes it a path.
{shlex.join(script.command)} &
training=$!
wait "$training"
"""


def clean_script(script: CleanScript) -> str:
    """The text of clean.sh."""
    array = ""
    if script.max_workers is not None:
        throttle = f"%{script.max_running}" if script.max_running is not None else ""
        array = f"""# A task is a worker's slot, not a share of the work: workers take shards from the ledger.
#SBATCH --array=0-{script.max_workers - 1}{throttle}
"""
    return f"""#!/bin/bash
#SBATCH --job-name={script.name}
#SBATCH --partition={script.partition}
{array}#SBATCH --gres={_gres(script.gpu_type, 1)}
#SBATCH --cpus-per-task={script.cpus_per_task}
#SBATCH --mem-per-cpu={script.mem_per_cpu_mb}M
# Comes back after each preemption, under its id, and goes on with its log instead of truncating it.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={script.output}

# exec matters: SIGTERM goes to this very process, and Slurm gives the GPU on when it has ended.  As a child of the
# shell the worker would be killed unsaved, or go on beside the training job.
exec {shlex.join(script.command)}
"""


def _gres(gpu_type: str, count: int) -> str:
    return f"gpu:{gpu_type}:{count}" if gpu_type else f"gpu:{count}"


def _check(name: str, partition: str, gpu_type: str, command: tuple[str, ...]) -> None:
    for what, value in (("name", name), ("partition", partition), ("gpu_type", gpu_type or "any")):
        if not _NAME.fullmatch(value):
            raise ValueError(f"{what} must be letters, digits and ._+-, got {value!r}")
    if not command:
        raise ValueError("command must name a program")
