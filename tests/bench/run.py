"""`make bench NAME=…`: runs tests/bench/bench_NAME.py and writes tests/bench/results/NAME.json.

A bench module has `measure() -> list[Row]`; everything else about the result is filled in here, so
that each figure carries the machine, the versions and the commit that it was measured with.
"""

import importlib
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = (":!tests/bench/results", ":!tests/*-results.json", ":!README.md")  # what measuring itself writes
PACKAGES = ("slackwater", "torch", "numpy", "httpx", "uvicorn")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.  peer: what it is held against, measured in the same run; None where there is none."""

    what: str
    value: float | None
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    note: str = ""


def document(name: str, rows: list[Row]) -> dict[str, object]:
    """The JSON document of a result."""
    return {
        "bench": name,
        "command": f"make bench NAME={name}",
        "machine": f"{platform.system()} {platform.machine()}, {cpu_model()} x {os.cpu_count()}, {memory_gib()} GiB",
        "versions": {"python": platform.python_version()} | {package: version(package) for package in PACKAGES},
        "commit": commit(),
        "rows": [asdict(row) for row in rows],
    }


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30))


def commit() -> str:
    """The commit measured; `+changes` when the checkout differs from it."""
    head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", ".", *RESULTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def main() -> None:
    names = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    if len(sys.argv) != 2 or sys.argv[1] not in names:
        sys.exit(f"make bench NAME=…: the benches are {', '.join(names)}")
    name = sys.argv[1]
    sys.path[:0] = [str(HERE), str(ROOT / "tests/controlplane")]
    rows: list[Row] = importlib.import_module(f"bench_{name}").measure()
    path = HERE / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document(name, rows), indent=2) + "\n")
    for row in rows:
        peer = f"   {row.peer}: {row.peer_value}" if row.peer else ""
        sys.stdout.write(f"{row.what:32} {row.value} {row.unit}{peer}\n")
    sys.stdout.write(f"written to {path.relative_to(ROOT)}\n")
    import render

    render.main()


if __name__ == "__main__":
    main()
