"""The first process of a cell: sets up its mounts, starts and ends processes as its parent says, reaps the rest.

Run by cell.py alone, as PID 1 of a PID namespace.  Orders come on standard input, one JSON object a line, and each
is answered by one on standard output.  When standard input ends, the parent is gone or has had enough: this process
returns, and the kernel ends every other process of the namespace with it, containers included.
Standard library only, and nothing of this package: it runs with Python's isolated mode.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CGROUPS = Path("/sys/fs/cgroup")
# How often orphans are reaped while no order comes.
REAP_EVERY_S = 0.2


def enter_cgroup(name: str) -> None:
    """Move into a cgroup of our own: runc puts containers without a parent below the cgroup of its caller."""
    if (CGROUPS / "cgroup.controllers").exists():
        # The unified hierarchy allows no processes beside child groups: runc goes to the parent of its caller's group.
        group = CGROUPS / name / "init"
        group.mkdir(parents=True, exist_ok=True)
        (group / "cgroup.procs").write_text("0")
        return
    for hierarchy in CGROUPS.iterdir():
        if hierarchy.is_symlink() or not (hierarchy / "cgroup.procs").exists():
            continue
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        # A fresh cpuset group is empty and takes no process until it has both.
        for value in ("cpuset.cpus", "cpuset.mems"):
            if (hierarchy / value).exists():
                (group / value).write_text((hierarchy / value).read_text())
        (group / "cgroup.procs").write_text("0")


def mount(setup: dict[str, Any]) -> None:
    """Make the mounts of this cell; none is seen outside, since the mount namespace's tree began as a private one."""
    run = ["mount"]
    # Pods may ask for mounts that propagate, which needs a shared tree; its peers are in this namespace only.
    subprocess.run([*run, "--make-rshared", "/"], check=True)
    for target in setup["scratch"]:
        os.makedirs(target, exist_ok=True)
        subprocess.run([*run, "-t", "tmpfs", "-o", "mode=755", "tmpfs", target], check=True)
    # After those: what is to be seen below a fresh folder leaves no folder of its own on the machine.
    for kind, options in (("binds", "bind"), ("views", "bind,ro")):
        for source, target in setup[kind]:
            os.makedirs(target, exist_ok=True)
            subprocess.run([*run, "-o", options, source, target], check=True)
    for source, target in setup["settings"]:
        if os.path.exists(target):
            subprocess.run([*run, "--bind", source, target], check=True)


class Processes:
    """The processes that were started by name; everything else that ends here is an orphan of theirs."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self.ended: dict[str, int] = {}

    def start(self, name: str, argv: list[str], env: dict[str, str], log: str) -> int:
        if name in self.running:
            raise ValueError(f"{name} runs already as process {self.running[name]}")
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            pid = os.posix_spawn(
                argv[0],
                argv,
                env,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, output, 1),
                    (os.POSIX_SPAWN_DUP2, output, 2),
                ],
                setsid=True,
            )
        finally:
            os.close(output)
        self.ended.pop(name, None)
        self.running[name] = pid
        return pid

    def stop(self, name: str, number: int, wait_s: float) -> int | None:
        """Send the signal, wait, then kill; the exit code (negative: a signal), None when it was never started."""
        pid = self.running.get(name)
        if pid is not None:
            os.kill(pid, number)
            until = time.monotonic() + wait_s
            while name in self.running and time.monotonic() < until:
                self.reap()
                time.sleep(0.01)
            if name in self.running:
                os.kill(pid, signal.SIGKILL)
            while name in self.running:
                self.reap()
                time.sleep(0.01)
        return self.ended.get(name)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for name, known in list(self.running.items()):
                if known == pid:
                    del self.running[name]
                    self.ended[name] = os.waitstatus_to_exitcode(status)

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        match order.pop("do"):
            case "start":
                return {"pid": self.start(**order)}
            case "stop":
                return {"code": self.stop(**order)}
            case "state":
                self.reap()
                return {"running": self.running, "ended": self.ended}
            case unknown:
                raise ValueError(f"unknown order {unknown!r}")


def orders(reap: Any) -> Iterator[dict[str, Any]]:
    """Every order until standard input ends, reaping orphans while none comes."""
    pending = b""
    while True:
        readable, _, _ = select.select([0], [], [], REAP_EVERY_S)
        reap()
        if not readable:
            continue
        piece = os.read(0, 1 << 16)
        if not piece:
            return
        pending += piece
        *lines, pending = pending.split(b"\n")
        yield from (json.loads(line) for line in lines)


def answer(content: dict[str, Any]) -> None:
    os.write(1, json.dumps(content).encode() + b"\n")


def main() -> int:
    setup = json.loads(sys.argv[1])
    try:
        enter_cgroup(setup["cgroup"])
        mount(setup)
    except (OSError, subprocess.CalledProcessError) as error:
        answer({"error": str(error)})
        return 1
    answer({"ready": True})
    processes = Processes()
    for order in orders(processes.reap):
        try:
            answer(processes.obey(order))
        except (OSError, ValueError, TypeError) as error:
            answer({"error": str(error)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
