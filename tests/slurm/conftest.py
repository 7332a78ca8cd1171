"""A real Slurm for every test marked `slurm`: one for the session, clean before and after each test."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slackwater_slurm.lab import Lab, why_not


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.get_closest_marker("slurm")]
    if ours and (reason := why_not()) is not None:
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def running_lab() -> Iterator[Lab]:
    # Not pytest's own folder: its path can be too long for munge's socket.
    with tempfile.TemporaryDirectory(prefix="slurm-lab-") as folder, Lab(Path(folder)) as lab:
        yield lab


@pytest.fixture
def lab(running_lab: Lab) -> Iterator[Lab]:
    """The session's cluster: four idle nodes, our settings, no jobs."""
    yield running_lab
    running_lab.reset()
