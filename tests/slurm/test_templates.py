"""What `slackwater slurm render` writes: complete, reasoned, accepted by bash and by Slurm."""

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from slackwater_slurm.core import SlurmVersion
from slackwater_slurm.lab import Lab
from slackwater_slurm.templates.commands import Kind, render
from slackwater_slurm.templates.fragments import gres_conf_fragment, slurm_conf_fragment
from slackwater_slurm.templates.scripts import CleanScript, TrainScript, clean_script, train_script, worker_command
from slackwater_slurm.templates.settings import (
    NodeGroup,
    Setting,
    cgroup_settings,
    cluster_settings,
    partition_settings,
    process_settings,
)

OLD, NEW = SlurmVersion(22, 5, 8), SlurmVersion(25, 11, 7)

app = typer.Typer()
app.command()(render)


def values(settings: tuple[Setting, ...]) -> dict[str, str]:
    return {item.key: item.value for item in settings}


@pytest.mark.parametrize(
    "settings",
    [
        cluster_settings(OLD, num_gpus=5000),
        cluster_settings(NEW),
        partition_settings("ALL"),
        cgroup_settings(),
        process_settings(),
    ],
    ids=["cluster", "cluster-new", "partitions", "cgroup", "process"],
)
def test_each_setting_has_its_reason(settings: tuple[Setting, ...]) -> None:
    for item in settings:
        assert len(item.reason) > 20
        assert item.reason.endswith(".")


def test_the_requeue_delay_is_cut_by_what_the_release_has() -> None:
    old, new = values(cluster_settings(OLD)), values(cluster_settings(NEW))

    assert old["AuthInfo"] == "cred_expire=5"
    assert "requeue_delay" not in old["SchedulerParameters"]
    assert "AuthInfo" not in new
    assert "requeue_delay=0" in new["SchedulerParameters"]


def test_limits_are_raised_only_for_a_fleet_that_exceeds_them() -> None:
    small, large = values(cluster_settings(NEW, num_gpus=64)), values(cluster_settings(NEW, num_gpus=4000))

    assert "MaxArraySize" not in small
    assert "queue_depth" not in small["SchedulerParameters"]
    assert int(large["MaxArraySize"]) > 4000
    assert "default_queue_depth=8000" in large["SchedulerParameters"]


def test_a_fragment_has_one_value_a_key_and_comments_for_the_rest() -> None:
    lines = slurm_conf_fragment(OLD, kill_wait_s=20, num_gpus=504).splitlines()

    keys = [line.partition("=")[0] for line in lines if line and not line.startswith("#")]
    assert len(keys) == len(set(keys))
    assert "KillWait=20" in lines
    assert all(len(line) <= 160 for line in lines)


def test_gres_names_every_device_of_each_group() -> None:
    text = gres_conf_fragment([NodeGroup("gpu[01-08]", "h200", 8), NodeGroup("w1", "rtx5090", 1)])

    assert "NodeName=gpu[01-08] Name=gpu Type=h200 File=/dev/nvidia[0-7] " in text
    assert "NodeName=w1 Name=gpu Type=rtx5090 File=/dev/nvidia0 " in text
    assert "Gres=gpu:h200:8" in text


def test_the_worker_is_execed_and_the_scripts_are_bash() -> None:
    clean = clean_script(CleanScript(worker_command("slackwater", "/in it's", "/ledger"), max_workers=8, max_running=3))
    train = train_script(TrainScript(("srun", "python", "train.py"), gpu_type="h200", gpus_per_node=4))

    last = clean.splitlines()[-1]
    assert last == """exec slackwater clean run '/in it'"'"'s' --output /ledger"""
    assert "#SBATCH --array=0-7%3" in clean
    assert "#SBATCH --requeue" in clean
    assert "#SBATCH --gres=gpu:h200:4" in train
    for text in (clean, train):
        assert text.startswith("#!/bin/bash\n#SBATCH ")
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: CleanScript(()), id="no command"),
        pytest.param(lambda: CleanScript(("x",), partition="a b"), id="partition with a space"),
        pytest.param(lambda: CleanScript(("x",), name="a\n#SBATCH --exclusive"), id="name with a line"),
        pytest.param(lambda: CleanScript(("x",), output="a\nb"), id="output with a line"),
        pytest.param(lambda: CleanScript(("x",), max_workers=-1), id="negative workers"),
        pytest.param(lambda: TrainScript(("x",), gpus_per_node=0), id="no GPUs"),
        pytest.param(lambda: TrainScript(("x",), gpu_type="h200:4"), id="type with a count"),
        pytest.param(lambda: NodeGroup("a", "", 1), id="no type"),
    ],
)
def test_what_slurm_would_misread_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        make()


