"""`slackwater slurm`: check, render, run, status, and a lab to try them on (up, down).

Owns the command line's words and exit codes: 0 done, 2 a person must change something.  Everything heavy is
imported inside the commands.
"""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slackwater_operator.core import PermanentError, SlackwaterError
from slackwater_slurm import lab_cli
from slackwater_slurm.check.commands import check
from slackwater_slurm.templates.commands import render

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from slackwater_slurm.config import Kubernetes
    from slackwater_slurm.sources import Source

app = typer.Typer(help="Slurm: training first, cleaning in every gap.", no_args_is_help=True, add_completion=False)
app.command()(check)
app.command()(render)
app.command()(lab_cli.up)
app.command()(lab_cli.down)

SlurmConf = Annotated[
    Path | None,
    typer.Option("--conf", exists=True, dir_okay=False, help="The cluster's slurm.conf, if not the machine's own."),
]


class Adapter(StrEnum):
    TEXT = "text"
    JSON = "json"
    PYSLURM = "pyslurm"


class Form(StrEnum):
    TABLE = "table"
    JSON = "json"


@app.command()
def run(
    config: Annotated[Path, typer.Option("--config", help="YAML; manifests/samples/slurm.yaml shows every key.")],
    verbose: Annotated[bool, typer.Option(help="Log every step, not only decisions.")] = False,
) -> None:
    """Size the cleaning arrays to the idle GPUs until every job is done, Ctrl-C or SIGTERM.

    What was submitted goes on when this ends; started again, it goes on with what it finds.
    """
    import logging
    import os
    import signal
    import threading
    from contextlib import ExitStack

    from slackwater_slurm.config import load
    from slackwater_slurm.service import Service, connector
    from slackwater_slurm.sources import Listed, Several

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    try:
        settings = load(config)
        with ExitStack() as stack:
            sources: list[Source] = [Listed(settings.jobs)] if settings.jobs else []
            if settings.kubernetes is not None:
                sources.append(stack.enter_context(_placed(settings.kubernetes, os.environ)))
            Service(settings, connector(settings, os.environ), Several(tuple(sources))).run(stop)
    except PermanentError as error:
        raise typer.BadParameter(str(error)) from error


def _placed(settings: "Kubernetes", environ: "Mapping[str, str]") -> "AbstractContextManager[Source]":
    """Jobs of a Kubernetes cluster.  Raises PermanentError without the client's packages, or without such a cluster."""
    try:
        from slackwater_operator.kube.connection import Connection
        from slackwater_slurm.placed import follow
    except ModuleNotFoundError as error:
        wanted = "pip install 'slackwater[operator]'"
        raise PermanentError(f"`kubernetes` needs the Python package {error.name!r}: {wanted}") from error
    return follow(settings, Connection.default(settings.kubeconfig, settings.context, environ))


@app.command()
def status(
    conf: SlurmConf = None,
    output: Annotated[Form, typer.Option("--output", "-o", help="A table, or JSON for scripts.")] = Form.TABLE,
    client: Annotated[Adapter, typer.Option(help="How Slurm is spoken to.")] = Adapter.TEXT,
    timeout: Annotated[float, typer.Option(min=0.5, help="Seconds for each of Slurm's commands.")] = 10.0,
) -> None:
    """What the cluster's GPUs do: training, cleaning, idle, unavailable; and our arrays."""
    import json
    import os
    import time

    from slackwater_slurm.client import open_client
    from slackwater_slurm.status import document, render

    try:
        found = document(open_client(os.environ, client.value, conf=conf, timeout_s=timeout), time.time())
    except SlackwaterError as error:
        raise typer.BadParameter(str(error)) from error
    if output is Form.JSON:
        typer.echo(json.dumps(found, indent=2))
    else:
        from rich.console import Console

        Console().print(render(found))
