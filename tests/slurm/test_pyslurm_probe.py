"""When the library pyslurm is refused: it is compiled for one release and can end the process that imports it."""

from pathlib import Path

import pytest

from slackwater_slurm.client import open_client
from slackwater_slurm.core import SlurmMissing

pytestmark = pytest.mark.e2e


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A machine with Slurm 22.05's commands and a module named pyslurm, which each test writes."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho slurm-wlm 22.05.8\n")
    scontrol.chmod(0o755)
    return {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "PYTHONPATH": str(tmp_path),
        "SLURM_CONF": str(tmp_path / "slurm.conf"),
    }


def write_module(environ: dict[str, str], body: str) -> None:
    (Path(environ["PYTHONPATH"]) / "pyslurm.py").write_text(body)


def test_a_library_of_another_release_is_refused(environ: dict[str, str]) -> None:
    write_module(environ, "class Partitions:\n    load = staticmethod(dict)\n__version__ = '25.11.2'\n")

    with pytest.raises(SlurmMissing, match=r"compiled for Slurm 25\.11, this is 22\.05\.8"):
        open_client(environ, "pyslurm")


def test_a_library_that_ends_the_process_ends_only_the_probe(environ: dict[str, str]) -> None:
    write_module(environ, "import os\nos._exit(120)\n")

    with pytest.raises(SlurmMissing, match=r"pyslurm cannot be used here .*slurm\.conf.*text adapter"):
        open_client(environ, "pyslurm")


def test_a_library_whose_controller_is_down_is_refused_with_its_own_words(environ: dict[str, str]) -> None:
    write_module(environ, "raise RuntimeError('Unable to contact slurm controller')\n")

    with pytest.raises(SlurmMissing, match="Unable to contact slurm controller"):
        open_client(environ, "pyslurm")


def test_another_cluster_than_the_environments_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(SlurmMissing, match=r"start this process with SLURM_CONF=/other/slurm\.conf"):
        open_client(environ, "pyslurm", conf=Path("/other/slurm.conf"))


def test_an_unknown_adapter_is_refused() -> None:
    with pytest.raises(ValueError, match="text, json, pyslurm, got 'rest'"):
        open_client({}, "rest")
