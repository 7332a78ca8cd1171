"""A site as the rules see it: the running configuration and, when given, gres.conf and the job script.

Pure: text in, values out.  Owns the reading of values inside the configuration (`30 sec`,
`a=1,b,c=2`).  Built by `commands` from a live cluster or from files, and by tests from text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from slackwater_slurm.client import gres, show
from slackwater_slurm.core import GpuCount, Partition, SlurmVersion, UnknownShape


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What the rules need of a node."""

    name: str
    state: str  # as scontrol writes it, MIXED+PLANNED
    gpus: GpuCount
    partitions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """A batch script of the cleaning job."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Site:
    """Everything a rule may look at.

    train: partitions of training; cleaning: the one of cleaning.
    nodes, gres_conf, script: None when not given; rules about them then say nothing.
    save_s: the longest time a worker needs from SIGTERM to its end.
    """

    version: SlurmVersion
    config: Mapping[str, str]
    partitions: Mapping[str, Partition]
    train: tuple[str, ...]
    cleaning: str
    save_s: float
    nodes: tuple[NodeRecord, ...] | None = None
    gres_conf: str | None = None
    script: Script | None = None

    def text(self, key: str) -> str:
        """A value of the configuration, "" when it is not set or this release does not have it."""
        return self.config.get(key, "")

    def seconds(self, key: str) -> float | None:
        """A time such as `30 sec`, `10 min` or `00:05:00`; None when not set, `INFINITE` or unlimited."""
        value = self.text(key)
        number = re.fullmatch(r"(\d+)(?: (sec|min|usec))?", value)
        if number is not None:
            return int(number[1]) * {"min": 60.0, "usec": 1e-6}.get(number[2] or "sec", 1.0)
        return gres.span_s(value)

    def number(self, key: str) -> int | None:
        """A whole number; None when not set.  Raises UnknownShape for a word."""
        value = self.text(key)
        if not value:
            return None
        if not value.isdecimal():
            raise UnknownShape(f"{key} should be a whole number, got {value[:80]!r}")
        return int(value)

    def parameter(self, key: str, name: str) -> str | None:
        """`name`'s value inside a list such as SchedulerParameters; "" for a bare word, None when absent."""
        return parameters(self.text(key)).get(name)

    @property
    def cleaning_partition(self) -> Partition | None:
        return self.partitions.get(self.cleaning)

    @property
    def train_partitions(self) -> tuple[Partition, ...]:
        return tuple(self.partitions[name] for name in self.train if name in self.partitions)

    @property
    def cleaning_nodes(self) -> tuple[NodeRecord, ...]:
        """Nodes of the cleaning partition; none when nodes were not given."""
        return tuple(node for node in self.nodes or () if self.cleaning in node.partitions)

    @property
    def cleaning_gpus(self) -> GpuCount:
        total = GpuCount()
        for node in self.cleaning_nodes:
            total = total + node.gpus
        return total


def read_site(
    config: str,
    partitions: str,
    *,
    train: tuple[str, ...],
    cleaning: str,
    save_s: float,
    nodes: str | None = None,
    gres_conf: str | None = None,
    script: Script | None = None,
) -> Site:
    """A site from what `scontrol show config`, `show partition -o` and `show node -o` print.

    Raises UnknownShape or OutputCut.
    """
    settings = show.config(config)
    found = show.partitions(partitions)
    return Site(
        version=SlurmVersion.parse(settings["SLURM_VERSION"]),
        config=settings,
        partitions={partition.name: partition for partition in found},
        train=train,
        cleaning=cleaning,
        save_s=save_s,
        nodes=None if nodes is None else tuple(_node(record) for record in show.records(nodes, "NodeName")),
        gres_conf=gres_conf,
        script=script,
    )


def parameters(text: str) -> dict[str, str]:
    """`a=1,b,c=2` as names and values, in the order written."""
    pairs = (part.partition("=") for part in text.split(",") if part.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


def with_parameters(text: str, **changes: str) -> str:
    """The same list with some values set, the others kept."""
    merged = parameters(text) | changes
    return ",".join(f"{name}={value}" if value else name for name, value in merged.items())


def _node(record: Mapping[str, str]) -> NodeRecord:
    show.with_keys(record, "State")
    return NodeRecord(
        name=record["NodeName"],
        state=record["State"],
        gpus=gres.gpus(record.get("Gres", "")),
        partitions=tuple(filter(None, record.get("Partitions", "").split(","))),
    )
