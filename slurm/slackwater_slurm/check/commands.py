"""`slackwater slurm check`: where the texts come from, what is printed, how it ends.

Owns the command's words and exit codes: 0 nothing but notes, 1 something to change, 2 it could not be
checked.  Mounted by the room's `cli`.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slackwater_slurm.check.facts import Site


def check(
    train: Annotated[
        list[str] | None, typer.Option(help="A partition of training; may be given again. [train]")
    ] = None,
    cleaning: Annotated[str, typer.Option(help="The partition of cleaning.")] = "cleaning",
    save_s: Annotated[float, typer.Option(min=0, help="Seconds a worker may need from SIGTERM to its end.")] = 10.0,
    script: Annotated[Path | None, typer.Option(help="The cleaning job's batch script, to check too.")] = None,
    gres: Annotated[Path | None, typer.Option(help="A node's gres.conf, to check too.")] = None,
    conf: Annotated[Path | None, typer.Option(help="The cluster's slurm.conf; the machine's own by default.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="Instead of a cluster: what `scontrol show config` printed.")
    ] = None,
    partitions: Annotated[Path | None, typer.Option(help="With --config: `scontrol show partition -o`.")] = None,
    nodes: Annotated[Path | None, typer.Option(help="With --config: `scontrol show node -o`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines for a person.")] = False,
) -> None:
    """Say what keeps preemption from being quick or lossless here, what it costs and what to set.

    Reads only.  Ends 0 when there is nothing to change, 1 when there is, 2 when it could not be checked.
    """
    from slackwater_slurm.check import report
    from slackwater_slurm.check.facts import Script, read_site
    from slackwater_slurm.core import SlurmError

    if (config is None) != (partitions is None) or (nodes is not None and config is None):
        raise typer.BadParameter("--config and --partitions go together, and --nodes only with them")
    try:
        if config is not None and partitions is not None:
            texts = (_read(config), _read(partitions), _read(nodes) if nodes is not None else None)
        else:
            texts = _ask(conf)
        site: Site = read_site(
            texts[0],
            texts[1],
            nodes=texts[2],
            train=tuple(train or ["train"]),
            cleaning=cleaning,
            save_s=save_s,
            gres_conf=_read(gres) if gres is not None else None,
            script=Script(script.name, _read(script)) if script is not None else None,
        )
        found = report.findings(site)
    except SlurmError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        typer.echo(json.dumps(report.document(site, found), indent=2, ensure_ascii=False))
    else:
        typer.echo("\n".join(report.lines(site, found)))
    if report.is_failed(found):
        raise typer.Exit(1)


def _ask(conf: Path | None) -> tuple[str, str, str]:
    """The three texts from the running cluster."""
    from slackwater_slurm.client.command import Commands

    commands = Commands(os.environ, conf)
    config = commands.run("scontrol", "show", "config")
    partitions = commands.run("scontrol", "-a", "-o", "show", "partition")
    return config, partitions, commands.run("scontrol", "-a", "-o", "show", "node")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}") from error
