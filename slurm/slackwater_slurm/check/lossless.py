"""Rules about whether training gets its GPUs at all, and whether cleaning keeps its work.

Pure.  Costs were measured on Slurm 22.05, 24.11 and 25.11 with workers that leave 0.1 s after SIGTERM,
unless a text says otherwise.
"""

from collections.abc import Iterator

from slackwater_slurm.check.facts import Site
from slackwater_slurm.check.finding import Finding, Rule, Severity
from slackwater_slurm.core import SlurmVersion

REQUEUES_AFTER_GRACE = SlurmVersion(24, 5)  # its changelog: a job that ends within grace is requeued
_OLDEST, _NEWEST = SlurmVersion(22, 5), SlurmVersion(25, 12)


def release(site: Site) -> Iterator[Finding]:
    if not _OLDEST <= site.version < _NEWEST:
        yield Finding(
            "release",
            Severity.NOTE,
            "slurmctld",
            f"Slurm {site.version}",
            "the delays named here were measured on 22.05, 24.11 and 25.11 only",
            "measure before you rely on them: submit training while cleaning holds every GPU",
        )


def partitions_exist(site: Site) -> Iterator[Finding]:
    known = ", ".join(sorted(site.partitions)) or "none"
    for name in (*site.train, site.cleaning):
        if name not in site.partitions:
            yield Finding(
                "partition-missing",
                Severity.ERROR,
                "slurm.conf",
                f"no partition {name} (there are: {known})",
                'sbatch says "Invalid partition name specified"',
                f"PartitionName={name} Nodes=ALL " + _wanted(site, name),
            )


def partitions_up(site: Site) -> Iterator[Finding]:
    for name in (*site.train, site.cleaning):
        partition = site.partitions.get(name)
        if partition is not None and not partition.is_up:
            yield Finding(
                "partition-down",
                Severity.ERROR,
                f"partition {name}",
                f"State={partition.state}",
                "nothing starts there",
                f"scontrol update PartitionName={name} State=UP",
            )


def preempt_type(site: Site) -> Iterator[Finding]:
    found = site.text("PreemptType")
    if found == "preempt/qos" and site.text("AccountingStorageType") == "accounting_storage/slurmdbd":
        yield Finding(
            "preempt-type",
            Severity.NOTE,
            "slurm.conf",
            f"PreemptType={found}",
            "QOS live in slurmdbd, and are not read here: partition tiers do not count",
            "sacctmgr show qos format=name,priority,preempt,preemptmode: training's must list cleaning's",
        )
    elif found != "preempt/partition_prio":
        without = ", without slurmdbd there is no QOS" if found == "preempt/qos" else ""
        yield Finding(
            "preempt-type",
            Severity.ERROR,
            "slurm.conf",
            f"PreemptType={found or 'preempt/none'}{without}",
            "training waits until cleaning ends by itself",
            "PreemptType=preempt/partition_prio",
        )


def preempt_mode(site: Site) -> Iterator[Finding]:
    found = site.text("PreemptMode").upper()
    if "REQUEUE" in found.split(","):
        return
    if found in ("", "OFF"):
        severity, cost = Severity.ERROR, "no job is preempted; with preempt/partition_prio slurmctld does not start"
    else:  # measured: a partition's own REQUEUE wins over a global CANCEL or SUSPEND,GANG
        severity = Severity.NOTE
        cost = "it holds for partitions without a mode of their own: preempted jobs end there, or keep their GPUs"
    yield Finding("preempt-mode", severity, "slurm.conf", f"PreemptMode={found or 'OFF'}", cost, "PreemptMode=REQUEUE")


def cleaning_mode(site: Site) -> Iterator[Finding]:
    partition = site.cleaning_partition
    if partition is None or partition.preempt_mode.upper() == "REQUEUE":
        return
    mode = partition.preempt_mode.upper()
    costs = {
        "OFF": "training waits until cleaning ends by itself",
        "CANCEL": "a preempted worker ends for good, whatever --requeue says, and the GPU is not filled again",
    }
    suspended = "a suspended worker keeps its GPUs: training stays PENDING (Resources)"
    yield Finding(
        "cleaning-mode",
        Severity.ERROR,
        f"partition {partition.name}",
        f"PreemptMode={partition.preempt_mode}",
        costs.get(mode, suspended),
        _partition_line(partition.name, "PreemptMode=REQUEUE"),
    )


def train_mode(site: Site) -> Iterator[Finding]:
    for partition in site.train_partitions:
        if partition.preempt_mode.upper() != "OFF":
            yield Finding(
                "train-mode",
                Severity.WARNING,
                f"partition {partition.name}",
                f"PreemptMode={partition.preempt_mode}",
                "a partition of a higher tier may take GPUs from training",
                _partition_line(partition.name, "PreemptMode=OFF"),
            )


