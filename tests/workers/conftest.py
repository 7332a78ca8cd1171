"""What several tests of the workers share."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: tests that open hundreds of ledgers should not wait for a disk."""
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture
def clean() -> Iterator[Spawn]:
    """Starts `slackwater clean ARGS` as a real process; all are ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def spawn(*args: object, **options: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", "from slackwater_workers.cli import app; app(prog_name='clean')"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([*command, *map(str, args)], text=True, **{**pipes, **options})  # type: ignore[call-overload]
        started.append(process)
        return process  # type: ignore[no-any-return]

    yield spawn
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
