"""`slackwater slurm status`: a cluster as one table, or as JSON.

Owns the document and its look.  Asks Slurm alone, so that it works with and without a running controller.
"""

from typing import TYPE_CHECKING, Any

from slackwater_slurm.client.base import SlurmClient
from slackwater_slurm.observation import Array, Observation, Scope, Use, observe

if TYPE_CHECKING:
    from rich.console import RenderableType

STYLES = {Use.TRAINING: "bold blue", Use.CLEANING: "yellow", Use.IDLE: "bright_black", Use.UNAVAILABLE: "red"}
UNNAMED = "gpu"  # a type that the site gave no name
BAR_CELLS = 16


def document(client: SlurmClient, now_s: float) -> dict[str, Any]:
    """What there is to know now, as JSON values.  now_s: seconds since the epoch.  Raises what the client raises."""
    scope = Scope(user=None, partition=None)
    seen = observe(client.nodes(), client.jobs(detail=True), client.reservations(), client.partitions(), scope, now_s)
    return {
        "cluster": client.config().get("ClusterName", ""),
        "version": str(client.version()),
        "t_s": round(now_s, 3),
        "gpus": {use.value: seen.count(use) for use in Use},
        "types": [_type(seen, gpu_type) for gpu_type in seen.gpu_types],
        "nodes": _nodes(seen),
        "jobs": [_job(seen, job) for job in sorted({array.job for array in seen.arrays})],
        "pending": [
            {"partition": partition, "reason": reason, "gpus": gpus} for (partition, reason), gpus in seen.pending_gpus
        ],
    }


def _type(seen: Observation, gpu_type: str) -> dict[str, Any]:
    uses = {use.value: seen.gpus_of(gpu_type, use) for use in Use}
    nodes = {node.name for node in seen.nodes if gpu_type in node.gpus.types}
    return {"gpu_type": gpu_type or UNNAMED, "nodes": len(nodes), "gpus": sum(uses.values()), **uses}


def _nodes(seen: Observation) -> list[dict[str, Any]]:
    uses = dict(seen.gpus)
    leaving = dict(seen.yielding)
    return [
        {
            "node": node.name,
            "state": node.state_text,
            "leaving_for": leaving.get(node.name),
            "gpu_type": gpu_type or UNNAMED,
            "gpus": count,
            **{use.value: uses.get((node.name, gpu_type, use), 0) for use in Use},
        }
        for node in seen.nodes
        for gpu_type, count in node.gpus.by_type
    ]


def _job(seen: Observation, job: str) -> dict[str, Any]:
    """requeues: preemptions, and what was sent away from drained nodes, of the tasks that are not over."""
    arrays: list[Array] = [array for array in seen.arrays if array.job == job]
    reasons = sorted({array.reason for array in arrays if array.reason})
    return {
        "job": job,
        "arrays": [array.array_id for array in arrays],
        "running": sum(array.held_workers for array in arrays),
        "displaced": sum(array.displaced for array in arrays),
        "waiting": sum(array.waiting for array in arrays),
        "throttle": sum(array.throttle or 0 for array in arrays) or None,
        "requeues": sum(array.restarts for array in arrays),
        "reasons": reasons,
    }


def render(found: dict[str, Any]) -> "RenderableType":
    """A document as a person sees it, at 80 columns and wider.  Colours repeat what the words say."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [headline(found), Text(), gpu_table(found)]
    if unavailable := [node for node in found["nodes"] if node["unavailable"] or node["leaving_for"]]:
        words = (f"{node['node']} ({node['leaving_for'] or node['state']})" for node in unavailable)
        parts.append(Text(f"not for cleaning: {', '.join(words)}", STYLES[Use.UNAVAILABLE]))
    if found["jobs"]:
        parts += [Text(), job_table(found)]
    for wait in found["pending"]:
        parts.append(
            Text(f"{wait['gpus']} GPUs are waited for in {wait['partition']}: {wait['reason'] or 'no reason'}")
        )
    return Group(*parts)


def headline(found: dict[str, Any]) -> "RenderableType":
    """One line of truth: what the GPUs do."""
    from rich.text import Text

    gpus = found["gpus"]
    total = sum(gpus.values())
    busy = gpus[Use.TRAINING] + gpus[Use.CLEANING]
    usable = total - gpus[Use.UNAVAILABLE]
    line = Text.assemble((f"{found['cluster']}: {total} GPUs, ", "bold"))
    for use in Use:
        line.append(f"{gpus[use]} {use}", STYLES[use])
        line.append(", " if use is not Use.UNAVAILABLE else "")
    return line.append(f"; in use {busy / usable:.0%}" if usable else "; none usable")


def gpu_table(found: dict[str, Any]) -> "RenderableType":
    """Nodes and GPUs by type and use."""
    from rich.text import Text

    from slackwater_operator.view import plain_table

    table = plain_table(
        ("GPU TYPE", "left"),
        ("NODES", "right"),
        ("GPUS", "right"),
        *((use.value.upper(), "right") for use in Use),
        ("", "left"),
    )
    for row in found["types"]:
        bar = Text()
        filled = 0
        for use, sign in zip(Use, "█▓░×", strict=True):
            cells = round(BAR_CELLS * (filled + row[use]) / row["gpus"]) - round(BAR_CELLS * filled / row["gpus"])
            bar.append(sign * cells, STYLES[use])
            filled += row[use]
        cells = (str(row[use]) for use in Use)
        table.add_row(row["gpu_type"], str(row["nodes"]), str(row["gpus"]), *cells, bar)
    return table


def job_table(found: dict[str, Any]) -> "RenderableType":
    """Our arrays, by cleaning job."""
    from slackwater_operator.view import plain_table

    columns = ("RUNNING", "DISPLACED", "WAITING", "AT MOST", "REQUEUED")
    table = plain_table(("CLEANING JOB", "left"), *((title, "right") for title in columns), ("WAITS FOR", "left"))
    for row in found["jobs"]:
        table.add_row(
            row["job"],
            str(row["running"]),
            str(row["displaced"]),
            str(row["waiting"]),
            str(row["throttle"] or ""),
            str(row["requeues"]),
            ", ".join(row["reasons"]),
        )
    return table
