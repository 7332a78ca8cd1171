"""What `make manifests` writes stands in the checkout as it would write it."""

from pathlib import Path

import pytest

from slackwater_manifests import __main__, chart

MANIFESTS = Path(__file__).parents[2] / "manifests"
CHART = chart.files(MANIFESTS, __main__.version())
MONITORING = __main__.monitoring()


@pytest.mark.parametrize("name", MONITORING)
def test_a_file_of_monitoring_is_what_the_code_says(name: str) -> None:
    assert (MANIFESTS / "monitoring" / name).read_text() == MONITORING[name], "run make manifests"


@pytest.mark.parametrize("name", CHART)
def test_a_file_of_the_chart_is_what_the_kustomizations_say(name: str) -> None:
    assert (MANIFESTS / "chart" / name).read_text() == CHART[name], "run make manifests"


def test_no_file_of_the_chart_is_left_over() -> None:
    files = {str(path.relative_to(MANIFESTS / "chart")) for path in (MANIFESTS / "chart").rglob("*") if path.is_file()}

    assert files == set(CHART)


def test_everything_is_written_where_it_belongs(tmp_path: Path) -> None:
    for folder in ("crd", "operator", "inference", "workers", "monitoring"):
        (tmp_path / folder).symlink_to(MANIFESTS / folder) if folder != "monitoring" else (tmp_path / folder).mkdir()
    for name in ("kustomization.yaml", "service-monitor.yaml", "pod-monitors.yaml"):
        (tmp_path / "monitoring" / name).write_text((MANIFESTS / "monitoring" / name).read_text())

    __main__.main(tmp_path)

    for name, text in CHART.items():
        assert (tmp_path / "chart" / name).read_text() == text
