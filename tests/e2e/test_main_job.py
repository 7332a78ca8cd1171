"""The main job on this machine with every real part: engine, gateway, workers, supervisor.

What is cleaned are small recordings made here; what is asked for are short sentences.
"""

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import soundfile
import yaml

from slackwater_operator.core import PermanentError
from slackwater_operator.demo.plan import free_port
from slackwater_operator.status import StateFolder

pytestmark = pytest.mark.e2e

SLACKWATER = [sys.executable, "-m", "slackwater_operator"]
DEADLINE_S = 120.0  # a bound on waiting, not a speed: a cold engine on a busy machine takes a while
RATE_HZ = 16000
NUM_RECORDINGS = 2000
SETTINGS = {"sample_rate_hz": 96000}  # costs a worker twice the time of the default, so that the work outlasts a test
SENTENCE = "The water stands still for a moment before it turns. " * 3


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Different noisy vowels of 1 to 2 s."""
    folder = tmp_path_factory.mktemp("recordings")
    for number in range(NUM_RECORDINGS):
        random = np.random.default_rng(number)
        t_s = np.arange(int(RATE_HZ * random.uniform(1, 2))) / RATE_HZ
        pitch_hz = random.uniform(90, 220)
        voice = sum(np.sin(2 * np.pi * pitch_hz * k * t_s) / k for k in range(1, 12))
        syllables = 0.5 + 0.5 * np.sign(np.sin(2 * np.pi * 2 * t_s))
        audio = 0.1 * voice * syllables + 0.003 * random.standard_normal(len(t_s))
        soundfile.write(folder / f"{number:03}.wav", audio.astype(np.float32), RATE_HZ)
    return folder


class Machine:
    """`slackwater up` with three slots."""

    def __init__(self, folder: Path, port: int, process: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{port}"
        self.process = process
        self.ledger = folder / "ledger"

    def status(self) -> dict[str, Any]:
        try:
            return StateFolder(self.folder / "state").read()
        except PermanentError:  # not written yet
            return {"slots": [], "pids": {}, "reclaims": [], "standby": 0, "jobs": []}

    def held_by(self, holder: str) -> int:
        return sum(slot["holder"] == holder and slot["phase"] == "running" for slot in self.status()["slots"])

    def pids_of(self, owner: str) -> list[int]:
        return [pid for uid, pid in self.status()["pids"].items() if uid.startswith(owner)]

    def until(self, holds: Callable[[], Any]) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not holds():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < end_s, json.dumps(self.status(), indent=1) + (self.folder / "log").read_text()
            time.sleep(0.05)

    def until_full(self) -> None:
        """One replica serves, two workers clean and have committed something."""
        self.until(lambda: self.held_by("inference") == 1)
        self.until(lambda: self.held_by("cleaning") == 2 and self.status()["jobs"][0].get("items_done", 0) > 0)

    def verify(self) -> dict[str, Any]:
        done = subprocess.run(
            [*SLACKWATER, "clean", "verify", str(self.ledger), "--json"], capture_output=True, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@contextmanager
def machine(folder: Path, recordings: Path) -> Iterator[Machine]:
    port = free_port()
    config = {
        "state_dir": "state",
        "slots": {"kind": "cpu", "count": 3},
        "inference": {
            "port": port,
            "max_replicas": 3,
            "slots_per_replica": 2,
            "standby_replicas": 1,
            "deadband_replicas": 0,
            "pace_frames_per_s": 43,
            "drain_grace_s": 20,
        },
        "cleaning": [
            {"name": "job", "input": str(recordings), "output": "ledger", "lease_ttl_s": 3, "settings": SETTINGS},
        ],
        "policy": {"tick_s": 0.2, "panic_s": 2, "stable_s": 2, "down_s": 4, "lend_after_s": 0.2},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*SLACKWATER, "up", "--config", str(folder / "config.yaml")],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    running = Machine(folder, port, process)
    try:
        yield running
    finally:
        pids = list(running.status()["pids"].values())
        process.kill()
        process.wait()
        wait_gone(pids)


def wait_gone(pids: list[int]) -> None:
    """No process of these ids is left."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(found, timeout=DEADLINE_S)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def speak(url: str, num_requests: int) -> list[httpx.Response | httpx.TransportError]:
    """Ask for so many sentences at once; returns each answer, or how its stream broke."""

    def one(_: int) -> httpx.Response | httpx.TransportError:
        try:
            return httpx.post(f"{url}/v1/tts", json={"text": SENTENCE, "format": "wav"}, timeout=DEADLINE_S)
        except httpx.TransportError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(num_requests) as pool:
        return list(pool.map(one, range(num_requests)))


