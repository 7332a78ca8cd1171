"""Stand-ins for the programs of a fleet: child processes that do as a control file says.

`python -m slackwater_operator.testing.children CONTROL ...` takes the place of `slackwater` in
`Programs`.  It speaks the wire of operator/README.md as gateway, engine or worker.  CONTROL is a JSON
file, read anew all the time: {"signals": {...}, "engine": {"running": 0}, "worker": "normal"}; a worker
is normal, hangs (ignores SIGTERM), lies (names a digest that is wrong), crashes, is done, or has bad input.
"""

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

STEP_S = 0.02


def write_control(path: Path, **values: Any) -> None:
    """Replace the control file."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(values))
    temporary.replace(path)


def main(control: Path, arguments: list[str]) -> None:
    flags = {"term": False, "wake": False}
    signal.signal(signal.SIGTERM, lambda *_: flags.update(term=True))
    signal.signal(signal.SIGUSR1, lambda *_: flags.update(wake=True))
    if arguments[0] == "gateway":
        gateway(control, flags)
    elif arguments[0] == "engine":
        engine(control, flags, standby="--standby" in arguments)
    else:
        output = next(argument for argument in arguments if argument.startswith("--output="))
        worker(control, flags, Path(output.partition("=")[2]))


def gateway(control: Path, flags: dict[str, bool]) -> None:
    say("ready", url="http://127.0.0.1:0")
    while not flags["term"]:
        say("signals", **read(control)["signals"])
        time.sleep(0.05)


def engine(control: Path, flags: dict[str, bool], *, standby: bool) -> None:
    if standby:
        say("standby")
        while not flags["wake"]:
            leave_if_told(flags)
            time.sleep(STEP_S)
    say("ready", url=f"http://127.0.0.1:{os.getpid()}", slots=4)
    while True:
        say("load", running=read(control).get("engine", {}).get("running", 0), waiting=0, slots=4)
        leave_if_told(flags)
        time.sleep(STEP_S)


def worker(control: Path, flags: dict[str, bool], output: Path) -> None:
    behaviour = read(control).get("worker", "normal")
    if behaviour == "bad input":
        sys.stderr.write("slackwater clean: no audio files\n")
        sys.exit(2)
    if behaviour == "crash":
        sys.exit(1)
    say("working", job="job", items_done=0, items_total=1000, items_open=1000, shards_open=100)
    output.mkdir(parents=True, exist_ok=True)
    path, written, items = output / f"part-{os.getpid()}", b"", 0
    while True:
        written += b"one item\n"
        items += 1
        with path.open("wb") as part:
            part.write(written)
            part.flush()
            os.fsync(part.fileno())
        digest = "0" * 64 if behaviour == "lies" else hashlib.sha256(written).hexdigest()
        say("durable", unit=items, path=str(path), size_bytes=len(written), sha256=digest, items=items, audio_s=1.0)
        if behaviour == "done" and items == 3:
            sys.exit(0)
        if flags["term"] and behaviour != "hangs":
            say("leaving", reason="SIGTERM")
            sys.exit(75)
        time.sleep(STEP_S)


def leave_if_told(flags: dict[str, bool]) -> None:
    if flags["term"]:
        say("leaving", reason="SIGTERM")
        sys.exit(0)


def say(event: str, **fields: Any) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()


def read(control: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(control.read_text())
    return document


def run() -> NoReturn:
    main(Path(sys.argv[1]), sys.argv[2:])
    sys.exit(0)


if __name__ == "__main__":
    run()
