"""`up`, `status` and `down`: a cluster that stays until it is ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slackwater_controlplane import build, leftovers
from slackwater_controlplane.netns import NAMESPACES
from slackwater_controlplane.processes import await_end
from slackwater_controlplane.standing import Standing, Wanted

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cache(controlplane_programs: build.Programs, tmp_path: Path) -> Path:
    """A cache with the programs that this machine has built and nothing else."""
    if (reason := controlplane_programs.why_not("control-plane", "kwok")) is not None:
        pytest.skip(reason)
    (tmp_path / "cache/controlplane").mkdir(parents=True)
    for program in controlplane_programs.select(()):
        if not controlplane_programs.missing(program.name):
            folder = controlplane_programs.path(program.name).parent
            link = tmp_path / "cache/controlplane" / folder.name
            if not link.exists():
                link.symlink_to(folder)
    return tmp_path / "cache"


@pytest.fixture
def run(cache: Path) -> Iterator[Run]:
    """Runs a command of ours; the cluster is ended afterwards, whatever happens."""
    environ = {**os.environ, "SLACKWATER_CACHE": str(cache), "PYTHONPATH": str(Path(build.__file__).parents[1])}

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "slackwater_controlplane", *words]
        return subprocess.run(command, env=environ, capture_output=True, text=True)

    yield call
    Standing(cache).stop()


def test_a_cluster_is_up_until_it_is_ended(run: Run, cache: Path, controlplane_programs: build.Programs) -> None:
    up = run("up", "--fake-nodes", "3")
    state = Standing(cache).state()
    assert state is not None, up.stderr
    servers = [process for record in leftovers.records(leftovers.runs_folder(cache)) for _, process in record.processes]
    kubectl = [controlplane_programs.path("kubectl"), f"--kubeconfig={state.kubeconfig}", "get", "nodes", "-o", "name"]
    nodes = subprocess.check_output(kubectl, text=True).split()
    again, status = run("up"), run("status")
    down = run("down")

    assert f"Kubernetes is up at {state.url}:\n" in up.stdout
    assert f"export KUBECONFIG={cache}/controlplane/up/kubeconfig" in up.stdout
    assert "8 x NVIDIA-H200" in up.stdout
    assert nodes == ["node/fake-h200-0", "node/fake-h200-1", "node/fake-rtx5090-0"]
    assert again.stdout.startswith(f"Kubernetes was up already at {state.url}:\n")
    assert status.stdout.startswith(f"up at {state.url}\n")
    assert down.stdout == "ended\n"
    assert len(servers) == 5
    assert await_end([state.owner, *servers], 0.0)
    assert leftovers.records(leftovers.runs_folder(cache)) == []


def test_what_is_not_up_is_said(run: Run) -> None:
    status, down = run("status"), run("down")

    assert (status.returncode, status.stdout) == (1, "no cluster is up; `make cluster-up` starts one\n")
    assert (down.returncode, down.stdout) == (0, "no cluster was up\n")


@pytest.mark.parametrize("word", ["images", "env"])
def test_what_needs_a_cluster_says_how_to_start_one(run: Run, word: str) -> None:
    done = run(word)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "[controlplane] no cluster is up; `make cluster-up` starts one\n"


def test_a_shell_that_takes_the_words_of_env_speaks_to_the_cluster(run: Run) -> None:
    run("up", "--fake-nodes", "1")

    env, images = run("env"), run("images")
    script = f"{env.stdout} kubectl get nodes -o name && command -v slackwater"
    typed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)

    assert typed.stdout.splitlines() == ["node/fake-h200-0", str(Path(sys.prefix) / "bin/slackwater")]
    assert images.stderr == (
        "[controlplane] fake nodes run no image; after `make cluster-down`, `make cluster-up` has real ones\n"
    )


def test_down_ends_the_rest_of_a_cluster_whose_process_was_killed(run: Run, cache: Path) -> None:
    run("up", "--fake-nodes", "0")
    state = Standing(cache).state()
    assert state is not None
    (record,) = leftovers.records(leftovers.runs_folder(cache))
    state.owner.send(signal.SIGKILL)
    assert await_end([state.owner], 5.0)

    status, down = run("status"), run("down")

    assert status.returncode == 1
    assert down.stdout == "ended\n"
    assert await_end([process for _, process in record.processes], 0.0)
    assert not record.folder.exists()


@pytest.mark.long
def test_down_ends_real_nodes_too_whose_owner_was_killed(
    run: Run, cache: Path, controlplane_programs: build.Programs
) -> None:
    from slackwater_controlplane.node.cluster import why_not

    if (reason := why_not(controlplane_programs)) is not None:
        pytest.skip(reason)
    up = run("up", "--nodes", "2")
    state = Standing(cache).state()
    assert state is not None, up.stderr
    (record,) = leftovers.records(leftovers.runs_folder(cache))
    network = f"slackwater-{state.url.split('.')[2]}-{state.owner.pid}-"
    before = [path.name for path in NAMESPACES.glob(f"{network}*")]

    state.owner.send(signal.SIGKILL)
    assert await_end([state.owner], 5.0)
    down = run("down")

    assert "8 x NVIDIA-H200" in up.stdout
    assert "kubectl run hello" in up.stdout
    assert len(before) == 1
    assert down.stdout == "ended\n"
    assert not list(NAMESPACES.glob(f"{network}*"))
    assert not record.folder.exists()


def test_a_cluster_that_does_not_come_up_says_why(run: Run, cache: Path) -> None:
    etcd = build.Programs(cache, os.environ).path("etcd")
    broken = etcd.parent.with_name("broken")
    broken.mkdir()
    for program in etcd.parent.resolve().iterdir():
        (broken / program.name).symlink_to(program)
    (broken / "etcd").unlink()
    (broken / "etcd").write_text("#!/bin/sh\necho 'Error: no etcd today' >&2\nexit 1\n")
    (broken / "etcd").chmod(0o755)
    etcd.parent.unlink()
    broken.rename(etcd.parent)

    up = run("up", "--fake-nodes", "0")

    assert up.returncode == 2
    assert "the cluster did not come up" in up.stderr
    assert "Error: no etcd today" in up.stderr
    assert leftovers.records(leftovers.runs_folder(cache)) == []


def test_asks_only_for_the_programs_that_it_takes() -> None:
    assert Wanted(0, 0).groups == ("control-plane",)
    assert Wanted(0, 2).groups == ("control-plane", "kwok")
    assert Wanted(1, 0).groups == ("control-plane", "nodes")