def is_whole(answer: httpx.Response | httpx.TransportError) -> bool:
    """A WAV of about the sentence's length."""
    if isinstance(answer, httpx.TransportError) or answer.status_code != 200:
        return False
    return answer.content[:4] == b"RIFF" and len(answer.content) > 0.8 * 0.93 * len(SENTENCE) * 2048 * 2


def test_a_burst_takes_slots_from_cleaning_and_gives_them_back(tmp_path: Path, recordings: Path) -> None:
    with machine(tmp_path, recordings) as here:
        here.until_full()

        answers = speak(here.url, 6)
        here.until(lambda: here.held_by("inference") == 1)
        here.until(lambda: here.held_by("cleaning") == 2)
        here.process.send_signal(signal.SIGTERM)
        assert here.process.wait(DEADLINE_S) == 0

        assert all(is_whole(answer) for answer in answers)
        reclaims = here.status()["reclaims"]
        assert [reclaim["outcome"] for reclaim in reclaims if reclaim["reason"] == "traffic"] == ["checkpointed"] * 2
        assert all(reclaim["verified"] for reclaim in reclaims)
        found = here.verify()
        assert found["items_lost"] == found["items_doubled"] == 0
        assert found["items_done"] > 0


@pytest.mark.parametrize("victim", ["tts", "job", "gateway"])
def test_a_child_killed_in_a_burst_is_replaced_and_nothing_lost(tmp_path: Path, recordings: Path, victim: str) -> None:
    with machine(tmp_path, recordings) as here, concurrent.futures.ThreadPoolExecutor(1) as pool:
        here.until_full()
        burst = pool.submit(speak, here.url, 3)
        here.until(lambda: any(slot.get("running") for slot in here.status()["slots"]))
        [killed, *_] = here.pids_of(victim)

        os.kill(killed, signal.SIGKILL)

        here.until(lambda: killed not in here.status()["pids"].values())
        answers = burst.result(DEADLINE_S)
        # Each is whole, refused with a reason, or visibly broken: never a short answer that looks whole.
        for answer in answers:
            assert is_whole(answer) or isinstance(answer, httpx.TransportError) or answer.status_code in (429, 502, 503)
        here.until(lambda: here.held_by("inference") >= 1 and here.pids_of("gateway"))
        here.until(lambda: is_whole(speak(here.url, 1)[0]))
        found = here.verify()
        assert found["items_lost"] == found["items_doubled"] == 0


def test_a_killed_supervisor_leaves_no_process_and_a_whole_ledger(tmp_path: Path, recordings: Path) -> None:
    with machine(tmp_path, recordings) as here:
        here.until_full()
        pids = list(here.status()["pids"].values())

        here.process.kill()
        here.process.wait()
        wait_gone(pids)

        found = here.verify()
        assert found["items_lost"] == found["items_doubled"] == 0
        # Whoever comes next finishes the job: every item exactly once.
        finish = [*SLACKWATER, "clean", "run", str(recordings), f"--output={here.ledger}", "--job=job", "--ttl=3"]
        finish += [f"--set={name}={value}" for name, value in SETTINGS.items()]
        subprocess.run(finish, check=True, capture_output=True, timeout=DEADLINE_S)
        found = here.verify()
        assert (found["items_done"], found["items_open"]) == (NUM_RECORDINGS, 0)
        assert found["items_lost"] == found["items_doubled"] == 0


def test_a_demo_ended_by_ctrl_c_leaves_nothing_behind(tmp_path: Path, recordings: Path) -> None:
    command = [*SLACKWATER, "demo", "--plain", "--input", str(recordings), "--output", str(tmp_path)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"TMPDIR": str(tmp_path)})
    try:
        end_s = time.monotonic() + DEADLINE_S
        while len(children(process)) < 5:  # supervisor, gateway, engines, workers
            assert time.monotonic() < end_s
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        started = children(process)

        process.send_signal(signal.SIGINT)

        assert process.wait(DEADLINE_S) == 130
        wait_gone(started)
        assert "stopped by hand" in (tmp_path / "log").read_text()
        assert (tmp_path / "demo-report.json").is_file()
        assert not list(tmp_path.glob("slackwater-demo-*"))
    finally:
        left = children(process)
        process.kill()
        process.wait()
        wait_gone(left)


def children(process: subprocess.Popen[bytes]) -> list[int]:
    """Ids of all its descendants."""
    try:
        return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
