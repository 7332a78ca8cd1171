"""The supervisor as a process of its own: what it refuses, how it ends, and that nothing outlives it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from slackwater_operator.core import PermanentError
from slackwater_operator.demo.plan import free_port
from slackwater_operator.status import StateFolder
from slackwater_operator.testing.children import write_control

pytestmark = pytest.mark.e2e

QUIET = {"in_flight": 0, "queued": 0, "arrivals_total": 0}
BUSY = {"in_flight": 4, "queued": 6, "arrivals_total": 10}
DEADLINE_S = 30.0  # a bound on waiting, not a speed

# Runs Supervisor with the stand-ins of slackwater_operator.testing.children in place of the real programs.
SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from slackwater_operator.cluster.programs import Programs
from slackwater_operator.config import load
from slackwater_operator.supervise import Supervisor

async def main():
    config = load(Path(sys.argv[1]))
    stand_ins = (sys.executable, "-m", "slackwater_operator.testing.children", sys.argv[2])
    await Supervisor(config, Programs(config.inference, stand_ins)).run(print)

asyncio.run(main())
"""


class Running:
    """A supervisor process with its state folder."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.process = process
        self.control = folder / "control.json"

    def status(self) -> dict[str, Any]:
        try:
            return StateFolder(self.folder / "state").read()
        except PermanentError:  # not written yet
            return {"slots": [], "pids": {}, "reclaims": [], "reclaims_total": 0, "standby": 0}

    def held_by(self, holder: str, phase: str = "running") -> int:
        return sum(slot["holder"] == holder and slot.get("phase") == phase for slot in self.status()["slots"])

    def until(self, holds: Callable[[], Any]) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not holds():
            assert self.process.poll() is None, "the supervisor ended early"
            assert time.monotonic() < end_s, json.dumps(self.status(), indent=1)
            time.sleep(0.02)


@contextmanager
def supervisor(
    folder: Path, *, worker: str = "normal", cleaning_alone: bool = False, **inference: Any
) -> Iterator[Running]:
    """Three slots, one replica at least, one job; ended also when the test fails."""
    (folder / "in").mkdir()
    write_control(folder / "control.json", signals=QUIET, worker=worker)
    config = {
        "state_dir": "state",
        "slots": {"kind": "cpu", "count": 3},
        "inference": {"port": free_port(), "max_replicas": 3, "deadband_replicas": 0, **inference},
        "cleaning": [{"name": "job", "input": "in", "output": "out"}],
        "policy": {"tick_s": 0.1, "panic_s": 1, "stable_s": 1, "down_s": 2, "lend_after_s": 0.1},
    }
    if cleaning_alone:
        del config["inference"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-c", SUPERVISOR, str(folder / "config.yaml"), str(folder / "control.json")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    running = Running(folder, process)
    try:
        yield running
    finally:
        pids = running.status()["pids"].values()
        process.kill()
        process.wait()
        wait_gone(pids)


def wait_gone(pids: Any) -> None:
    """No process of these ids lives; a zombie of somebody else's is gone, too."""
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=DEADLINE_S)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_idle_slots_are_lent_and_taken_back_for_traffic(tmp_path: Path) -> None:
    with supervisor(tmp_path) as running:
        running.until(lambda: running.held_by("inference") == 1 and running.held_by("cleaning") == 2)

        write_control(running.control, signals=BUSY, engine={"running": 4})
        running.until(lambda: running.held_by("inference") == 3)
        assert [reclaim["outcome"] for reclaim in running.status()["reclaims"]] == ["checkpointed"] * 2

        write_control(running.control, signals=QUIET)
        running.until(lambda: running.held_by("inference") == 1 and running.held_by("cleaning") == 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_every_child_in_order(tmp_path: Path, number: signal.Signals) -> None:
    with supervisor(tmp_path) as running:
        running.until(lambda: running.held_by("cleaning") == 2)
        pids = list(running.status()["pids"].values())

        running.process.send_signal(number)

        assert running.process.wait(DEADLINE_S) == 0
        wait_gone(pids)
        assert not running.status()["running"]


def test_a_killed_supervisor_leaves_no_process_behind(tmp_path: Path) -> None:
    with supervisor(tmp_path, standby_replicas=1) as running:
        running.until(lambda: running.held_by("cleaning") == 2 and running.status()["standby"] == 1)
        pids = list(running.status()["pids"].values())
        assert len(pids) == 5  # gateway, replica, standby, two workers

        running.process.kill()

        wait_gone(pids)


@pytest.mark.parametrize("victim", ["tts", "job", "gateway"])
def test_a_killed_child_is_replaced(tmp_path: Path, victim: str) -> None:
    with supervisor(tmp_path, standby_replicas=0) as running:
        running.until(lambda: running.held_by("inference") == 1 and running.held_by("cleaning") == 2)
        before = running.status()["pids"]
        uid = next(uid for uid in before if uid.startswith(victim))

        os.kill(before[uid], signal.SIGKILL)

        running.until(lambda: before[uid] not in running.status()["pids"].values())
        running.until(lambda: running.held_by("inference") == 1 and running.held_by("cleaning") == 2)
        running.until(lambda: "gateway" in running.status()["pids"])


@pytest.mark.parametrize(
    ("worker", "code", "said"),
    [
        pytest.param("done", 0, "stopping", id="done"),
        pytest.param("bad input", 1, "PermanentError: job: slackwater clean: no audio files", id="bad input"),
    ],
)
def test_with_cleaning_alone_it_ends_when_no_job_can_go_on(tmp_path: Path, worker: str, code: int, said: str) -> None:
    with supervisor(tmp_path, worker=worker, cleaning_alone=True) as running:
        assert running.process.wait(DEADLINE_S) == code

        assert said in (tmp_path / "log").read_text()


def test_a_second_supervisor_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with supervisor(tmp_path) as running:
        running.until(lambda: running.held_by("inference") == 1)
        other = yaml.safe_load((tmp_path / "config.yaml").read_text())
        other["inference"]["port"] = free_port()
        (tmp_path / "other.yaml").write_text(yaml.safe_dump(other))

        assert "another supervisor runs" in refused(tmp_path / "other.yaml")


def refused(config: Path) -> str:
    """What `slackwater up` says when it will not start; exit code 2, one line."""
    done = subprocess.run(
        [sys.executable, "-m", "slackwater_operator", "up", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"slots": {"kind": "cpu"}}, "slots.count must be given", id="no slots"),
        pytest.param({"slots": {"kind": "gpu"}}, "NVML shows no NVIDIA GPU", id="no GPU"),
        pytest.param({"inference": {"min_replicas": 3}}, "there are 2 slots", id="more replicas than slots"),
        pytest.param({"inference": {"keys_file": "nowhere"}}, "inference.keys_file", id="no keys"),
        pytest.param({"inference": {"model": "s2-pro"}}, "neither tiny nor the folder", id="no model"),
        pytest.param(
            {"cleaning": [{"name": "a", "input": "nowhere", "output": "o"}]}, "cleaning[0].input", id="no input"
        ),
        pytest.param({"state_dir": "/proc/nowhere"}, "state_dir /proc/nowhere cannot be used", id="no state folder"),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    config = {
        "state_dir": "state",
        "slots": {"kind": "cpu", "count": 2},
        "inference": {"port": free_port()} | change.pop("inference", {}),
        **change,
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))

    assert said in refused(tmp_path / "c.yaml")


def test_a_port_in_use_is_refused_by_name(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        config = {"state_dir": "state", "slots": {"kind": "cpu", "count": 2}, "inference": {"port": port}}
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))

        assert f"inference.port {port} on 127.0.0.1 cannot be used" in refused(tmp_path / "c.yaml")
