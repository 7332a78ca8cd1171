"""`slackwater clean`: run, status, verify, export, keep.

Owns the command line's words and exit codes.  Everything heavy is imported inside the commands, after
the signal handlers stand.
"""

import json
import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slackwater_workers.core import LedgerError, PermanentError, Progress, Stopped, WorkersError

if TYPE_CHECKING:
    from slackwater_workers.config import JobConfig
    from slackwater_workers.ledger.store import PosixStore
    from slackwater_workers.pipeline.report import Report
    from slackwater_workers.preemption import StopFlag

app = typer.Typer(
    help="Clean speech recordings, each exactly once, whatever is killed on the way.",
    no_args_is_help=True,
    add_completion=False,
)

SPEECH_CLEANER = "slackwater_workers.steps.cleaner:SpeechCleaner"

Ledger = Annotated[Path, typer.Argument(help="The ledger's folder: what `run` was given as --output.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of lines for a person.")]


@app.command()
def run(
    input: Annotated[Path, typer.Argument(help="Folder with recordings; its subfolders too.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The ledger's folder; made when missing.")],
    job: Annotated[str | None, typer.Option(help="The job's name; the ledger's folder name by default.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings, YAML.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="One setting, key=value; wins over the file.")] = None,
    worker: Annotated[str, typer.Option(help="This worker's name, for people who read the ledger.")] = "worker",
    ttl: Annotated[float | None, typer.Option(help="Seconds after which a silent worker's shard is taken.")] = None,
    nice: Annotated[int, typer.Option(min=0, max=19, help="Be nice to other processes.")] = 0,
    supervised: Annotated[bool, typer.Option(help="Speak JSON events with the parent process.")] = False,
    receipt_file: Annotated[
        Path | None, typer.Option(help="Keep the newest durable record here; in a pod /dev/termination-log.")
    ] = None,
    cleaner: Annotated[str, typer.Option(help="Steps of your own, module:name.")] = SPEECH_CLEANER,
) -> None:
    """Clean INPUT into the ledger.  Start as many as you like, anywhere that sees both folders.

    Ends 0 when every item is settled, 75 when it was told to go (its work is durable), 2 when something
    must be changed by a person.
    """
    from slackwater_workers.preemption import EXIT_PREEMPTED, StopFlag

    stop = StopFlag()
    stop.install()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format=f"{_line_start()}%(levelname)s %(message)s")
    os.nice(nice)
    assignments = [*(set_ or []), *([] if ttl is None else [f"ttl_s={ttl}"])]
    report: Report | None = None
    try:
        from slackwater_workers.config import load_config

        settings = load_config(config, assignments)
        name = job or output.resolve().name
        report = _report(stop, name, supervised)
        if receipt_file is not None:
            report = _with_receipt(report, receipt_file, worker)
        progress = _run(input, output, name, settings, cleaner, worker, report, stop)
    except Stopped as stopped:
        if report is not None:
            report.leaving(str(stopped))
        raise typer.Exit(EXIT_PREEMPTED) from stopped
    except PermanentError as error:
        raise typer.BadParameter(str(error)) from error
    except LedgerError as error:
        typer.echo(f"{_line_start()}failed for now: {error}", err=True)
        raise typer.Exit(1) from error
    finally:
        if sys.stderr.isatty() and not supervised:
            typer.echo(err=True)  # leave the progress line
    if not supervised:
        typer.echo(_sentence(progress))


def _report(stop: "StopFlag", job: str, supervised: bool) -> "Report":
    from slackwater_workers.pipeline.report import PersonReport, SupervisorReport

    if not supervised:
        is_terminal = sys.stderr.isatty()
        return PersonReport(
            lambda line: typer.echo(f"{_line_start()}{line}", err=True, nl=not is_terminal), is_terminal
        )
    from slackwater_workers.events import ParentLink
    from slackwater_workers.preemption import leave_when_parent_is_gone

    link = ParentLink(sys.stdout, sys.stdin)
    link.listen(lambda _message: None, leave_when_parent_is_gone(stop))
    return SupervisorReport(link, job)


def _with_receipt(report: "Report", file: Path, worker: str) -> "Report":
    from slackwater_workers.pipeline.receipt import ReceiptFile
    from slackwater_workers.pipeline.report import ReceiptReport

    return ReceiptReport(report, ReceiptFile(file), worker)


def _line_start() -> str:
    """What takes the place of the progress line on a terminal."""
    return "\r\033[K" if sys.stderr.isatty() else ""


def _run(
    folder: Path,
    output: Path,
    job: str,
    config: "JobConfig",
    cleaner_path: str,
    worker: str,
    report: "Report",
    stop: "StopFlag",
) -> Progress:
    # One thread: a worker is one process, and the fleet decides how many there are.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    from slackwater_workers.config import identity
    from slackwater_workers.ledger.index import LISTING, walk
    from slackwater_workers.ledger.job import join_job
    from slackwater_workers.ledger.store import PosixStore
    from slackwater_workers.pipeline.lone import load_cleaner
    from slackwater_workers.pipeline.worker import Worker

    store = PosixStore(output)
    # A wrong input is reported before a ledger is made for it.
    found = None if store.exists(LISTING) else walk(folder, output, stop.check)
    try:
        cleaner = load_cleaner(cleaner_path, config)
    except ValueError as error:
        raise PermanentError(str(error)) from error
    stop.check()
    store.prepare()
    join_job(store, job, identity(config, cleaner.versions))
    one = Worker(store, config, folder, cleaner, cleaner_path, report, stop, worker)
    return one.run(found)


def _sentence(progress: Progress) -> str:
    return (
        f"{progress.items_done} items cleaned ({progress.audio_s / 60:.1f} min of audio),"
        f" {progress.items_quarantined} quarantined, of {progress.items_total}"
    )


def _open(ledger: Path) -> "PosixStore":
    """The store of an existing ledger.  Raises typer.BadParameter when the folder is none."""
    from slackwater_workers.ledger.job import read_job
    from slackwater_workers.ledger.store import PosixStore

    store = PosixStore(ledger)
    if not ledger.is_dir():
        raise typer.BadParameter(f"the ledger {ledger} does not exist; `slackwater clean run` makes one")
    if read_job(store) is None:
        raise typer.BadParameter(
            f"{ledger} holds no ledger yet; `slackwater clean run INPUT --output {ledger}` makes one"
        )
    return store


@app.command()
def status(ledger: Ledger, as_json: AsJson = False) -> None:
    """How far a job is; needs no worker."""
    from slackwater_workers.ledger.index import load_index
    from slackwater_workers.ledger.job import read_job
    from slackwater_workers.ledger.progress import ProgressReader

    try:
        store = _open(ledger)
        index = load_index(store)
        record = read_job(store) or {}
        progress = ProgressReader(store).read(index, () if index is None else index.shards)
    except WorkersError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        counts = {**asdict(progress), "items_open": progress.items_open}
        typer.echo(json.dumps({"job": record["job"], "fingerprint": record["fingerprint"], **counts}))
    elif index is None:
        typer.echo(f"job {record['job']}: the input is still being read")
    else:
        typer.echo(f"job {record['job']}: {_sentence(progress)}")
        typer.echo(f"{progress.items_open} items open, {progress.shards_open} of {progress.shards_total} shards open")
        for path, reason in index.refused:
            typer.echo(f"not readable: {path!r}: {reason}")


@app.command()
def verify(ledger: Ledger, as_json: AsJson = False) -> None:
    """Read every byte and judge: ends 0 when no item is lost and none is doubled, else 1."""
    from slackwater_workers.ledger.verify import verify as judge

    try:
        found = judge(_open(ledger))
    except WorkersError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        for name, value in asdict(found).items():
            if name != "problems":
                typer.echo(f"{name:18} {value}")
        for problem in found.problems:
            typer.echo(f"problem: {problem}")
    if not found.is_sound:
        raise typer.Exit(1)


@app.command()
def export(
    ledger: Ledger,
    folder: Annotated[Path, typer.Argument(help="Where audio/*.flac and manifest.jsonl go.")],
) -> None:
    """Write the finished items as plain files; again at any time, it adds what is new."""
    from slackwater_workers.ledger.export import export as write

    try:
        found = write(_open(ledger), folder)
    except WorkersError as error:
        raise typer.BadParameter(str(error)) from error
    rest = f"; {found.shards_open} shards are still open" if found.shards_open else ""
    typer.echo(f"{found.cleaned} items in {folder} ({found.written} new), {found.quarantined} quarantined{rest}")


@app.command()
def keep(
    ledger: Annotated[Path, typer.Argument(help="The ledger's folder; it may be made later.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 9090,
) -> None:
    """Tell an operator over HTTP how far a job is, and whether what its workers said is so; changes nothing.

    GET /progress, POST /verify, GET /ready.  Ends 0 at SIGTERM.
    """
    import signal

    stopping = (signal.SIGTERM, signal.SIGINT)
    # Blocked they stay pending, also for the first process of a container, and no thread is interrupted by them.
    signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    from slackwater_workers.keeper.keeper import Keeper
    from slackwater_workers.keeper.server import serving
    from slackwater_workers.ledger.store import PosixStore

    try:
        with serving(Keeper(PosixStore(ledger)), host, port) as url:
            typer.echo(f"keeper of {ledger} on {url}, Ctrl-C ends it")
            signal.sigwait(stopping)
    except PermanentError as error:
        raise typer.BadParameter(str(error)) from error
