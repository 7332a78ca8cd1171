"""`slackwater up` and `slackwater status`."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from slackwater_operator.config import Config, load
from slackwater_operator.core import PermanentError

up = typer.Typer(help="Run speech and cleaning on this machine: slots follow the traffic.", add_completion=False)
status = typer.Typer(help="Show who holds each slot of this machine, and why.", add_completion=False)

DEFAULT_STATE = Config.model_fields["state_dir"].default


@up.command()
def run_up(
    config: Annotated[Path, typer.Option("--config", help="YAML; manifests/samples/workstation.yaml shows every key.")],
    verbose: Annotated[bool, typer.Option(help="Log every step, not only decisions.")] = False,
) -> None:
    """Run until Ctrl-C or SIGTERM; a second one stops at once."""
    from slackwater_operator.supervise import Supervisor  # not needed for --help

    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)

    async def supervise() -> None:
        await Supervisor(load(config)).run(lambda line: typer.echo(f"slackwater up: {line}"))

    try:
        asyncio.run(supervise())
    except PermanentError as error:
        raise typer.BadParameter(str(error)) from error


@status.command()
def run_status(
    state_dir: Annotated[Path, typer.Option(help="The state_dir of the configuration.")] = DEFAULT_STATE,
    as_json: Annotated[bool, typer.Option("--json", help="The whole document, for scripts.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
) -> None:
    """Exit code 0 when a supervisor runs, 1 when the newest status is of one that ended."""
    from slackwater_operator import view  # rich is slow to import
    from slackwater_operator.status import StateFolder

    folder = StateFolder(state_dir.expanduser())
    try:
        document = folder.read()
        if as_json:
            typer.echo(json.dumps(document, indent=2))
        elif watch:
            view.watch(folder.read)
        else:
            view.show(document)
    except PermanentError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(0 if document["running"] else 1)
