"""The wire between parent and child is what operator/README.md says: read from there, held against real children."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slackwater_operator.metrics import Metrics
from slackwater_operator.operate.metrics import Metrics as OperatorMetrics

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "operator/README.md").read_text()
SLACKWATER = [sys.executable, "-m", "slackwater_operator"]
DEADLINE_S = 60.0


def contract() -> dict[tuple[str, str], set[str]]:
    """(who, event) -> fields, from the page's table."""
    rows = re.findall(r"^\| (\w+) \| `(\w+)` \| ([^|]*)\|", PAGE, flags=re.MULTILINE)
    return {(who, event): set(re.findall(r"`(\w+)`", fields)) for who, event, fields in rows}


def events(arguments: list[str], *, until: str) -> list[dict[str, Any]]:
    """What a supervised child says until the event `until` and, told to leave, up to its end."""
    process = subprocess.Popen(
        [*SLACKWATER, *arguments, "--supervised"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    said = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(json.loads(line))
            if said[-1]["event"] == until:
                process.send_signal(signal.SIGTERM)
                until = ""
        assert process.wait(DEADLINE_S) in (0, 75)
    finally:
        process.kill()
        process.wait()
    return said


def check(who: str, said: list[dict[str, Any]], expected: set[str]) -> None:
    table = contract()
    for event in said:
        key = (who if (who, event["event"]) in table else "all", event["event"])
        assert set(event) - {"event"} == table[key], key
    assert {event["event"] for event in said} >= expected


def test_the_table_is_read() -> None:
    assert len(contract()) == 9
    assert contract()["worker", "durable"] == {"unit", "path", "size_bytes", "sha256", "items", "audio_s"}


def test_a_worker_says_what_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(200):
        (tmp_path / "in" / f"{number}.wav").write_bytes(f"not audio, but the cleaner only copies {number}".encode())
    copier = "--cleaner=slackwater_workers.testing:CopyCleaner"

    said = events(["clean", "run", str(tmp_path / "in"), f"--output={tmp_path / 'out'}", copier], until="durable")

    check("worker", said, {"working", "durable", "leaving"})


def test_the_gateway_says_what_the_page_says() -> None:
    check("gateway", events(["gateway", "--port=0"], until="signals"), {"ready", "signals", "leaving"})


def test_an_engine_says_what_the_page_says() -> None:
    check("engine", events(["engine", "serve", "--port=0"], until="load"), {"ready", "load", "leaving"})


@pytest.mark.parametrize(
    ("section", "metrics"),
    [
        pytest.param("One machine", Metrics, id="supervisor"),
        pytest.param("A Kubernetes cluster", OperatorMetrics, id="operator"),
    ],
)
def test_every_metric_that_the_page_names_is_served_and_no_other(section: str, metrics: Any) -> None:
    served = set()
    for family in metrics().registry.collect():
        served.add(family.name + ("_total" if family.type == "counter" else ""))

    [text] = re.findall(rf"^## {section}\n(.*?)^## ", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert served == set(re.findall(r"`(fleet_\w+)`", text))
