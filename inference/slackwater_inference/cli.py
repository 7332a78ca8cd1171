"""`slackwater engine`: the room's command line.

Mounts the commands; owns none.
"""

import typer

from slackwater_inference.commands import keys
from slackwater_inference.commands.plan import plan
from slackwater_inference.commands.quantize import quantize
from slackwater_inference.commands.serve import serve

app = typer.Typer(help="The speech engine.", no_args_is_help=True, add_completion=False)
app.command()(serve)
app.command()(plan)
app.command()(quantize)
app.add_typer(keys.app, name="keys")


@app.callback()
def engine() -> None:
    """The speech engine."""
