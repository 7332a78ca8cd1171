"""The generated schemas stand in the checkout as `make crds` writes them, and accept the samples."""

from pathlib import Path

import pytest

from slackwater_operator.config import load
from slackwater_operator.schemas import FOLDER, schemas, text

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", schemas())
def test_the_file_is_what_the_models_say(name: str) -> None:
    assert (ROOT / FOLDER / name).read_text() == text(schemas()[name]), "run make crds"


def test_no_file_is_left_over() -> None:
    assert {path.name for path in (ROOT / FOLDER).iterdir()} == set(schemas())


@pytest.mark.parametrize("sample", sorted((ROOT / "manifests/samples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_sample_is_accepted(sample: Path) -> None:
    assert load(sample).inference is not None
