"""The adapter that reads jobs and nodes as JSON; everything else, and every change, is `text`'s.

Owns the shapes of two families: 22.05's `openapi/v0.0.38` (plain numbers and words) and the
`data_parser/v0.0.40` to `v0.0.44` of 23.11 to 25.11 (lists of states, numbers as
`{set, infinite, number}`).  Any other shape is refused by name: the fields have moved with nearly every
release, and a field that is read wrong is a GPU that is counted wrong.
"""

import json
from collections.abc import Mapping
from typing import Any

from slackwater_slurm.client import gres, show
from slackwater_slurm.client.command import Commands
from slackwater_slurm.client.text import TextClient, array_tasks, asked_gpus
from slackwater_slurm.core import ENDED, GpuCount, Job, Node, OutputCut, SlurmVersion, UnknownShape

_OLD = "openapi/v0.0.38"
_NEW = frozenset(f"data_parser/v0.0.{number}" for number in range(40, 45))
_SCONTROL_JSON = SlurmVersion(23, 11)
# Where a record has several states, `squeue` shows the first of these, else the base state.
_SHOWN_FIRST = (
    "COMPLETING",
    "STAGE_OUT",
    "CONFIGURING",
    "RESIZING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "SPECIAL_EXIT",
    "STOPPED",
    "REVOKED",
    "RESV_DEL_HOLD",
    "SIGNALING",
)

Record = Mapping[str, Any]


class JsonClient(TextClient):
    """A SlurmClient whose jobs are exact in type and index without `detail`."""

    def __init__(self, commands: Commands) -> None:
        super().__init__(commands)
        self._json_commands = commands

    def nodes(self) -> tuple[Node, ...]:
        # Since data_parser, `sinfo --json` groups nodes; `scontrol` lists them one by one.
        argv = ("scontrol", "show", "nodes") if self.version() >= _SCONTROL_JSON else ("sinfo", "-a")
        return nodes(self._json_commands.run(*argv, "--json"))

    def jobs(self, *, detail: bool = False) -> tuple[Job, ...]:
        del detail  # always there
        return jobs(self._json_commands.run("squeue", "-a", "--json"))


def nodes(output: str) -> tuple[Node, ...]:
    """Nodes of `sinfo --json` (22.05) or `scontrol show nodes --json`.

    Raises OutputCut or UnknownShape.
    """
    return tuple(sorted((_node(record) for record in _listed(output, "nodes")), key=lambda node: node.name))


def jobs(output: str) -> tuple[Job, ...]:
    """Jobs of `squeue --json` that are not over.  Raises OutputCut or UnknownShape."""
    found = [_job(record) for record in _listed(output, "jobs")]
    alive = [job for job in found if job.state not in ENDED]
    return tuple(
        sorted(alive, key=lambda job: (job.array_id or job.job_id, -1 if job.task_id is None else job.task_id))
    )


def _listed(output: str, key: str) -> list[Record]:
    try:
        document = json.loads(output)
    except json.JSONDecodeError as error:
        raise OutputCut(f"JSON of {key} ends or breaks at byte {error.pos} of {len(output)}: {error.msg}") from error
    shape = _shape(document)
    if shape != _OLD and shape not in _NEW:
        raise UnknownShape(
            f"JSON of {key} has the shape {shape!r}, known are {_OLD} and data_parser/v0.0.40 to v0.0.44; "
            "use the text adapter"
        )
    if errors := document.get("errors"):
        raise UnknownShape(f"JSON of {key} reports an error: {str(errors[0])[:200]}")
    found = document.get(key)
    if not isinstance(found, list):
        raise UnknownShape(f"JSON of {key} has no list {key!r}, it has {', '.join(sorted(document))[:120]}")
    return found


def _shape(document: Any) -> str:
    meta = document.get("meta") if isinstance(document, dict) else None
    plugin = meta.get("plugin") if isinstance(meta, dict) else None
    if not isinstance(plugin, dict):
        return "nothing named meta.plugin"
    return str(plugin.get("data_parser") or plugin.get("type") or "no name")


