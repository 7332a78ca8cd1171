"""`slackwater gateway`: parse, listen, run.

Owns the options and their errors.  The work is in `server`.
"""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import socket

    from slackwater_inference.gateway.routing import ReplicaSpec

app = typer.Typer(
    help="One address for API clients before the engine replicas of this machine.",
    no_args_is_help=True,
    add_completion=False,
    subcommand_metavar="",
)


@app.callback(invoke_without_command=True)
def gateway(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8080,
    max_queued: Annotated[int, typer.Option(min=0, help="Requests that may wait for a slot; the next gets 429.")] = 256,
    queue_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a request may wait; then 503.")] = 30.0,
    grace: Annotated[float, typer.Option(min=1, help="Seconds for running requests after SIGTERM.")] = 30.0,
    control_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="A second port, for an operator that names the replicas; 0 takes any."),
    ] = None,
    replica: Annotated[
        list[str] | None, typer.Option(metavar="URL=SLOTS", help="An engine replica; may be given several times.")
    ] = None,
    supervised: Annotated[
        bool, typer.Option("--supervised", help="Speak JSON lines with a parent, which names the replicas.")
    ] = False,
) -> None:
    """Queue requests for free slots and stream the answers through."""
    import logging
    import sys

    from slackwater_inference.events import ParentLink
    from slackwater_inference.gateway import server
    from slackwater_inference.gateway.slots import Limits

    if not replica and not supervised and control_port is None:
        raise typer.BadParameter(
            "no replica to send requests to: give --replica URL=SLOTS, --control-port or --supervised"
        )
    replicas = tuple(_replica(text) for text in replica or ())
    listener = _listen(host, port, "--port")
    control = None if control_port is None else _listen(host, control_port, "--control-port")

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request tells nothing new
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    link = ParentLink(sys.stdout, sys.stdin) if supervised else ParentLink(None, None)
    if not supervised:
        also = "" if control is None else f", control on {server.url_of(control)}"
        typer.echo(f"gateway on {server.url_of(listener)}{also}, Ctrl-C ends it")
    settings = server.Settings(max_queued, grace, Limits(queue_timeout_s=queue_timeout), replicas)
    server.run(listener, settings, link, control)


def _listen(host: str, port: int, option: str) -> "socket.socket":
    """Take the port.  Raises typer.BadParameter."""
    from slackwater_inference.gateway import server

    try:
        return server.listen(host, port)
    except OSError as error:
        raise typer.BadParameter(
            f"cannot listen on {host} port {port}: {error.strerror or error}; give another --host or {option}"
        ) from None


def _replica(text: str) -> "ReplicaSpec":
    """Parse URL=SLOTS.  Raises typer.BadParameter."""
    import pydantic

    from slackwater_inference.gateway.membership import ReplicaMessage

    url, _, slots = text.rpartition("=")
    try:
        return ReplicaMessage.model_validate({"uid": url, "url": url, "slots": slots}).spec()
    except pydantic.ValidationError:
        raise typer.BadParameter(f"--replica wants URL=SLOTS such as http://127.0.0.1:9000=4, got {text!r}") from None
