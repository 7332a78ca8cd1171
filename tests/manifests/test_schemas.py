"""The generated schemas stand in the checkout as `make crds` writes them, and accept the samples."""

from pathlib import Path

import pytest

from slackwater_operator.config import load
from slackwater_operator.schemas import FOLDER, schemas, text
from slackwater_slurm.config import load as load_slurm

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", schemas())
def test_the_file_is_what_the_models_say(name: str) -> None:
    assert (ROOT / FOLDER / name).read_text() == text(schemas()[name]), "run make crds"


def test_no_file_is_left_over() -> None:
    assert {path.name for path in (ROOT / FOLDER).iterdir()} == set(schemas())


def test_every_sample_is_accepted() -> None:
    samples = {path.name: path for path in (ROOT / "manifests/samples").glob("*.yaml")}

    assert samples.keys() == {"workstation.yaml", "slurm.yaml"}
    assert load(samples["workstation.yaml"]).inference is not None
    assert load_slurm(samples["slurm.yaml"]).jobs
