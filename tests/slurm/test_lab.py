"""The lab itself: it starts, crashes and ends as told, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from slackwater_slurm.core import SlurmMissing, SlurmRefused, SlurmUnavailable, SlurmVersion
from slackwater_slurm.lab import Lab, free_ports
from slackwater_slurm.lab_cli import down, up
from slackwater_slurm.lab_config import LabSettings, cgroup_conf, gres_conf, slurm_conf
from slackwater_slurm.templates.settings import NodeGroup

OLD, NEW = SlurmVersion(22, 5, 8), SlurmVersion(25, 11, 7)
ONE_NODE = LabSettings(nodes=(NodeGroup("n1", "h200", 2),))


def on_slurm(test: Callable[..., None]) -> Callable[..., None]:
    marked: Callable[..., None] = pytest.mark.slurm(pytest.mark.e2e(test))
    return marked


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="slurm-lab-") as folder:
        yield Path(folder)


def values(text: str) -> dict[str, str]:
    """The KEY=VALUE lines of a configuration, without nodes and partitions."""
    pairs = (line.partition("=") for line in text.splitlines() if not line.startswith(("NodeName", "PartitionName")))
    return {key: value for key, _, value in pairs}


def wait(is_done: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_done():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def sleeping(lab: Lab) -> list[int]:
    """Process ids of the jobs that are a `sleep`."""
    return [pid for pid in lab.pids() if program(pid).endswith("/sleep")]


def program(pid: int) -> str:
    """The file that a process runs; empty for one that has ended since it was listed."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def text(settings: LabSettings, version: SlurmVersion) -> str:
    ports = {name: 7000 + number for number, name in enumerate(("slurmctld", *settings.node_names))}
    return slurm_conf(settings, version, "/lab", "host", ports)


def test_each_release_gets_only_words_that_it_knows() -> None:
    old, new = values(text(LabSettings(), OLD)), values(text(LabSettings(), NEW))

    assert old["AuthInfo"] == "socket=/lab/munge/socket,cred_expire=5"
    assert "requeue_delay" not in old["SchedulerParameters"]
    assert cgroup_conf(OLD) == ""
    assert new["AuthInfo"] == "socket=/lab/munge/socket"
    assert "requeue_delay=0" in new["SchedulerParameters"]
    assert cgroup_conf(NEW) == "CgroupPlugin=disabled\n"


def test_the_defaults_leave_every_delay_as_slurm_has_it() -> None:
    found = values(text(LabSettings(tuned=False), OLD))

    assert "SchedulerParameters" not in found
    assert "KillWait" not in found
    assert "cred_expire" not in found["AuthInfo"]
    assert found["PreemptMode"] == "REQUEUE"


def test_overrides_and_partitions_of_a_test_win() -> None:
    partitions = ("PartitionName=cleaning Nodes=n1 GraceTime=10",)
    settings = LabSettings(nodes=ONE_NODE.nodes, overrides=(("KillWait", "3"), ("X", "y")), partitions=partitions)

    written = text(settings, OLD)

    assert values(written)["KillWait"] == "3"
    assert values(written)["X"] == "y"
    assert [line for line in written.splitlines() if line.startswith("Partition")] == list(partitions)


def test_a_single_gpu_is_one_file_and_no_range() -> None:
    settings = LabSettings(nodes=(NodeGroup("a", "h200", 1), NodeGroup("b", "rtx5090", 3)))

    lines = gres_conf(settings, "/lab").splitlines()

    assert "File=/lab/dev/nvidia0 " in lines[1]
    assert "File=/lab/dev/nvidia[0-2] " in lines[2]


def test_free_ports_are_distinct_and_free() -> None:
    assert len(set(free_ports(20))) == 20


@on_slurm
def test_a_job_sees_the_gpus_it_was_given(lab: Lab, tmp_path: Path) -> None:
    script = '#!/bin/bash\necho "$SLURMD_NODENAME $CUDA_VISIBLE_DEVICES ${ROCR_VISIBLE_DEVICES:-none}" >>seen\n'

    lab.submit(script, "-p", "train", "--gres=gpu:h200:4", f"--chdir={tmp_path}")
    lab.submit(script, "-p", "train", f"--chdir={tmp_path}", "-o", "no-gpu")
    wait(lambda: (tmp_path / "seen").exists() and len((tmp_path / "seen").read_text().splitlines()) == 2)

    seen = sorted((tmp_path / "seen").read_text().splitlines())
    assert [line.split()[1:] for line in seen if "0,1,2,3" in line] == [["0,1,2,3", "none"]]
    assert sum("0,1,2,3" not in line for line in seen) == 1


