"""The Kubernetes section of README.md, typed line by line on the cluster that its first line starts."""

import json
import os
import re
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from slackwater_controlplane import build, leftovers
from slackwater_controlplane.client import Admin, Object
from slackwater_controlplane.images import ROOT, Images
from slackwater_controlplane.kwok import GPU
from slackwater_controlplane.play import LEDGER, why_no_engine
from slackwater_controlplane.standing import Standing
from slackwater_operator.resources import names
from slackwater_operator.testing.processes import wait_until

pytestmark = [pytest.mark.controlplane, pytest.mark.long, pytest.mark.timeout(600)]

RECORDINGS = 60  # each of them is there forty times
# The targets without what sets the checkout up, and on this test's own cache.
MAKE = """
make() {
    case $1 in
        cluster-up) "$PYTHON" -m slackwater_controlplane up --nodes 2 ;;
        cluster-*) "$PYTHON" -m slackwater_controlplane "${1#cluster-}" ;;
        *) echo "no target $1" >&2; return 2 ;;
    esac
}
trap 'kill $(jobs -p)' EXIT
set -ex
"""


def lines() -> str:
    section = (ROOT / "README.md").read_text().partition("\n### Kubernetes\n")[2]
    return section.split("```")[1]


@pytest.fixture(scope="module")
def cache(
    controlplane_programs: build.Programs, container_images: Images, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A cache with the programs and images that this machine has built, some recordings, and no cluster yet."""
    from slackwater_controlplane.node.cluster import why_not

    if (reason := why_not(controlplane_programs) or why_no_engine()) is not None:
        pytest.skip(reason)
    cache = tmp_path_factory.mktemp("readme") / "cache"
    (cache / "controlplane").mkdir(parents=True)
    (cache / "images").symlink_to(container_images.folder)
    for folder in {controlplane_programs.path(program.name).parent for program in controlplane_programs.select(())}:
        (cache / "controlplane" / folder.name).symlink_to(folder)
    speak(cache / "recordings")
    yield cache
    Standing(cache).stop()


def speak(folder: Path) -> None:
    """Recordings of noise, each another."""
    folder.mkdir()
    noise = np.random.default_rng(3).normal(0, 2000, 16_000 * 5)
    for number in range(RECORDINGS):
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16_000)
            file.writeframes(np.roll(noise, 997 * number).astype("<i2").tobytes())


@pytest.fixture(scope="module")
def typed(cache: Path) -> subprocess.CompletedProcess[str]:
    """All the lines, typed into one shell that stops at the first that fails."""
    environ = os.environ | {
        "SLACKWATER_CACHE": str(cache),
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT / "tests/controlplane"),
        "no_proxy": "*",
    }
    command = ["bash", "-c", MAKE + lines()]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=500, check=False)


@pytest.fixture(scope="module")
def admin(typed: subprocess.CompletedProcess[str], cache: Path) -> Iterator[Admin]:
    state = Standing(cache).state()
    assert state is not None, typed.stderr
    with Admin(state.kubeconfig) as admin:
        yield admin


def test_every_line_works_as_written(typed: subprocess.CompletedProcess[str]) -> None:
    assert typed.returncode == 0, typed.stdout + typed.stderr


def test_the_burst_was_spoken(typed: subprocess.CompletedProcess[str]) -> None:
    answers = re.findall(r"^(\d+): (\d+) in [\d.]+ s$", typed.stdout, re.MULTILINE)

    assert sorted(int(number) for number, _ in answers) == list(range(1, 13)), typed.stdout
    assert {code for _, code in answers} == {"200"}


def test_every_gpu_that_the_service_leaves_is_cleaning(typed: subprocess.CompletedProcess[str]) -> None:
    held = [line for line in typed.stdout.splitlines() if re.match(r"(h200-0|rtx5090-1) +local ", line)]

    text = "\n".join(held)
    workers = sum(int(number) for number in re.findall(r"cleaning slackwater-workers/podcasts x(\d+)", text))
    assert "inference slackwater-inference/tts-" in text
    assert workers == 15, typed.stdout


def test_the_burst_took_gpus_back_and_nothing_was_lost(admin: Admin) -> None:
    def reclaims() -> list[Object]:
        return [one.get("status") or {} for one in admin.list("reclaims.slackwater.dev", "slackwater-inference")]

    assert reclaims()
    wait_until(lambda: {one.get("phase") for one in reclaims()} <= {"Freed", "Serving"}, 60)
    assert [one for one in reclaims() if float(one.get("lostSeconds") or 0)] == []


def test_the_engine_is_the_real_one_in_its_image_of_links(admin: Admin) -> None:
    pods = admin.list("pods", "slackwater-inference", labels=f"{names.LABEL_KIND}={names.POD_INFERENCE}")

    [engine] = {container["image"] for pod in pods for container in pod["spec"]["containers"]}
    assert engine == "slackwater/engine:checkout"
    assert all(pod["spec"]["containers"][0]["resources"]["limits"][GPU] == "1" for pod in pods)


def test_what_was_cleaned_lies_in_the_ledger_once(admin: Admin, cache: Path) -> None:
    ledger = Standing(cache).ledgers / LEDGER
    command = [sys.executable, "-m", "slackwater_operator", "clean", "verify", str(ledger), "--json"]

    admin.delete("cleaningjobs.slackwater.dev", "podcasts", "slackwater-workers")
    wait_until(lambda: not admin.list("pods", "slackwater-workers"), 60)
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)

    assert report["items_done"] > 0, report
    assert (report["items_lost"], report["items_doubled"], report["problems"]) == (0, 0, []), report


def test_nothing_stays_on_the_machine(cache: Path) -> None:
    assert Standing(cache).stop()

    assert leftovers.records(leftovers.runs_folder(cache)) == []
    assert not Path("/run/slackwater").exists()
    assert not Standing(cache).ledgers.exists()
