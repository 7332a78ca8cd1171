"""The settings that let training take GPUs back within a second, and why each is what it is.

Owns the values and their reasons, as data; `fragments` writes them as files, `slackwater_slurm.lab` starts a
cluster with them, so that what is measured is what is recommended.  Pure.  Delays named here were measured on
Slurm 22.05, 24.11 and 25.11 with workers that leave 0.1 s after SIGTERM.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slackwater_slurm.core import SlurmVersion

REQUEUE_DELAY_SINCE = SlurmVersion(25, 11)  # SchedulerParameters=requeue_delay
CGROUP_PLUGIN_DISABLED_SINCE = SlurmVersion(24, 5)  # cgroup.conf CgroupPlugin=disabled is understood
EXIT_PREEMPTED = 75  # the contract of operator/README.md
MIN_CRED_EXPIRE_S = 5  # Slurm silently takes 120 for anything smaller

# Slurm's own limits; a fleet of more GPUs than these needs them raised.
_DEFAULT_MAX_ARRAY_SIZE = 1001
_DEFAULT_QUEUE_DEPTH = 100


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of a configuration file and why it is there."""

    key: str
    value: str
    reason: str

    @property
    def line(self) -> str:
        return f"{self.key}={self.value}"


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Equal machines.  names: one host name or Slurm's range, `gpu[01-08]`."""

    names: str
    gpu_type: str
    num_gpus: int
    devices: str = "/dev/nvidia[0-{last}]"

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or not self.gpu_type or not self.names:
            raise ValueError(f"a node group needs names, a GPU type and 1 or more GPUs, got {self}")

    @property
    def gres(self) -> str:
        return f"gpu:{self.gpu_type}:{self.num_gpus}"

    @property
    def device_files(self) -> str:
        last = self.num_gpus - 1
        return self.devices.format(last=last) if last else self.devices.replace("[0-{last}]", "0")


def cluster_settings(version: SlurmVersion, *, kill_wait_s: int = 30, num_gpus: int = 0) -> tuple[Setting, ...]:
    """Settings of slurm.conf for the whole cluster.

    kill_wait_s: how long a worker may take from SIGTERM to its end.
    num_gpus: GPUs of the cluster; with more than Slurm's limits allow for, the limits are raised.
    """
    settings = [
        Setting("SelectType", "select/cons_tres", "Only this plug-in gives out single GPUs of a node."),
        Setting("SelectTypeParameters", "CR_CPU_Memory", "Jobs share a node's CPUs and memory without overlap."),
        Setting("GresTypes", "gpu", "Makes GPUs a resource that is counted."),
        Setting(
            "PreemptType",
            "preempt/partition_prio",
            "The partition with the higher PriorityTier takes; needs no accounting database, as QOS would.",
        ),
        Setting(
            "PreemptMode",
            "REQUEUE",
            "Must be set here as well as in the partition; with OFF the controller does not start. SUSPEND is no "
            "alternative: it does not free GPUs, and training would wait for ever.",
        ),
        Setting("JobRequeue", "1", "A preempted task comes back; with 0 it would end as PREEMPTED for good."),
        Setting(
            "RequeueExit",
            str(EXIT_PREEMPTED),
            "What `slackwater clean run` ends with when it was told to go. A preempted task is requeued anyway; this "
            "also brings back one whose controller was killed after it had asked the task to leave, which otherwise "
            "ends as FAILED. Holds for every job that may be requeued and ends with this code.",
        ),
        Setting(
            "KillWait",
            str(kill_wait_s),
            "The worker's real grace: SIGTERM at once, SIGKILL after so many seconds. Training starts as soon as the "
            "worker has left, so a long value costs only when a worker hangs.",
        ),
        Setting(
            "SchedulerParameters",
            ",".join(_scheduler_parameters(version, num_gpus)),
            "batch_sched_delay=0 and sched_min_interval=0 look at a submission at once instead of up to 3 s later; "
            "sched_interval=2 instead of 60 and bf_interval=1 instead of 30 bring workers back in about 6 s "
            "instead of 22 to 28 s after training has left." + _parameters_note(version, num_gpus),
        ),
    ]
    if version < REQUEUE_DELAY_SINCE:
        settings.append(
            Setting(
                "AuthInfo",
                f"cred_expire={MIN_CRED_EXPIRE_S}",
                "A requeued task waits until its old credential has expired: 2 minutes by default. 5 s is the least; "
                "Slurm takes 120 for anything below. Add it to an AuthInfo that you have, separated by a comma. "
                "A node whose clock is off, or that takes longer than this to launch a job, refuses it: raise the "
                "value if that is seen. From 25.11 on requeue_delay=0 does this without touching credentials.",
            )
        )
    if num_gpus >= _DEFAULT_MAX_ARRAY_SIZE:
        settings.append(
            Setting(
                "MaxArraySize",
                str(2 * num_gpus),
                "One task a GPU; the default ends at task 1000. The same for MaxJobCount.",
            )
        )
        settings.append(Setting("MaxJobCount", str(max(10_000, 20 * num_gpus)), "Must hold the arrays of all users."))
    return tuple(settings)


