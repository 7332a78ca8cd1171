"""The YAML file of `slackwater slurm run` and of an operator's Slurm side: which cleaning jobs fill which partition.

Parsed once, at the start; everything inside works on the models' values.  Unknown keys are errors, and an
error names its key.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from slackwater_operator.settings import Name, Port, Section, StepSettings, read

GpuType = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
PartitionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]


class WorkerSettings(Section):
    """What a worker asks of Slurm, and when its job is given up."""

    array_tasks: Annotated[int, Field(ge=1)] = 1000
    """Tasks of one array; when they are used up another is submitted.  At most the cluster's MaxArraySize."""

    cpus_per_worker: Annotated[int, Field(ge=1)] = 1
    memory_mb_per_worker: Annotated[int, Field(ge=1)] = 4096
    time_limit_s: Annotated[float, Field(ge=60)] | None = 14_400
    """A worker's longest run.  Slurm starts nothing that would run into a reservation, so workers without a
    limit stay away from a node from the moment its next maintenance is announced."""

    program: str = "slackwater"
    """The command on the nodes; an absolute path where their PATH does not have it."""

    max_failures: Annotated[int, Field(ge=1)] = 16
    """The job is stopped when so many workers have ended and none of them settled an item."""


class CleaningJob(WorkerSettings):
    """One cleaning job: a folder of recordings and the ledger that says what is done."""

    name: Name
    input: Path
    """A folder of recordings, at the same path on every node of the partition."""

    output: Path
    """The job's ledger, on a file system that every node sees."""

    ledger_job: str | None = None
    """The job's name in its ledger, where others work on it under another name than ours; `name` by default."""

    min_workers: Annotated[int, Field(ge=0)] = 1
    """So many may always wait for a GPU, also while none is idle; Slurm then starts them without us."""

    max_workers: Annotated[int, Field(ge=1)] = 1000
    gpu_types: tuple[GpuType, ...] = ()
    """GPU types as the nodes' Gres names them, the preferred first; any type by default."""

    settings: StepSettings = Field(default_factory=dict)
    """Settings of the steps, as `slackwater clean run --set` takes them."""

    logs: Path | None = None
    """Folder of the workers' logs; beside the ledger, with `-logs` added, by default."""

    @model_validator(mode="after")
    def bounds_agree(self) -> "CleaningJob":
        if self.min_workers > self.max_workers:
            raise ValueError(f"min_workers ({self.min_workers}) is above max_workers ({self.max_workers})")
        if len(set(self.gpu_types)) < len(self.gpu_types):
            raise ValueError(f"gpu_types names a type twice: {', '.join(self.gpu_types)}")
        if self.max_workers < len(self.gpu_types):
            raise ValueError(
                f"max_workers ({self.max_workers}) is less than one for each of {len(self.gpu_types)} gpu_types"
            )
        return self

    @property
    def logs_folder(self) -> Path:
        return self.logs or self.output.with_name(f"{self.output.name}-logs")


class Kubernetes(Section):
    """A cluster whose CleaningJobs have workers here too: those of `pools` with `Slurm` in their placement."""

    kubeconfig: Path | None = None
    """As kubectl reads it; KUBECONFIG or ~/.kube/config by default.  Inside the operator its own is used."""

    context: str | None = None
    pools: Annotated[tuple[Name, ...], Field(min_length=1)]
    """CapacityPools that this Slurm stands beside."""

    workers: WorkerSettings = WorkerSettings()
    """Of every job that comes from there."""


class Config(Section):
    """The whole file."""

    partition: PartitionName = "cleaning"
    """The partition of the workers; `slackwater slurm check` says what it must be like."""

    jobs: tuple[CleaningJob, ...] = ()
    kubernetes: Kubernetes | None = None
    """Where further jobs come from; with it the controller goes on until it is told to stop."""

    state_dir: Path = Path("~/.local/state/slackwater-slurm")
    """One controller at a time works with a folder."""

    slurm_conf: Path | None = None
    """The cluster's slurm.conf; the machine's own, or SLURM_CONF, by default."""

    client: Literal["text", "json", "pyslurm"] = "text"
    """How Slurm is spoken to: its commands' text works with every release."""

    tick_s: Annotated[float, Field(ge=0.1, le=300)] = 5
    """Training never waits for a tick, it is Slurm that preempts; a tick finds newly idle GPUs."""

    command_timeout_s: Annotated[float, Field(ge=0.5)] = 10
    """A controller that is down lets a command wait for 9 s."""

    maintenance_lead_s: Annotated[float, Field(ge=0)] = 60
    """So long before a maintenance reservation begins its nodes are left."""

    progress_s: Annotated[float, Field(ge=1)] = 30
    """How often each ledger is asked how far it is; that reads every open shard."""

    metrics_port: Port | None = None
    """Prometheus metrics on 127.0.0.1; none by default.  Inside the operator its own port shows them."""

    @model_validator(mode="after")
    def jobs_differ(self) -> "Config":
        if not self.jobs and self.kubernetes is None:
            raise ValueError("jobs: give at least one, or `kubernetes` to take them from")
        for what in ("name", "output"):
            values = [str(getattr(job, what)) for job in self.jobs]
            if double := {value for value in values if values.count(value) > 1}:
                raise ValueError(f"jobs: the {what} {min(double)!r} is used twice")
        return self


def load(path: Path) -> Config:
    """Read and check a file; relative paths in it are taken from its folder.

    Raises PermanentError with one line that names the file and the key.
    """
    return _anchored(read(path, Config, "manifests/samples/slurm.yaml"), path.resolve().parent)


def _anchored(config: Config, folder: Path) -> Config:
    def place(path: Path) -> Path:
        return folder / path.expanduser()

    jobs = tuple(
        job.model_copy(
            update={"input": place(job.input), "output": place(job.output), "logs": job.logs and place(job.logs)}
        )
        for job in config.jobs
    )
    kubernetes = config.kubernetes
    if kubernetes is not None and kubernetes.kubeconfig is not None:
        kubernetes = kubernetes.model_copy(update={"kubeconfig": place(kubernetes.kubeconfig)})
    return config.model_copy(
        update={
            "jobs": jobs,
            "state_dir": place(config.state_dir),
            "slurm_conf": config.slurm_conf and place(config.slurm_conf),
            "kubernetes": kubernetes,
        }
    )
