"""What a machine's supervisor, gateway and engine cost while nothing changes."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml
from run import Row

from slackwater_operator.core import PermanentError
from slackwater_operator.demo.plan import free_port
from slackwater_operator.status import StateFolder

SETTLE_S = 10.0
MEASURE_S = 60.0


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {
            "state_dir": "state",
            "slots": {"kind": "cpu", "count": 4},
            "inference": {"port": free_port(), "standby_replicas": 1},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        process = subprocess.Popen(
            [sys.executable, "-m", "slackwater_operator", "up", "--config", str(folder / "config.yaml")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            pids = wait_ready(StateFolder(folder / "state"))
            time.sleep(SETTLE_S)
            pids["supervisor"] = process.pid
            before = {uid: spent(pid) for uid, pid in pids.items()}
            time.sleep(MEASURE_S)
            used = {uid: (spent(pid) - before[uid]) / MEASURE_S for uid, pid in pids.items()}
        finally:
            process.terminate()
            process.wait(60)
    engines = [share for uid, share in used.items() if uid.startswith("tts-")]
    return [
        Row("supervisor_cpu_ratio", used["supervisor"], "ratio", note="of one core, nothing changing"),
        Row("gateway_cpu_ratio", used["gateway"], "ratio"),
        Row("engine_cpu_ratio", max(engines), "ratio", note="the busier of a serving and a standing-by one"),
    ]


def wait_ready(folder: StateFolder) -> dict[str, int]:
    """The children's process ids, once one engine serves and one stands by."""
    while True:
        try:
            document = folder.read()
        except PermanentError:
            document = {"standby": 0, "slots": []}
        if document["standby"] == 1 and any(slot.get("phase") == "running" for slot in document["slots"]):
            pids: dict[str, int] = document["pids"]
            return pids
        time.sleep(0.2)


def spent(pid: int) -> float:
    """CPU seconds of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system
