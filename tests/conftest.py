"""Skips GPU tests where there is no GPU, records what GPU and long tests found (--record FILE), runs pod processes."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("torch", "nvidia-ml-py", "pydantic")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="write every test's outcome with machine, versions and commit")
    parser.addoption("--commit", default="", help="the commit to record, on a machine that has the tree without git")


def gpus() -> list[str]:
    """`name, driver` of each GPU."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("gpu") for item in items) and not gpus():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here; make test-gpu runs it on one"))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    record = config.getoption("--record")
    if record is None:
        return
    reports = [
        report
        for outcome in ("passed", "failed", "error")
        for report in terminalreporter.stats.get(outcome, [])
        if report.when == "call" or outcome == "error"
    ]
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if isinstance(report.longrepr, tuple)]
    is_long = config.getoption("markexpr") == "long"
    here = f"{os.cpu_count()} cores" if is_long else f"{len(gpus())} x {gpus()[0] if gpus() else 'no GPU'}"
    document = {
        "command": "make test-long" if is_long else "make test-gpu",
        "machine": f"{platform.system()} {platform.machine()}, {here}",
        "versions": {"python": platform.python_version()} | {name: version_of(name) for name in PACKAGES},
        "commit": config.getoption("--commit") or commit(config.rootpath),
        "tests": [{"test": report.nodeid, "outcome": report.outcome} for report in reports]
        + [{"test": report.nodeid, "outcome": "skipped", "reason": str(report.longrepr[2])} for report in skipped],
    }
    record.write_text(json.dumps(document, indent=2) + "\n")


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def commit(root: Path) -> str:
    head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True)
    return head.stdout.strip() or "unknown"


class PodProcess:
    """A process as a pod has it: first of its PID namespace, user 65532, read-only root, only /tmp writable."""

    # Everything outside the namespaces stays as it was; `--kill-child` ends the process with this one.  A checkout
    # below /tmp stays there to be read: it is where the program comes from.
    _ENTER = ("unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "sh", "-c")
    _SETUP = """
        mount --make-rprivate / && mount -t proc proc /proc && mount -t tmpfs -o mode=1777 tmpfs /mnt || exit 99
        case "$CHECKOUT" in /tmp/*)
            kept="/mnt/${CHECKOUT#/tmp/}"
            mkdir -p "$kept" && mount --bind "$CHECKOUT" "$kept" && mount -o remount,bind,ro "$kept" || exit 99
        esac
        mount --move /mnt /tmp && mount -o remount,bind,ro / || exit 99
        exec env -i --block-signal=TERM PATH="$PATH" PYTHONPATH="$PYTHONPATH" HOME=/tmp \
            setpriv --reuid 65532 --regid 65532 --clear-groups --no-new-privs --bounding-set -all "$@"
    """

    def __init__(self, command: tuple[str, ...]) -> None:
        self.process = subprocess.Popen(
            [*self._ENTER, self._SETUP, "sh", *command],
            env={**os.environ, "CHECKOUT": str(Path(__file__).parents[1])},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while not (found := children.read_text().split()):
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.001)
        self.pid = int(found[0])  # as this side of the namespace sees it

    def program(self) -> str:
        """What it runs just now."""
        return Path(f"/proc/{self.pid}/comm").read_text().strip()

    def terminate(self) -> None:
        """What a kubelet sends first."""
        os.kill(self.pid, signal.SIGTERM)


@pytest.fixture
def pod() -> Iterator[Callable[..., PodProcess]]:
    """Starts `slackwater ARGS` as the process of a pod; all are ended with the test."""
    if shutil.which("unshare") is None or subprocess.run([*PodProcess._ENTER, "true"], capture_output=True).returncode:
        pytest.skip("a pod's process needs root and namespaces")
    trial = PodProcess((sys.executable, "-c", "")).process
    if "Permission denied" in trial.communicate()[1]:
        pytest.skip(f"user 65532 may not run {sys.executable}")
    started: list[PodProcess] = []

    def start(*args: object) -> PodProcess:
        started.append(PodProcess((sys.executable, "-m", "slackwater_operator", *map(str, args))))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


@pytest.fixture
def pod_folder() -> Iterator[Path]:
    """A folder that a pod's process sees and may write, like a volume."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)
