"""What a killed run leaves: ended at the next start, and nothing else is."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slackwater_controlplane import leftovers
from slackwater_controlplane.cluster import ControlPlane
from slackwater_controlplane.errors import ControlPlaneError
from slackwater_controlplane.leftovers import Record
from slackwater_controlplane.processes import ProcessName, await_end

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


def name_of(process: subprocess.Popen[bytes]) -> ProcessName:
    found = ProcessName.of(process.pid)
    assert found is not None
    return found


def abandoned(runs: Path, folder: Path) -> Record:
    """A run whose owner is no more."""
    folder.mkdir(parents=True)
    record = Record.create(runs, folder)
    document = json.loads(record.path.read_text())
    document["owner"] = [os.getpid(), 1]  # our number, but started when the machine did
    record.path.write_text(json.dumps(document))
    return Record.load(record.path)


def test_ends_the_processes_and_removes_the_folder_of_a_killed_run(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    record = abandoned(tmp_path / "runs", tmp_path / "run")
    record.add_process("sleeper", name_of(sleeper))

    ended = leftovers.sweep(tmp_path / "runs")

    assert [one.path for one in ended] == [record.path]
    assert sleeper.wait(5) == -signal.SIGKILL
    assert not (tmp_path / "run").exists()
    assert not record.path.exists()


def test_leaves_a_run_alone_whose_owner_lives(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    (tmp_path / "run").mkdir()
    record = Record.create(tmp_path / "runs", tmp_path / "run")
    record.add_process("sleeper", name_of(sleeper))

    ended = leftovers.sweep(tmp_path / "runs")

    assert ended == []
    assert sleeper.poll() is None
    assert (tmp_path / "run").exists()


def test_never_ends_a_process_that_has_taken_over_a_number(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    record = abandoned(tmp_path / "runs", tmp_path / "run")
    record.add_process("sleeper", ProcessName(sleeper.pid, name_of(sleeper).start_ticks - 1))

    leftovers.sweep(tmp_path / "runs")

    assert sleeper.poll() is None


def test_undoes_the_last_first_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    record = abandoned(tmp_path / "runs", tmp_path / "run")
    said = tmp_path / "said"
    for word in ("first", "second"):
        record.add_undo("sh", "-c", f"echo {word} >> {said}")
    record.add_undo("false")
    record.add_undo("sh", "-c", f"echo done by the run itself >> {said}")
    record.drop_undo("sh", "-c", f"echo done by the run itself >> {said}")

    leftovers.sweep(tmp_path / "runs")

    assert said.read_text().split() == ["second", "first"]


def test_a_process_that_ended_in_order_is_forgotten(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    record = abandoned(tmp_path / "runs", tmp_path / "run")
    record.add_process("sleeper", name_of(sleeper))
    record.drop_process(name_of(sleeper))

    leftovers.sweep(tmp_path / "runs")

    assert sleeper.poll() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_never_removes_through_a_mount(tmp_path: Path) -> None:
    """What a pod had mounted may be a person's checkout."""
    precious, record = tmp_path / "precious", abandoned(tmp_path / "runs", tmp_path / "run")
    precious.mkdir()
    (precious / "work").write_text("mine")
    mount = tmp_path / "run/mount"
    mount.mkdir()
    if subprocess.run(["mount", "--bind", precious, mount], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        leftovers.sweep(tmp_path / "runs")
    finally:
        subprocess.run(["umount", "--lazy", mount], capture_output=True)

    assert (precious / "work").read_text() == "mine"
    assert not record.folder.exists()


def test_says_when_a_process_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = abandoned(tmp_path / "runs", tmp_path / "run")
    monkeypatch.setattr(leftovers, "_END_S", 0.05)
    immortal = name_of_this_process()
    monkeypatch.setattr(ProcessName, "send", lambda self, number: None)
    record.add_process("immortal", immortal)

    with pytest.raises(ControlPlaneError, match=rf"do not end: \[{os.getpid()}\]"):
        leftovers.sweep(tmp_path / "runs")


def test_a_cluster_of_a_killed_owner_is_ended_at_the_next_start(control_plane: ControlPlane, tmp_path: Path) -> None:
    """The fixture is here for its reason to skip, and to show that it stays."""
    code = """if True:
        import logging, os, sys, time
        from pathlib import Path
        from slackwater_controlplane import fixtures
        from slackwater_controlplane.build import Programs, cache_folder
        with fixtures.new_control_plane(Programs(cache_folder(os.environ), os.environ), Path(sys.argv[1])) as cluster:
            print(cluster.folder, flush=True)
            time.sleep(600)
    """
    package = str(Path(leftovers.__file__).parents[1])
    environ = {**os.environ, "PYTHONPATH": package}
    owner = subprocess.Popen([sys.executable, "-c", code, tmp_path], env=environ, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    (record,) = leftovers.records(leftovers.runs_folder(tmp_path))
    servers = [process for _, process in record.processes]

    owner.kill()
    owner.communicate()
    alive_after_the_kill = [process.is_alive for process in servers]
    leftovers.sweep(leftovers.runs_folder(tmp_path))

    assert alive_after_the_kill == [True] * 4
    assert await_end(servers, 1.0)
    assert not folder.exists()
    assert control_plane.is_ready("kube-apiserver")


def name_of_this_process() -> ProcessName:
    found = ProcessName.of(os.getpid())
    assert found is not None
    return found


def test_a_zombie_is_no_process(sleeper: subprocess.Popen[bytes]) -> None:
    name = name_of(sleeper)

    sleeper.kill()
    deadline_s = time.monotonic() + 5
    while name.is_alive:
        assert time.monotonic() < deadline_s

    assert ProcessName.of(sleeper.pid) is None