def _scheduler_parameters(version: SlurmVersion, num_gpus: int) -> Sequence[str]:
    parameters = ["batch_sched_delay=0", "sched_interval=2", "sched_min_interval=0", "bf_interval=1"]
    if version >= REQUEUE_DELAY_SINCE:
        parameters.append("requeue_delay=0")
    if num_gpus > _DEFAULT_QUEUE_DEPTH:
        parameters += [f"default_queue_depth={2 * num_gpus}", f"bf_max_job_test={2 * num_gpus}"]
    return parameters


def _parameters_note(version: SlurmVersion, num_gpus: int) -> str:
    note = " requeue_delay=0 lets a preempted task start again at once." if version >= REQUEUE_DELAY_SINCE else ""
    if num_gpus > _DEFAULT_QUEUE_DEPTH:
        note += " The two depths let one pass of the scheduler see every task of the fleet."
    return note


def partition_settings(
    nodes: str, *, train: str = "train", cleaning: str = "cleaning", is_default: bool = True
) -> tuple[Setting, ...]:
    """The two partitions over the same nodes, as lines of slurm.conf.

    nodes: Slurm's list of host names, or ALL.
    """
    default = "YES" if is_default else "NO"
    return (
        Setting(
            "PartitionName",
            f"{train} Nodes={nodes} Default={default} PriorityTier=100 PreemptMode=OFF OverSubscribe=NO State=UP",
            "Training: the higher tier takes from the lower one, and PreemptMode=OFF keeps it from being taken from.",
        ),
        Setting(
            "PartitionName",
            f"{cleaning} Nodes={nodes} Default=NO PriorityTier=1 PreemptMode=REQUEUE GraceTime=0"
            " OverSubscribe=NO State=UP",
            "Cleaning: GraceTime must stay 0. A longer one signals only job steps at first, so a worker that is the "
            "batch script itself hears nothing and training waits it out (15 to 24 s for GraceTime=10); and before "
            "24.05 a worker that does hear and leaves in time is not requeued, so its slot is lost.",
        ),
    )


def cgroup_settings() -> tuple[Setting, ...]:
    """Settings of cgroup.conf for machines with real GPUs."""
    return (
        Setting("ConstrainDevices", "yes", "A job sees only its own GPUs, whatever it sets CUDA_VISIBLE_DEVICES to."),
        Setting("ConstrainCores", "yes", "Cleaning keeps to its own cores while training runs beside it."),
        Setting("ConstrainRAMSpace", "yes", "A decoder that goes wild is ended before it takes training's memory."),
    )


def process_settings() -> tuple[Setting, ...]:
    """Settings of slurm.conf for how jobs are held together on machines with real GPUs."""
    return (
        Setting(
            "ProctrackType",
            "proctrack/cgroup",
            "A GPU is given on only when every process of the job is gone. With linuxproc or pgid a worker that "
            "left its process group was seen to hold the GPU 0.9 s after training had started on it.",
        ),
        Setting("TaskPlugin", "task/cgroup,task/affinity", "Enforces what cgroup.conf says."),
        Setting("ReturnToService", "2", "A node that comes back after a crash takes jobs again by itself."),
    )
