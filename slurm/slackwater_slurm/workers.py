"""What is submitted for a cleaning job: an array whose tasks are the workers of `slackwater clean run`.

Owns the translation of a job's settings into one submission.  Pure.  Called by `cluster`.
"""

import math

from slackwater_slurm.config import CleaningJob
from slackwater_slurm.core import Submission
from slackwater_slurm.observation import mark
from slackwater_slurm.templates.scripts import CleanScript, clean_script, worker_command


def submission(job: CleaningJob, partition: str, gpu_type: str, num_tasks: int, max_running: int) -> Submission:
    """An array of `num_tasks` worker slots, one GPU each, of which `max_running` may run at once."""
    options = [text for key, value in sorted(job.settings.items()) for text in ("--set", f"{key}={_plain(value)}")]
    name = f"clean-{job.name}"
    output = str(job.logs_folder / "%A_%a.log")
    script = CleanScript(
        command=worker_command(
            job.program, str(job.input), str(job.output), "--job", job.ledger_job or job.name, *options
        ),
        name=name,
        partition=partition,
        gpu_type=gpu_type,
        cpus_per_task=job.cpus_per_worker,
        mem_per_cpu_mb=math.ceil(job.memory_mb_per_worker / job.cpus_per_worker),
        output=output,
    )
    return Submission(
        name=name,
        script=clean_script(script),
        partition=partition,
        gpus=1,
        gpu_type=gpu_type,
        num_tasks=num_tasks,
        max_running=max_running,
        comment=mark(job.name, gpu_type),
        output=output,
        time_limit=None if job.time_limit_s is None else str(math.ceil(job.time_limit_s / 60)),
        requeue=True,
        append_output=True,
    )


def _plain(value: str | int | float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
