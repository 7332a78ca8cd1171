"""`slackwater gateway`: parse, listen, run.

Owns the options and their errors.  The work is in `server`.
"""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
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

    if not replica and not supervised:
        raise typer.BadParameter("no replica to send requests to: give --replica URL=SLOTS, or --supervised")
    replicas = tuple(_replica(text) for text in replica or ())
    try:
        listener = server.listen(host, port)
    except OSError as error:
        raise typer.BadParameter(
            f"cannot listen on {host} port {port}: {error.strerror or error}; give another --host or --port"
        ) from None

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request tells nothing new
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    link = ParentLink(sys.stdout, sys.stdin) if supervised else ParentLink(None, None)
    if not supervised:
        typer.echo(f"gateway on {server.url_of(listener)}, Ctrl-C ends it")
    settings = server.Settings(max_queued, grace, Limits(queue_timeout_s=queue_timeout), replicas)
    server.run(listener, settings, link)


def _replica(text: str) -> "ReplicaSpec":
    """Parse URL=SLOTS.  Raises typer.BadParameter."""
    import pydantic

    from slackwater_inference.gateway.server import ReplicaMessage

    url, _, slots = text.rpartition("=")
    try:
        return ReplicaMessage.model_validate({"uid": url, "url": url, "slots": slots}).spec()
    except pydantic.ValidationError:
        raise typer.BadParameter(f"--replica wants URL=SLOTS such as http://127.0.0.1:9000=4, got {text!r}") from None
