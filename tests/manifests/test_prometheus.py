"""A real Prometheus reads the rules, scrapes all that our programs expose, and answers every panel."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from slackwater_manifests.panels import Draw
from slackwater_manifests.queries import MACROS
from slackwater_manifests.rows import ROWS
from slackwater_manifests.testing import Stand

MANIFESTS = Path(__file__).parents[2] / "manifests"
RULES = MANIFESTS / "monitoring/rules.yaml"
QUERIES = [
    pytest.param(query.expr, panel.draw, id=f"{panel.title} {index}")
    for row in ROWS
    for panel in row.panels
    for index, query in enumerate(panel.queries)
]
PROMETHEUS = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")

pytestmark = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="no prometheus and promtool here (Debian's package prometheus)"
)


class Prometheus:
    """One that scrapes a stand each second."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=10)

    def ask(self, path: str, **parameters: str | float) -> dict[str, Any]:
        answer = self._client.get(f"/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, answer.text
        data: dict[str, Any] = answer.json()["data"]
        return data

    def value(self, expr: str) -> float | None:
        result = self.ask("query", query=expr)["result"]
        return float(result[0]["value"][1]) if result else None


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        group["interval"] = "1s"
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    port = free_port()
    with Stand().served() as target:
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [{"job_name": "slackwater", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [
                    str(PROMETHEUS),
                    f"--config.file={folder}/prometheus.yaml",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            answering = Prometheus(f"http://127.0.0.1:{port}")
            _wait(answering, process, folder / "log")
            yield answering
        finally:
            process.terminate()
            process.wait(20)


def _wait(prometheus: Prometheus, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Until three scrapes are in and what is recorded from them is, too."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if (prometheus.value("count_over_time(fleet_leader[1m])") or 0) >= 3 and prometheus.value(
                "count_over_time(fleet:gpu_useful:ratio_rate1h[1m])"
            ):
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    pytest.fail(f"Prometheus did not come up:\n{log.read_text()[-3000:]}")


@pytest.mark.parametrize(("expr", "draw"), QUERIES)
def test_prometheus_answers_the_panel_with_numbers(prometheus: Prometheus, expr: str, draw: Draw) -> None:
    for macro, value in MACROS.items():
        expr = expr.replace(macro, value)
    expr = expr.replace("$pool", ".*").replace("$flavor", ".*")

    if draw in (Draw.STAT, Draw.BARS, Draw.TABLE):
        result = prometheus.ask("query", query=expr)["result"]
        numbers = [series["value"][1] for series in result]
    else:
        now_s = time.time()
        result = prometheus.ask("query_range", query=expr, start=now_s - 60, end=now_s, step=1)["result"]
        numbers = [value for series in result for _, value in series["values"]]

    assert numbers, "no series: the stand exposes every metric, so the query asks for what cannot be"
    assert any(number not in ("NaN", "+Inf") for number in numbers)


def test_every_rule_is_evaluated_without_an_error(prometheus: Prometheus) -> None:
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    assert len(rules) == sum(len(group["rules"]) for group in yaml.safe_load(RULES.read_text())["groups"])
    assert {rule["health"] for rule in rules} == {"ok"}


def test_every_recorded_number_is_there(prometheus: Prometheus) -> None:
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    for rule in rules:
        if rule["type"] == "recording":
            assert prometheus.value(rule["name"]) is not None, rule["name"]


def test_the_watchdog_always_fires(prometheus: Prometheus) -> None:
    firing = {
        alert["labels"]["alertname"] for alert in prometheus.ask("alerts")["alerts"] if alert["state"] == "firing"
    }

    assert "Watchdog" in firing


def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    done = subprocess.run(
        [str(PROMTOOL), "check", "rules", "--lint-fatal", str(RULES)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_nothing_wrong_with_the_operators_metrics() -> None:
    text = Stand().text()

    done = subprocess.run([str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, check=False)

    complaints = [line for line in done.stdout.decode().splitlines() if line.startswith("fleet_")]
    assert not complaints
