"""The tables of figures in the README are rendered from the results in tests/bench, none is typed."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "tests/bench/results").glob("*.json"))

spec = importlib.util.spec_from_file_location("render", ROOT / "tests/bench/render.py")
assert spec is not None
assert spec.loader is not None
render = importlib.util.module_from_spec(spec)
spec.loader.exec_module(render)


@pytest.mark.parametrize("path", render.PAGES, ids=lambda path: path.parent.name)
def test_a_page_shows_what_was_measured(path: Path) -> None:
    page = path.read_text()

    assert render.rendered(page) == page, "run tests/bench/render.py"
    assert "Not measured yet" not in page


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_where_it_comes_from(path: Path) -> None:
    document = json.loads(path.read_text())

    assert document["bench"] == path.stem
    assert document["command"] == f"make bench NAME={path.stem}"
    assert document["machine"]
    assert document["versions"]["python"]
    assert "+changes" not in document["commit"]
    assert all(set(row) == {"what", "value", "unit", "peer", "peer_value", "note"} for row in document["rows"])
    assert all((row["peer"] is None) == (row["peer_value"] is None) for row in document["rows"])


def test_a_table_follows_its_result() -> None:
    document = {
        "command": "make bench NAME=x",
        "machine": "m",
        "commit": "c",
        "rows": [
            {"what": "useful_ratio", "value": 0.7, "unit": "ratio", "peer": "alone", "peer_value": 0.35, "note": ""},
            {"what": "items", "value": 1234, "unit": "count", "peer": None, "peer_value": None, "note": ""},
        ],
    }

    assert "| useful ratio | 70.0 % | alone: 35.0 % |" in render.table(document)
    assert render.label("first_audio_p50_s_c16") == "first audio p50, 16 at once"
    assert render.label("frames_per_s_c1") == "frames per s, 1 at once"
    assert "| items | 1,234 |" in render.table(document)
