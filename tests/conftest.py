"""Skips GPU tests where there is no GPU, and records what GPU tests found: --record FILE."""

import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("torch", "nvidia-ml-py", "pydantic")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="write the outcome of every test with machine, versions and commit")
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
    document = {
        "command": "make test-gpu",
        "machine": f"{platform.system()} {platform.machine()}, {len(gpus())} x {gpus()[0] if gpus() else 'no GPU'}",
        "versions": {"python": platform.python_version()} | {name: version_of(name) for name in PACKAGES},
        "commit": config.getoption("--commit") or commit(config.rootpath),
        "tests": [{"test": report.nodeid, "outcome": report.outcome} for report in reports],
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
