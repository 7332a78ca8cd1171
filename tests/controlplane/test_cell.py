"""Cells: what runs in one ends with it, whoever ends it, and its mounts are seen nowhere else."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slackwater_controlplane import netns
from slackwater_controlplane.node.cell import Cell, CellError, Mounts, remove_cgroups

WHY_NOT = netns.why_not()
pytestmark = [pytest.mark.controlplane, pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")]
CGROUP = f"slackwater-cell-test-{os.getpid()}"


def until(is_so: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    end = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def is_running(mark: str) -> bool:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False


def test_ends_orphans_too_and_leaves_no_cgroup(tmp_path: Path) -> None:
    mark = f"8{os.getpid()}01"

    with Cell(CGROUP, tmp_path) as cell:
        cell.start("parent", ["/bin/sh", "-c", f"setsid sleep {mark} & exit 3"])
        assert until(lambda: is_running(f"sleep\0{mark}"))
        assert until(lambda: "parent" not in cell.running())
        with pytest.raises(CellError, match="ended with 3"):
            cell.check("parent")

    assert not is_running(f"sleep\0{mark}")
    assert not list(Path("/sys/fs/cgroup").glob(f"*/{CGROUP}"))


def test_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    mark = f"8{os.getpid()}02"
    script = (
        "import sys, time, pathlib\n"
        "from slackwater_controlplane.node.cell import Cell\n"
        f"cell = Cell({CGROUP + '-killed'!r}, pathlib.Path({str(tmp_path)!r}))\n"
        "cell.open()\n"
        f"cell.start('long', ['/bin/sleep', '{mark}'])\n"
        "print('started', flush=True)\n"
        "time.sleep(100)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"started\n"
    assert is_running(f"sleep\0{mark}")

    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()

    assert until(lambda: not is_running(f"sleep\0{mark}"))
    remove_cgroups(f"{CGROUP}-killed")  # an empty one stays, which who looks for stale runs removes
    assert not list(Path("/sys/fs/cgroup").glob(f"*/{CGROUP}-killed"))


def test_shows_its_mounts_inside_only(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    target = tmp_path / "target"
    setting = tmp_path / "setting"
    setting.write_text("7\n")
    real = Path("/proc/sys/kernel/panic").read_text()
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "file").touch()
    mounts = Mounts(
        binds=((source, str(target)),), scratch=(str(hidden),), settings=((setting, "/proc/sys/kernel/panic"),)
    )

    with Cell(CGROUP, tmp_path / "cell", mounts=mounts) as cell:
        script = f"touch {target}/seen; ls {hidden}; cat /proc/sys/kernel/panic"
        answer = subprocess.run([*cell.enter(), "/bin/sh", "-c", script], capture_output=True, text=True, check=True)

    assert answer.stdout == "7\n"
    assert (source / "seen").exists()
    assert not list(target.iterdir())
    assert Path("/proc/sys/kernel/panic").read_text() == real


def test_shows_a_folder_that_nobody_writes_and_leaves_none_on_the_machine(tmp_path: Path) -> None:
    source, fresh = tmp_path / "source", tmp_path / "fresh"
    for folder in (source, fresh):
        folder.mkdir()
    (source / "seen").touch()
    mounts = Mounts(scratch=(str(fresh),), views=((source, f"{fresh}/below/it"),))

    with Cell(CGROUP, tmp_path / "cell", mounts=mounts) as cell:
        script = f"ls {fresh}/below/it; touch {fresh}/below/it/written"
        answer = subprocess.run([*cell.enter(), "/bin/sh", "-c", script], capture_output=True, text=True, check=False)

    assert answer.stdout == "seen\n"
    assert "Read-only file system" in answer.stderr
    assert not list(fresh.iterdir())


def test_says_what_it_cannot_mount(tmp_path: Path) -> None:
    mounts = Mounts(binds=((tmp_path / "missing", str(tmp_path / "target")),))

    with pytest.raises(CellError, match="mount"):
        Cell(CGROUP, tmp_path / "cell", mounts=mounts).open()


def test_kills_what_does_not_end_when_asked(tmp_path: Path) -> None:
    with Cell(CGROUP, tmp_path) as cell:
        cell.start("stubborn", ["/bin/sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"])
        assert until(lambda: cell.tail("stubborn") == "ready")

        assert cell.stop("stubborn", wait_s=0.2) == -signal.SIGKILL
        assert cell.running() == {}
