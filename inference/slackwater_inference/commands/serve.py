"""`slackwater engine serve`: serve speech from this process.

Owns the command line's checks; `server` owns the process's life.
"""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from slackwater_inference.core import PermanentError, TemporaryError
from slackwater_inference.lifecycle import Lifecycle, listen


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")] = 0,
    slots: Annotated[int, typer.Option(min=1, max=256, help="Requests that run at once.")] = 8,
    max_queued: Annotated[int, typer.Option(min=0, help="Requests that may wait; more get 429.")] = 16,
    pace: Annotated[
        float,
        typer.Option(min=0, help="Frames/s that one stream may run at after its first 10; 0 = as fast as it can."),
    ] = 0.0,
    model: Annotated[str, typer.Option(help="`tiny`, the embedded voice, or an S2-Pro checkpoint's folder.")] = "tiny",
    length: Annotated[
        int | None, typer.Option(min=64, help="Positions that a slot can hold; default: 4,096 or the model's own.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of tiny's weights: another seed is another hum.")] = None,
    store: Annotated[str | None, typer.Option(help="Where recordings are kept: a folder, or s3://bucket.")] = None,
    database: Annotated[str | None, typer.Option(help="Voices and keys: sqlite:///FILE or postgresql://.")] = None,
    asr: Annotated[Path | None, typer.Option(help="Folder of a Whisper model, for /v1/asr.")] = None,
    key: Annotated[list[str] | None, typer.Option(help="An API key that may speak; may be repeated.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="A file of API keys, one a line.")] = None,
    require_key: Annotated[bool, typer.Option("--require-key", help="Without any key, let nobody in.")] = False,
    standby: Annotated[bool, typer.Option(help="Load, then wait for SIGUSR1 before taking a port.")] = False,
    supervised: Annotated[bool, typer.Option(help="Speak JSON lines with the parent process.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads; more than 1 collapses on a busy machine.")] = 1,
) -> None:
    """Serve the speech API; without --store and --database, voices end with the process."""
    if (store is None) != (database is None):
        raise typer.BadParameter("--store and --database belong together: one has the recordings, one their names")
    if seed is not None and model != "tiny":
        raise typer.BadParameter("--seed is for the embedded voice; a checkpoint has its own weights")
    if model != "tiny":
        _check_folder(Path(model))
    keys = [*(key or []), *(_keys_of(key_file) if key_file else [])]
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    # Both before torch, whose import takes seconds: a signal must be understood and a port in use be said at once.
    lifecycle = Lifecycle(supervised=supervised)
    try:
        listener = None if standby else listen(host, port)
        from slackwater_inference.server import Options, run

        options = Options(
            host=host,
            port=port,
            model=model,
            slots=slots,
            max_queued=max_queued,
            pace_frames_per_s=pace,
            length=length,
            seed=seed or 0,
            store=store,
            database=database,
            asr=asr,
            keys=tuple(keys),
            require_key=require_key,
            threads=threads,
        )
        code = run(options, lifecycle, listener)
    except (PermanentError, TemporaryError) as error:  # a port, folder, address or database that cannot be had
        raise typer.BadParameter(str(error)) from error
    lifecycle.end(code)


def _check_folder(folder: Path) -> None:
    """Say what is wrong with a checkpoint before torch is imported; its headers show most of it."""
    from slackwater_inference.folder import BadCheckpoint, inspect

    try:
        inspect(folder)
    except BadCheckpoint as error:
        raise typer.BadParameter(str(error)) from error


def _keys_of(path: Path) -> list[str]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read the key file {path}: {error}") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise typer.BadParameter(f"the key file {path} has no key; write one a line, or leave the option out")
    return keys
