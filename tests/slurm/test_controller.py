"""`slackwater slurm run` and `status` as real processes on a real Slurm."""

import json
import math
import subprocess
import sys
import time
import wave
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slackwater_slurm.lab import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.e2e]

SLACKWATER = [sys.executable, "-c", "import sys; from slackwater_slurm.cli import app; app(prog_name='slurm')"]
ALL_GPUS = 12
PATIENCE_S = 30.0  # of a busy machine; the lab itself needs a tenth of that

Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def site(lab: Lab, tmp_path: Path) -> Lab:
    """The lab with a stand-in worker and a configuration that fills every GPU with it."""
    worker = tmp_path / "worker"
    worker.write_text("#!/bin/sh\nexec sleep 600\n")
    worker.chmod(0o755)
    configure(lab, tmp_path, program=str(worker))
    return lab


def configure(lab: Lab, folder: Path, **job: object) -> None:
    cleaning = {"name": "pod", "input": "in", "output": "ledger", "memory_mb_per_worker": 100, "max_workers": 50} | job
    document = {"state_dir": "state", "tick_s": 0.3, "progress_s": 1, "slurm_conf": str(lab.conf), "jobs": [cleaning]}
    (folder / "slurm.yaml").write_text(json.dumps(document))


@pytest.fixture
def run(lab: Lab, tmp_path: Path) -> Iterator[Run]:
    """Starts controllers; all are ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def start() -> "subprocess.Popen[str]":
        with (tmp_path / "controller.log").open("a") as log:
            process = subprocess.Popen(
                [*SLACKWATER, "run", "--config", str(tmp_path / "slurm.yaml")],
                env=lab.environment(),
                stderr=log,
                text=True,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def status(lab: Lab) -> dict[str, Any]:
    done = subprocess.run(
        [*SLACKWATER, "status", "-o", "json"], env=lab.environment(), capture_output=True, text=True, check=True
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def running(lab: Lab, partition: str = "cleaning") -> dict[str, list[str]]:
    """Node to the jobs that run there."""
    nodes: dict[str, list[str]] = {}
    for line in lab.run(
        "squeue", "-h", "-r", "-t", "R", "-p", partition, "-O", "JobArrayID:30,NodeList:30"
    ).splitlines():
        job, node = line.split()
        nodes.setdefault(node, []).append(job)
    return nodes


def workers(lab: Lab) -> int:
    return sum(len(jobs) for jobs in running(lab).values())


def arrays(lab: Lab) -> set[str]:
    return set(lab.run("squeue", "-h", "-r", "-p", "cleaning", "-o", "%F").split())


def is_saved(lab: Lab, array_ids: set[str]) -> bool:
    """Nudges slurmctld to write its jobs down.  It does so up to 5 s after a change; what is younger dies with it."""
    for array_id in array_ids:
        lab.run("scontrol", "update", f"JobId={array_id}", "Comment=slackwater:clean:pod:")
    started = lab.run("squeue", "-h", "-t", "R", "-o", "%S").split()
    return (lab.folder / "state/job_state").stat().st_mtime > max(map(int, started)) + 1


def until(is_so: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


def test_fills_the_cluster_makes_way_for_training_and_fills_again(site: Lab, run: Run) -> None:
    run()
    assert until(lambda: workers(site) == ALL_GPUS)

    training = site.submit("#!/bin/sh\nexec sleep 600\n", "-p", "train", "--gres=gpu:h200:4")
    assert until(lambda: bool(running(site, "train")))
    assert workers(site) <= ALL_GPUS - 4
    seen = status(site)
    site.run("scancel", str(training))

    assert seen["gpus"] == {"training": 4, "cleaning": 8, "idle": 0, "unavailable": 0}
    assert seen["jobs"][0]["requeues"] == 4
    assert until(lambda: workers(site) == ALL_GPUS)
    assert len(arrays(site)) == 1


def test_leaves_a_drained_node_and_one_under_maintenance(site: Lab, run: Run) -> None:
    run()
    assert until(lambda: workers(site) == ALL_GPUS)

    site.run("scontrol", "update", "NodeName=r1", "State=DRAIN", "Reason=disk")
    maintenance = ("StartTime=now", "Duration=30", "Users=root", "Nodes=h1", "Flags=MAINT,IGNORE_JOBS")
    site.run("scontrol", "create", "reservation", "ReservationName=firmware", *maintenance)

    assert until(lambda: not running(site).keys() & {"r1", "h1"})
    assert until(lambda: workers(site) == 6)
    assert {node["node"]: node["leaving_for"] for node in status(site)["nodes"]}["h1"] == "maintenance"


def test_outlives_slurmctld_and_is_followed_by_one_that_adopts(site: Lab, run: Run) -> None:
    first = run()
    assert until(lambda: workers(site) == ALL_GPUS)
    before = arrays(site)
    assert until(lambda: is_saved(site, before))

    first.kill()
    first.wait()
    site.kill("slurmctld")
    second = run()
    time.sleep(1.0)
    assert second.poll() is None  # waits for Slurm
    site.start_controller()
    site.submit("#!/bin/sh\nexec sleep 600\n", "-p", "train", "--gres=gpu:rtx5090:2")

    assert until(lambda: bool(running(site, "train")))
    assert until(lambda: workers(site) == ALL_GPUS - 2)
    assert arrays(site) == before
    second.terminate()
    assert second.wait(timeout=PATIENCE_S) == 0
    assert workers(site) == ALL_GPUS - 2  # its end harms nobody


def test_a_finished_ledger_ends_the_array_and_the_controller(lab: Lab, run: Run, tmp_path: Path) -> None:
    recordings = tmp_path / "in"
    recordings.mkdir()
    for number in range(4):
        write_tone(recordings / f"{number}.wav", 200.0 + 50 * number)
    program = tmp_path / "slackwater"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m slackwater_operator "$@"\n')
    program.chmod(0o755)
    configure(lab, tmp_path, program=str(program), max_workers=2, memory_mb_per_worker=1000)

    controller = run()

    assert controller.wait(timeout=90) == 0, (tmp_path / "controller.log").read_text()
    assert lab.run("squeue", "-h").strip() == ""
    verified = subprocess.run(
        [program, "clean", "verify", tmp_path / "ledger", "--json"], capture_output=True, text=True
    )
    assert json.loads(verified.stdout)["items_done"] == 4


def write_tone(path: Path, frequency_hz: float) -> None:
    samples = array("h", (int(9000 * math.sin(2 * math.pi * frequency_hz * i / 16000)) for i in range(16000)))
    with wave.open(str(path), "wb") as out:
        out.setparams((1, 2, 16000, 0, "NONE", ""))
        out.writeframes(samples.tobytes())
