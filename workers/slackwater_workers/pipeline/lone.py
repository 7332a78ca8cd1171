"""One suspect item in a process of its own, so that it can kill nobody but that process.

Owns both ends: `clean_alone` in the worker, and this module as a program, which reads one JSON request from its
standard input and writes one frame to its standard output.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from slackwater_workers.config import JobConfig
from slackwater_workers.core import Cleaned, Cleaner, Item, ItemRefused, LedgerError, StorageFull, TemporaryError
from slackwater_workers.ledger.frames import read_frames, write_frame
from slackwater_workers.preemption import Watchdog

_EXIT_STORAGE_FULL = 3
_EXIT_TEMPORARY = 4
_EXIT_STALLED = 5
_POLL_S = 0.05
_STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def load_cleaner(path: str, config: JobConfig) -> Cleaner:
    """The cleaner at `module:name`, made with the job's settings.  Raises ValueError when there is none."""
    module, _, name = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"no cleaner at {path!r}: {error}; wanted module:name") from error
    cleaner: Cleaner = factory(config)
    return cleaner


def clean_alone(cleaner: str, config: JobConfig, folder: Path, item: Item, keep_going: Callable[[], None]) -> Cleaned:
    """Clean one item in a child process.

    Raises ItemRefused, with what the child died of, when it dies: then the item, not the worker, is at fault.
    """
    request = {
        "cleaner": cleaner,
        "config": config.model_dump(),
        "folder": os.fspath(folder),
        "item": asdict(item),
    }
    output = tempfile.TemporaryFile()  # noqa: SIM115 - becomes the audio that the receiver closes
    try:
        code = _run(json.dumps(request), output, keep_going)
        if code == _EXIT_STORAGE_FULL:
            raise StorageFull(f"no space left on {tempfile.gettempdir()}; free some and start again, nothing is lost")
        if code == _EXIT_TEMPORARY or -code in _STOPPING_SIGNALS:
            raise TemporaryError(f"the process for {item.path!r} was stopped or met a failing storage")
        if code == _EXIT_STALLED:
            raise ItemRefused("alone", f"a step gave no answer for {config.stall_s:g} s")
        if code != 0:
            raise ItemRefused("alone", f"it killed its process ({_cause(code)})")
        frame = next(read_frames(output), None)
        if frame is None or not frame.is_whole:
            raise TemporaryError(f"the process for {item.path!r} gave no whole answer")
        if frame.row["status"] == "refused":
            raise ItemRefused(frame.row["step"], frame.row["reason"])
        output.seek(frame.data_offset)
        return Cleaned(frame.row, output, frame.data_bytes)
    except BaseException:
        output.close()
        raise


def _run(request: str, output: BinaryIO, keep_going: Callable[[], None]) -> int:
    command = [sys.executable, "-m", "slackwater_workers.pipeline.lone"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, text=False)
    try:
        assert process.stdin is not None
        try:
            process.stdin.write(request.encode("ascii"))
            process.stdin.close()
        except BrokenPipeError:
            pass  # it died at its start; its exit code says so
        while True:
            keep_going()
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _cause(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def main() -> int:
    """The child's side."""
    # The group's SIGTERM is for the worker; the child ends when the worker kills it or goes.
    for number in _STOPPING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    request = json.load(sys.stdin.buffer)
    config = JobConfig(**request["config"])
    cleaner = load_cleaner(request["cleaner"], config)
    parent = os.getppid()
    watchdog = Watchdog(config.stall_s, lambda _: os._exit(_EXIT_STALLED))
    watchdog.start()

    def keep_going() -> None:
        watchdog.pet()
        if os.getppid() != parent:
            os._exit(1)  # the worker was killed; nobody waits for the answer

    try:
        cleaned = cleaner.clean(Path(request["folder"]), Item(**request["item"]), keep_going)
        write_frame(_write, cleaned.row, cleaned.audio, cleaned.audio_bytes)
    except ItemRefused as refusal:
        write_frame(_write, {"status": "refused", "step": refusal.step, "reason": refusal.reason}, None, 0)
    except StorageFull:
        return _EXIT_STORAGE_FULL
    except LedgerError:
        return _EXIT_TEMPORARY
    sys.stdout.flush()
    return 0


def _write(piece: bytes) -> None:
    sys.stdout.buffer.write(piece)


if __name__ == "__main__":
    sys.exit(main())