def tiers(site: Site) -> Iterator[Finding]:
    cleaning = site.cleaning_partition
    for partition in site.train_partitions:
        if cleaning is None or partition.name == cleaning.name:
            continue
        if partition.priority_tier <= cleaning.priority_tier:
            yield Finding(
                "tiers",
                Severity.ERROR,
                f"partition {cleaning.name}",
                f"PriorityTier={cleaning.priority_tier}, {partition.name} has {partition.priority_tier}",
                f"{partition.name} takes nothing from {cleaning.name} and waits until it ends by itself",
                _partition_line(partition.name, f"PriorityTier={cleaning.priority_tier + 99}"),
            )
    if site.cleaning in site.train:
        yield Finding(
            "tiers",
            Severity.ERROR,
            f"partition {site.cleaning}",
            "training and cleaning share one partition",
            "jobs of one tier take nothing from each other",
            f"PartitionName={site.cleaning} … for cleaning only, and another with a higher PriorityTier for training",
        )


def grace_time(site: Site) -> Iterator[Finding]:
    partition = site.cleaning_partition
    if partition is None or partition.grace_time_s == 0:
        return
    if site.version < REQUEUES_AFTER_GRACE:
        severity = Severity.ERROR
        cost = "a worker that leaves within the grace counts as COMPLETED or FAILED and never comes back; "
    else:
        severity = Severity.WARNING
        cost = ""
    yield Finding(
        "grace-time",
        severity,
        f"partition {partition.name}",
        f"GraceTime={partition.grace_time_s}",
        cost
        + "a batch worker hears nothing at its start: GraceTime=10 gave SIGTERM after 15.4 to 23.6 s instead of 0.7 s",
        _partition_line(partition.name, "GraceTime=0"),
    )


def exempt_time(site: Site) -> Iterator[Finding]:
    exempt_s = site.seconds("PreemptExemptTime")
    if exempt_s:
        yield Finding(
            "exempt-time",
            Severity.ERROR if exempt_s > 60 else Severity.WARNING,
            "slurm.conf",
            f"PreemptExemptTime={site.text('PreemptExemptTime')}",
            f"training waits up to {exempt_s:g} s for a worker that has just begun (21.2 s with 20)",
            "PreemptExemptTime=00:00:00",
        )


def kill_wait(site: Site) -> Iterator[Finding]:
    found_s = site.seconds("KillWait")
    if found_s is None:
        return
    if found_s < site.save_s + 1:
        yield Finding(
            "kill-wait",
            Severity.ERROR,
            "slurm.conf",
            f"KillWait={found_s:g}",
            f"SIGKILL comes {found_s:g} s after SIGTERM; a worker that needs {site.save_s:g} s to save loses that work",
            f"KillWait={max(30, int(2 * site.save_s))}",
        )
    elif found_s > 300:
        yield Finding(
            "kill-wait",
            Severity.WARNING,
            "slurm.conf",
            f"KillWait={found_s:g}",
            f"one worker that hangs keeps training waiting for {found_s:g} s (KillWait=3: training began after 5.1 s)",
            f"KillWait={max(30, int(2 * site.save_s))}",
        )


def job_requeue(site: Site) -> Iterator[Finding]:
    if site.text("JobRequeue") == "0":
        yield Finding(
            "job-requeue",
            Severity.ERROR,
            "slurm.conf",
            "JobRequeue=0",
            "a job without --requeue ends as PREEMPTED and never comes back",
            "JobRequeue=1",
        )


def max_time(site: Site) -> Iterator[Finding]:
    partition = site.cleaning_partition
    if partition is not None and partition.max_time_s is not None:
        yield Finding(
            "max-time",
            Severity.WARNING,
            f"partition {partition.name}",
            f"MaxTime={partition.max_time_s // 60}",
            f"a worker ends as TIMEOUT after {partition.max_time_s // 60} min and its task never comes back",
            _partition_line(partition.name, "MaxTime=UNLIMITED"),
        )


def oversubscribe(site: Site) -> Iterator[Finding]:
    for name in (*site.train, site.cleaning):
        partition = site.partitions.get(name)
        if partition is not None and partition.over_subscribe.upper().startswith(("FORCE", "YES")):
            yield Finding(
                "oversubscribe",
                Severity.WARNING,
                f"partition {name}",
                f"OverSubscribe={partition.over_subscribe}",
                "CPUs may be given to training and cleaning at once (not measured)",
                _partition_line(name, "OverSubscribe=NO"),
            )


def proctrack(site: Site) -> Iterator[Finding]:
    found = site.text("ProctrackType")
    if found == "proctrack/cgroup":
        return
    yield Finding(
        "proctrack",
        Severity.WARNING,
        "slurm.conf",
        f"ProctrackType={found}",
        {
            "proctrack/linuxproc": "a worker that is not exec'd was orphaned; training began 0.9 s before it left",
            "proctrack/pgid": "a worker that is not exec'd was killed as its shell ended, before it could save",
        }.get(found, "processes that leave the job's group are not seen, and may still hold a GPU"),
        "ProctrackType=proctrack/cgroup",
    )


RULES: tuple[Rule, ...] = (
    partitions_exist,
    partitions_up,
    preempt_type,
    preempt_mode,
    cleaning_mode,
    train_mode,
    tiers,
    grace_time,
    exempt_time,
    kill_wait,
    job_requeue,
    max_time,
    oversubscribe,
    proctrack,
    release,
)


def _wanted(site: Site, name: str) -> str:
    if name == site.cleaning:
        return "PriorityTier=1 PreemptMode=REQUEUE GraceTime=0"
    return "PriorityTier=100 PreemptMode=OFF"


def _partition_line(name: str, setting: str) -> str:
    return f"PartitionName={name} … {setting}"
