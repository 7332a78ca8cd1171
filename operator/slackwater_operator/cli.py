"""The console script `slackwater`: finds each room's sub-commands and turns errors into one line.

Owns no command.  A room registers a `typer.Typer` in the entry-point group `slackwater.commands`
and imports its heavy parts only when a command runs, so that a room whose extra is not installed
costs nobody else anything.
"""

import difflib
import sys
from importlib.metadata import EntryPoint, entry_points, version

import typer

GROUP = "slackwater.commands"

BAD_INPUT = 2  # exit code of every error that the user can mend; the message is one line

# Which extra brings what a room's commands import.
EXTRAS = {
    "slackwater_operator": "operator",
    "slackwater_inference": "inference",
    "slackwater_workers": "workers",
    "slackwater_slurm": "slurm",
}


def main() -> None:
    """Run `sys.argv`; does not return."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run one command line and return its exit code; errors are printed to standard error."""
    commands = {point.name: point for point in entry_points(group=GROUP)}
    if not argv or argv[0] in ("-h", "--help", "help"):
        typer.echo(overview(commands))
        return 0
    if argv[0] in ("-V", "--version"):
        typer.echo(f"slackwater {version('slackwater')}")
        return 0
    name, *arguments = argv
    if name not in commands:
        close = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(sorted(commands))}"
        return complain("slackwater", f"no such command {name!r}; {hint}")
    return call(commands[name], arguments)


def call(point: EntryPoint, arguments: list[str]) -> int:
    """Run one room's command."""
    prog = f"slackwater {point.name}"
    try:
        app = point.load()
        code = app(arguments, prog_name=prog, standalone_mode=False)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(point.module.partition(".")[0])
        if extra is None or (error.name or "").startswith("slackwater_"):
            raise
        return complain(prog, f"needs the Python package {error.name!r}: pip install 'slackwater[{extra}]'")
    except typer.Exit as done:
        return done.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # typer raises its help text as an error
            typer.echo(error.format_message())
            return BAD_INPUT
        return complain(prog, error.format_message().removeprefix("Invalid value: "))  # the rooms' own words
    return code if isinstance(code, int) else 0


def overview(commands: dict[str, EntryPoint]) -> str:
    """The text of `slackwater --help`."""
    lines = ["Usage: slackwater COMMAND [ARGS]...", "", "Commands (each has its own --help):"]
    for name in sorted(commands):
        try:
            summary = (commands[name].load().info.help or "").strip().splitlines()
        except ModuleNotFoundError as error:
            extra = EXTRAS.get(commands[name].module.partition(".")[0], "?")
            summary = [f"not installed ({error.name} is missing): pip install 'slackwater[{extra}]'"]
        lines.append(f"  {name:<10} {summary[0] if summary else ''}")
    return "\n".join([*lines, "", "  --version  the version"])


def complain(prog: str, message: str) -> int:
    """Print one line to standard error; returns the exit code for bad input."""
    typer.echo(f"{prog}: {' '.join(message.split())}", err=True)
    return BAD_INPUT