def _node(record: Record) -> Node:
    states = _words(record, "state")
    flags = [*states[1:], *(_words(record, "state_flags") if "state_flags" in record else [])]
    state, responding = show.node_state_of_flags(states[0], flags)
    used = _text(record, "gres_used")
    return Node(
        name=_text(record, "name"),
        state=state,
        state_text="+".join([states[0], *flags]).lower(),
        gpus=gres.gpus(_text(record, "gres")),
        gpus_used=gres.gpus(used),
        partitions=tuple(sorted(_words(record, "partitions"))) if record.get("partitions") else (),
        responding=responding,
        gpu_indexes_used=gres.gpu_indexes(used),
        reason=_text(record, "reason"),
    )


def _job(record: Record) -> Job:
    states = _words(record, "job_state")
    array_id = _number(record, "array_job_id") or None
    waiting = _text(record, "array_task_string")
    names = gres.hosts(_text(record, "nodes"))
    detail = record.get("gres_detail") or []  # one text a node, in the order of `nodes`
    if not isinstance(detail, list) or len(detail) > len(names):
        raise UnknownShape(
            f"job {record.get('job_id')}: gres_detail should list one text a node, got {str(detail)[:80]}"
        )
    held = GpuCount()
    for text in detail:
        held = held + gres.gpus(text)
    asked = asked_gpus(
        _text(record, "tres_per_job"),
        _text(record, "tres_per_node"),
        _text(record, "tres_per_task"),
        _text(record, "tres_per_socket"),
        _number(record, "node_count") or 1,
        _number(record, "tasks") or 1,
    )
    indexes = {
        name: tuple(sorted(index for _, some in gres.gpu_indexes(text) for index in some))
        for name, text in zip(names, detail, strict=False)
    }
    reason = _text(record, "state_description") or _text(record, "state_reason")  # as squeue shows them
    return Job(
        job_id=_number(record, "job_id") or 0,
        array_id=array_id,
        task_id=_number(record, "array_task_id") if array_id is not None else None,
        name=_text(record, "name"),
        user=_text(record, "user_name"),
        partition=_text(record, "partition"),
        state=next((state for state in _SHOWN_FIRST if state in states), states[0]),
        reason="" if reason in gres.NOTHING else reason,
        gpus=held if names else asked,
        nodes=names,
        restarts=_number(record, "restart_cnt") or 0,
        num_tasks=array_tasks(waiting)[0] if waiting else 1,
        throttle=_number(record, "array_max_tasks") or 0 if array_id is not None else None,
        comment=_text(record, "comment"),
        reservation=_text(record, "resv_name"),
        submit_s=_moment_s(record, "submit_time"),
        start_s=_moment_s(record, "start_time"),
        gpu_indexes=tuple(sorted((name, some) for name, some in indexes.items() if some)),
    )


def _words(record: Record, key: str) -> list[str]:
    """A word or a list of words as a list, upper case but for partitions' names."""
    value = record.get(key)
    words = [value] if isinstance(value, str) else value
    if (
        not isinstance(words, list)
        or not all(isinstance(word, str) for word in words)
        or (not words and "flags" not in key)
    ):
        raise UnknownShape(f"{key} should be a word or a list of words, got {str(value)[:80]!r}")
    return words if key == "partitions" else [word.upper() for word in words]


def _text(record: Record, key: str) -> str:
    value = record.get(key)
    if value is not None and not isinstance(value, str):
        raise UnknownShape(f"{key} should be a text, got {str(value)[:80]!r}")
    return value or ""


def _number(record: Record, key: str) -> int | None:
    """A whole number, or None where it is null, not set or infinite."""
    value = record.get(key)
    if isinstance(value, dict) and {"set", "infinite", "number"} <= set(value):
        value = value["number"] if value["set"] and not value["infinite"] else None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnknownShape(f"{key} should be a number, got {str(record.get(key))[:80]!r}")
    return value


def _moment_s(record: Record, key: str) -> float | None:
    value = _number(record, key)
    return float(value) if value else None
