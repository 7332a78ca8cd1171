"""The demo, and as its peer the same traffic with nothing lent; memory of the whole process tree."""

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from run import Row

RECORDINGS = Path("~/.cache/slackwater/recordings").expanduser()
SERVING_ALONE = "the same traffic, filling off"


class Memory(threading.Thread):
    """Samples the proportional set size of a process and all its descendants; shared pages count once."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root = psutil.Process(pid)
        self.peak_bytes = 0

    def run(self) -> None:
        while self._root.is_running() and self._root.status() != psutil.STATUS_ZOMBIE:
            total = 0
            for process in [self._root, *self._root.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.peak_bytes = max(self.peak_bytes, total)
            time.sleep(1.0)


def demo(*options: str) -> dict[str, Any]:
    """Run it; returns demo-report.json with memory and wall time added."""
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "slackwater_operator",
                "demo",
                "--plain",
                "--input",
                str(RECORDINGS),
                "--output",
                folder,
                *options,
            ]
        )
        memory = Memory(process.pid)
        memory.start()
        code = process.wait()
        report: dict[str, Any] = json.loads((Path(folder) / "demo-report.json").read_text())
        report |= {"wall_s": time.monotonic() - began_s, "memory_mib": memory.peak_bytes / (1 << 20), "exit_code": code}
    assert report["exit_code"] == 0, "a run in which not all holds is no measurement"
    return report


def measure() -> list[Row]:
    filled, alone = demo(), demo("--no-filling")

    def both(what: str, unit: str, note: str = "") -> Row:
        return Row(what, filled[what], unit, SERVING_ALONE, alone[what], note)

    return [
        both("useful_ratio", "ratio", "while the traffic was played"),
        Row("useful_gain", filled["useful_ratio"] / alone["useful_ratio"], "times", note="the two ratios above"),
        Row("evictions", filled["evictions"], "count"),
        Row("evictions_verified", filled["evictions_verified"], "count", note="last receipt read back from disk"),
        Row("reclaim_p50_s", filled["reclaim_p50_s"], "s", note="decision until the slot was seen free"),
        Row("reclaim_p99_s", filled["reclaim_p99_s"], "s"),
        both("first_audio_quiet_p50_s", "s"),
        both("first_audio_burst_p50_s", "s"),
        both("first_audio_p99_s", "s"),
        both("requests", "count"),
        both("requests_failed", "count"),
        Row("items_done", filled["items_done"], "count"),
        Row("items_lost", filled["items_lost"], "count"),
        Row("items_doubled", filled["items_doubled"], "count"),
        Row("memory_peak_mib", filled["memory_mib"], "MiB", note="proportional set size of all processes"),
        Row("wall_s", filled["wall_s"], "s", note="the whole command, warm"),
    ]
