"""The files of the lab's cluster: what is peculiar to one machine without GPUs, plus the settings we recommend.

Owns the text of slurm.conf, gres.conf and cgroup.conf for `slackwater_slurm.lab`.  Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from slackwater_slurm.core import SlurmVersion
from slackwater_slurm.templates.settings import (
    CGROUP_PLUGIN_DISABLED_SINCE,
    NodeGroup,
    cluster_settings,
    partition_settings,
)

CLUSTER = "lab"
# What any cluster with preemption into a queue must say; all else of `tuned=False` is Slurm's default.
_PREEMPTION_ONLY = frozenset({"SelectType", "SelectTypeParameters", "GresTypes", "PreemptType", "PreemptMode"})


@dataclass(frozen=True, slots=True)
class LabSettings:
    """What a lab looks like.

    nodes: each a group of one host.
    tuned: our settings; False leaves Slurm's defaults, so that the two can be compared.
    kill_wait_s: None = Slurm's default, 30.
    overrides: keys of slurm.conf set last, (key, value) each; they win.
    partitions: whole PartitionName lines; () = training and cleaning as we recommend them.
    """

    nodes: tuple[NodeGroup, ...] = (
        NodeGroup("h1", "h200", 4),
        NodeGroup("h2", "h200", 4),
        NodeGroup("r1", "rtx5090", 2),
        NodeGroup("r2", "rtx5090", 2),
    )
    cpus_per_node: int = 16
    memory_mb_per_node: int = 64_000
    tuned: bool = True
    kill_wait_s: int | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    partitions: tuple[str, ...] = ()

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(node.names for node in self.nodes)

    @property
    def num_gpus(self) -> int:
        return sum(node.num_gpus for node in self.nodes)


def slurm_conf(settings: LabSettings, version: SlurmVersion, folder: str, host: str, ports: Mapping[str, int]) -> str:
    """The text of slurm.conf.

    host: this machine's short name, which must resolve.   ports: of `slurmctld` and of each node by its name.
    """
    values = {
        "ClusterName": CLUSTER,
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": str(ports["slurmctld"]),
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool/%n",
        "SlurmctldPidFile": f"{folder}/run/slurmctld.slurm-pid",
        "SlurmdPidFile": f"{folder}/run/%n.slurm-pid",
        "SlurmctldLogFile": f"{folder}/log/slurmctld.log",
        "SlurmdLogFile": f"{folder}/log/%n.log",
        # cgroups of a guest or a container are seldom ours to use; a real cluster must not do this (templates).
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MpiDefault": "none",
        "PropagateResourceLimits": "NONE",
        "MailProg": "/bin/true",
        "ReturnToService": "2",
        # Lets a small machine claim the CPUs and memory of four large ones.
        "SlurmdParameters": "config_overrides",
        "DefMemPerCPU": "100",
        "SchedulerType": "sched/backfill",
        "AccountingStorageType": "accounting_storage/none",
        "JobCompType": "jobcomp/filetxt",
        "JobCompLoc": f"{folder}/log/ended-jobs.txt",
    }
    recommended = cluster_settings(version, num_gpus=settings.num_gpus)
    values |= {item.key: item.value for item in recommended if settings.tuned or item.key in _PREEMPTION_ONLY}
    if settings.kill_wait_s is not None:
        values["KillWait"] = str(settings.kill_wait_s)
    values |= dict(settings.overrides)
    # Clients find our munged through the socket named here.
    values["AuthInfo"] = ",".join([f"socket={folder}/munge/socket", *filter(None, [values.get("AuthInfo")])])
    lines = [f"{key}={value}" for key, value in values.items()]
    for node in settings.nodes:
        lines.append(
            f"NodeName={node.names} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[node.names]} "
            f"CPUs={settings.cpus_per_node} RealMemory={settings.memory_mb_per_node} Gres={node.gres} State=UNKNOWN"
        )
    lines += settings.partitions or [item.line for item in partition_settings(",".join(settings.node_names))]
    return "\n".join(lines) + "\n"


def gres_conf(settings: LabSettings, folder: str) -> str:
    """The text of gres.conf: each node counts the device files of `folder`/dev from 0 as its own."""
    lines = ["AutoDetect=off"]
    for node in settings.nodes:
        indexes = f"[0-{node.num_gpus - 1}]" if node.num_gpus > 1 else "0"
        files = f"{folder}/dev/nvidia{indexes}"
        lines.append(f"NodeName={node.names} Name=gpu Type={node.gpu_type} File={files} Flags=nvidia_gpu_env")
    return "\n".join(lines) + "\n"


def cgroup_conf(version: SlurmVersion) -> str:
    """The text of cgroup.conf.  Newer releases die without a mounted cgroup file system unless told; older ones
    do not know the word."""
    return "CgroupPlugin=disabled\n" if version >= CGROUP_PLUGIN_DISABLED_SINCE else ""