@on_slurm
def test_reset_undoes_whatever_a_test_did(lab: Lab) -> None:
    lab.submit(
        "#!/bin/bash\ntrap '' TERM\nwhile :; do sleep 1; done\n", "-p", "cleaning", "--gres=gpu:1", "-o", "/dev/null"
    )
    lab.run("scontrol", "update", "NodeName=h1", "State=DRAIN", "Reason=test")
    lab.run(
        "scontrol", "create", "reservation", "StartTime=now", "Duration=60", "Users=root", "Nodes=h2", "Flags=MAINT"
    )
    lab.run("scontrol", "update", "PartitionName=train", "State=DOWN")
    lab.kill("r1")
    lab.kill("slurmctld")

    lab.reset()

    assert lab.run("squeue", "-h") == ""
    assert "State=UP" in lab.run("scontrol", "show", "partition", "train")
    assert "No reservations" in lab.run("scontrol", "show", "reservation")
    assert set(lab.run("sinfo", "-h", "-o", "%T").split()) == {"idle"}


@on_slurm
def test_jobs_go_on_while_their_daemons_are_dead(lab: Lab, tmp_path: Path) -> None:
    lab.submit("#!/bin/bash\nexec sleep 600\n", "-p", "cleaning", "-w", "r2", f"--chdir={tmp_path}")
    wait(lambda: len(sleeping(lab)) == 1)
    [job] = sleeping(lab)

    lab.kill("slurmctld")
    lab.kill("r2")

    assert job in lab.pids()
    with pytest.raises(SlurmRefused, match="r2 is not running"):
        lab.kill("r2")


@on_slurm
def test_a_node_that_crashes_takes_its_jobs_with_it_and_no_others(lab: Lab, tmp_path: Path) -> None:
    script = "#!/bin/bash\nexec sleep 600\n"
    for node in ("r1", "r2"):
        lab.submit(script, "-p", "cleaning", "-w", node, f"--chdir={tmp_path}")
    wait(lambda: len(sleeping(lab)) == 2)

    lab.crash_node("r1")

    [left] = sleeping(lab)
    assert b"SLURMD_NODENAME=r2" in Path(f"/proc/{left}/environ").read_bytes().split(b"\0")


@on_slurm
def test_nothing_is_left_when_the_process_that_started_it_is_killed(short_path: Path) -> None:
    code = (
        "import pathlib, sys, time\nfrom slackwater_slurm.lab import Lab\n"
        "with Lab(pathlib.Path(sys.argv[1])) as lab:\n"
        "    lab.submit('#!/bin/bash\\nexec sleep 600\\n', '-p', 'cleaning', '-o', '/dev/null')\n"
        "    print('up', flush=True)\n    time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(short_path)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"up\n"
    lab = Lab.attach(short_path)
    was_there = len(lab.pids())

    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait(lambda: not lab.pids(), 20.0)

    assert was_there >= 6


@on_slurm
def test_a_controller_that_refuses_its_settings_is_quoted(short_path: Path) -> None:
    broken = LabSettings(nodes=ONE_NODE.nodes, overrides=(("PreemptMode", "OFF"),))

    with (
        pytest.raises(SlurmUnavailable, match="PreemptType and PreemptMode values incompatible"),
        Lab(short_path, broken),
    ):
        pass

    assert Lab.attach(short_path).pids() == []


@on_slurm
def test_a_folder_that_is_too_deep_is_refused_before_anything_starts(short_path: Path) -> None:
    deep = short_path / ("x" * 90)

    with pytest.raises(SlurmMissing, match="too long a path"):
        Lab(deep).start()

    assert not deep.exists()


@on_slurm
def test_up_and_down_of_the_command_line(short_path: Path) -> None:
    app = typer.Typer()
    app.command()(up)
    app.command()(down)
    folder = ["--folder", str(short_path / "lab")]

    started = CliRunner().invoke(app, ["up", *folder])
    again = CliRunner().invoke(app, ["up", *folder])
    ended = CliRunner().invoke(app, ["down", *folder])
    nothing = CliRunner().invoke(app, ["down", *folder])

    assert started.exit_code == again.exit_code == ended.exit_code == 0
    assert f"export SLURM_CONF={short_path}/lab/slurm.conf" in started.stdout
    assert "gpu:rtx5090:2" in started.stdout
    assert "was up already" in again.stdout
    assert not (short_path / "lab").exists()
    assert nothing.exit_code == 2
