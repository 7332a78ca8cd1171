"""`slackwater demo`: options, what is shown while it runs, and the exit code."""

import asyncio
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slackwater_operator.demo.plan import Work
    from slackwater_operator.demo.result import DemoResult
    from slackwater_operator.demo.run import Watcher

demo = typer.Typer(
    help="Watch the main job on this machine: real requests, real cleaning, real evictions.", add_completion=False
)

INTERRUPTED = 130
ALL_HOLDS = "All of it holds: nothing lost, nothing doubled, every request answered or refused honestly."


@demo.command()
def run_demo(
    recordings: Annotated[Path | None, typer.Option("--input", help="A folder of recordings to clean.")] = None,
    output: Annotated[Path, typer.Option(help="Where demo-report.html and demo-report.json go.")] = Path(),
    keep: Annotated[Path | None, typer.Option(help="Keep ledgers and logs in this new folder.")] = None,
    filling: Annotated[bool, typer.Option(help="--no-filling: the same traffic with nothing lent.")] = True,
    plain: Annotated[bool, typer.Option(help="Plain lines even on a terminal.")] = False,
) -> None:
    """Play real traffic against a real engine while cleaning fills what is idle; takes about two minutes.

    Exit code 0: nothing lost, nothing doubled, slots were taken back, every request answered or refused
    honestly.  1: something of that does not hold, and it is said what.  130: stopped by hand.
    """
    from slackwater_operator.core import PermanentError
    from slackwater_operator.demo import plan
    from slackwater_operator.demo.watch import LiveView, PlainLines

    folder = Path(tempfile.mkdtemp(prefix="slackwater-demo-")) if keep is None else keep
    try:
        work = plan.Work(folder, find_recordings(recordings), plan.free_port())
        if keep is not None and keep.exists() and any(keep.iterdir()):
            raise PermanentError(f"--keep {keep} is not empty; name a new folder")
        if not output.is_dir():
            raise PermanentError(f"--output {output} is not a folder")
        viewer = LiveView() if sys.stdout.isatty() and not plain else PlainLines()
        with viewer as watch:
            result = asyncio.run(run(work, watch, filling=filling))
        code = conclude(result, output, kept=keep, filling=filling)
    except asyncio.CancelledError:  # a second Ctrl-C: at once, without a report; the kernel ends the children with us
        raise typer.Exit(INTERRUPTED) from None
    except PermanentError as error:
        raise typer.BadParameter(str(error)) from error
    finally:
        if keep is None:
            from slackwater_operator.demo.run import clear

            clear(folder)
    raise typer.Exit(code)


def find_recordings(named: Path | None) -> Path:
    """The folder to clean: the one named, else what the set-up fetched."""
    from slackwater_operator.core import PermanentError
    from slackwater_operator.demo import plan

    folder = named or plan.FETCHED.expanduser()
    if not folder.is_dir():
        hint = "" if named else "; `make demo` fetches them, or name a folder of your own with --input"
        raise PermanentError(f"no recordings: {folder} is not a folder{hint}")
    return folder


async def run(work: "Work", watch: "Watcher", *, filling: bool) -> "DemoResult":
    """Run with Ctrl-C and SIGTERM turned into an orderly end."""
    from slackwater_operator.demo.run import Demo

    task = asyncio.ensure_future(Demo(work, watch, filling=filling).run())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task


def conclude(result: "DemoResult", output: Path, *, kept: Path | None, filling: bool) -> int:
    """Write the report, print the table and what it means; returns the exit code."""
    from dataclasses import replace

    from rich.console import Console

    from slackwater_operator.demo import report
    from slackwater_operator.demo.verdict import verdict

    look = f"slackwater clean status {kept}/ledgers/speech-24k" if kept else ""
    result = replace(result, verdict=verdict(result, filling=filling), clean_command=look)
    data, page, *speech = report.write(result, output)
    console = Console()
    console.print()
    console.print(report.table(result))
    console.print()
    console.print(result.verdict or ALL_HOLDS)
    console.print(f"The whole run as a page: {page}   as data: {data}", soft_wrap=True)
    for path in speech:
        console.print(f"What the API streamed as MP3 after the traffic: {path}", soft_wrap=True)
    if kept is not None:
        console.print(f"Kept in {kept}: ledgers, logs and status; for instance {look}", soft_wrap=True)
    if result.verdict == "stopped by hand":
        return INTERRUPTED
    return 1 if result.verdict else 0