def test_render_writes_every_kind_into_a_folder(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["--release", "24.11.5", "-o", str(tmp_path / "site"), "--node", "g[1-9]:h200:8"])

    assert done.exit_code == 0, done.output
    assert {path.name for path in (tmp_path / "site").iterdir()} == {kind.value for kind in Kind}
    assert "Nodes=g[1-9] " in (tmp_path / "site/partitions.conf").read_text()


def test_render_prints_one_kind_bare() -> None:
    done = CliRunner().invoke(app, ["clean.sh", "--recordings", "/data", "--ledger", "/out"])

    assert done.stdout.startswith("#!/bin/bash\n")
    assert "exec slackwater clean run /data --output /out" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        pytest.param(["slurm.conf", "--release", "new"], "22.05.8", id="no release"),
        pytest.param(["gres.conf", "--node", "g1:8"], "NAMES:TYPE:GPUS", id="node without a type"),
        pytest.param(["gres.conf", "--node", "g1:h200:0"], "1 or more", id="node without GPUs"),
        pytest.param(["clean.sh", "--cleaning", "a b"], "partition must be", id="partition"),
        pytest.param(["clean.sh", "-o", "/dev/null/x"], "cannot write", id="folder"),
    ],
)
def test_bad_input_of_render_is_named(arguments: list[str], complaint: str) -> None:
    done = CliRunner().invoke(app, arguments)

    assert done.exit_code == 2
    assert complaint in re.sub(r"[\s│]+", " ", done.output)


@pytest.mark.slurm
@pytest.mark.e2e
def test_slurm_takes_both_scripts(lab: Lab, tmp_path: Path) -> None:
    clean = clean_script(CleanScript(worker_command("slackwater", "/in", "/out"), max_workers=12, mem_per_cpu_mb=100))
    train = train_script(TrainScript(("true",), gpu_type="rtx5090", gpus_per_node=2, num_nodes=2))

    for text in (clean, train):
        lab.run("sbatch", "--test-only", input=text)  # raises when Slurm refuses it


@pytest.mark.slurm
@pytest.mark.e2e
def test_training_that_nears_its_limit_saves_and_goes_on_under_its_id(lab: Lab, tmp_path: Path) -> None:
    program = tmp_path / "train"
    program.write_text(
        "#!/bin/bash\ntrap 'echo saved >>log; exit' USR1\necho \"began ${SLURM_RESTART_COUNT:-0}\" >>log\n"
        "sleep infinity & wait\n"
    )
    program.chmod(0o755)
    log = tmp_path / "log"
    job = lab.submit(train_script(TrainScript((str(program),), mem_per_cpu_mb=100)), f"--chdir={tmp_path}")
    wait_for(log, "began 0")

    lab.run("scancel", "--signal=USR1", "--batch", str(job))  # what --signal=B:USR1@120 sends
    wait_for(log, "began 1")

    assert log.read_text().splitlines() == ["began 0", "saved", "began 1"]
    assert lab.run("squeue", "-h", "-o", "%A %T").split() == [str(job), "RUNNING"]


def wait_for(path: Path, line: str) -> None:
    deadline_s = time.monotonic() + 40.0
    while not path.exists() or line not in path.read_text().splitlines():
        assert time.monotonic() < deadline_s, line
        time.sleep(0.05)
