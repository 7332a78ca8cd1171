"""Configuration files for a site, each line below its reason.

Owns the files' text; the values are `settings`'.  Called by `slackwater slurm render`.  Pure.
"""

import textwrap
from collections.abc import Iterable, Sequence

from slackwater_slurm.core import SlurmVersion
from slackwater_slurm.templates.settings import (
    NodeGroup,
    Setting,
    cgroup_settings,
    cluster_settings,
    partition_settings,
    process_settings,
)

_WIDTH = 110


def slurm_conf_fragment(version: SlurmVersion, kill_wait_s: int, num_gpus: int) -> str:
    """Lines for slurm.conf of the whole cluster."""
    head = (
        f"For Slurm {version}. Merge into slurm.conf: a key that stands there already is replaced, except that "
        "comma-separated values (SchedulerParameters, AuthInfo) are joined. Then restart slurmctld and every slurmd; "
        "running jobs go on meanwhile."
    )
    settings = (*cluster_settings(version, kill_wait_s=kill_wait_s, num_gpus=num_gpus), *process_settings())
    return _comment(head) + "\n" + _settings(settings)


def partitions_fragment(nodes: str, train: str, cleaning: str) -> str:
    """The two PartitionName lines for slurm.conf."""
    return _settings(partition_settings(nodes, train=train, cleaning=cleaning))


def gres_conf_fragment(groups: Sequence[NodeGroup]) -> str:
    """gres.conf, and as comments the words that each NodeName line of slurm.conf needs."""
    lines = [
        _comment(
            "Device files are named one by one, so that Slurm knows which index a job holds: a bare Count shares "
            "GPUs out without saying which. AutoDetect=nvml does the same where slurmd was built with it."
        ).rstrip(),
        "AutoDetect=off",
    ]
    for group in groups:
        lines += [
            "",
            f"# slurm.conf: NodeName={group.names} … Gres={group.gres}",
            "# The flag leaves CUDA_VISIBLE_DEVICES and drops the variables of other makers' GPUs.",
            f"NodeName={group.names} Name=gpu Type={group.gpu_type} File={group.device_files} Flags=nvidia_gpu_env",
        ]
    return "\n".join(lines) + "\n"


def cgroup_conf_fragment() -> str:
    """cgroup.conf."""
    return _settings(cgroup_settings())


def qos_fragment() -> str:
    """The same by QOS instead of by partition, for a site with slurmdbd, as commands."""
    return _comment(
        "Only with slurmdbd: QOS live there. Instead of the two tiers, jobs of one partition take from each other by "
        "QOS; in slurm.conf PreemptType=preempt/qos and AccountingStorageEnforce=qos (without it an unknown --qos is "
        "accepted and ignored), all else as for partitions. This variant was not tried on a real cluster."
    ) + (
        "sacctmgr -i add qos cleaning Priority=1 PreemptMode=requeue\n"
        "sacctmgr -i add qos train Priority=100 Preempt=cleaning\n"
        "# Then: sbatch --qos=train train.sh, sbatch --qos=cleaning clean.sh, once the users may use them:\n"
        "# sacctmgr -i modify user name=USER set qos+=train,cleaning\n"
    )


def _settings(settings: Iterable[Setting]) -> str:
    return "\n".join(f"{_comment(setting.reason)}{setting.line}\n" for setting in settings)


def _comment(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False) + "\n"
