"""One Slurm command: what it inherits, how long it may take, how its failure reads.  Commands here are scripts."""

import stat
import time
from pathlib import Path

import pytest

from slackwater_slurm.client.command import Commands, failure
from slackwater_slurm.client.text import TextClient, array_tasks, asked_gpus, sbatch_options
from slackwater_slurm.core import (
    GpuCount,
    OutputCut,
    SlurmError,
    SlurmMissing,
    SlurmRefused,
    SlurmUnavailable,
    Submission,
    UnknownShape,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def make_command(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def commands(folder: Path, **environ: str) -> Commands:
    return Commands({"PATH": f"{folder}:/usr/bin:/bin", **environ}, timeout_s=5.0)


@pytest.mark.e2e
def test_variables_that_change_output_or_target_do_not_reach_a_command(folder: Path) -> None:
    make_command(folder, "squeue", "env")
    foreign = {
        "SQUEUE_FORMAT": "%i",
        "SLURM_CLUSTERS": "other",
        "SLURM_TIME_FORMAT": "relative",
        "SBATCH_PARTITION": "x",
    }

    printed = commands(folder, SLURM_CONF="/etc/a.conf", HOME="/home/u", LC_ALL="tr_TR.UTF-8", **foreign).run("squeue")

    found = dict(line.partition("=")[::2] for line in printed.splitlines())
    assert found["SLURM_CONF"] == "/etc/a.conf"
    assert found["HOME"] == "/home/u"
    assert (found["SLURM_TIME_FORMAT"], found["SLURM_BITSTR_LEN"], found["LC_ALL"]) == ("%s", "0", "C")
    assert not {"SQUEUE_FORMAT", "SLURM_CLUSTERS", "SBATCH_PARTITION"} & set(found)


@pytest.mark.e2e
def test_a_job_does_not_inherit_our_reading_variables(folder: Path) -> None:
    make_command(folder, "sbatch", "env")

    printed = commands(folder, LC_ALL="de_DE.UTF-8", SLURM_JOB_ID="7").run("sbatch")

    assert "LC_ALL=de_DE.UTF-8" in printed
    assert "SLURM_TIME_FORMAT" not in printed
    assert "SLURM_JOB_ID" not in printed


@pytest.mark.e2e
def test_a_command_that_hangs_is_ended_and_can_be_tried_again(folder: Path) -> None:
    make_command(folder, "squeue", "exec sleep 30")
    began_s = time.monotonic()

    with pytest.raises(SlurmUnavailable, match=r"squeue gave no answer within 0\.2 s"):
        Commands({"PATH": f"{folder}:/usr/bin:/bin"}, timeout_s=0.2).run("squeue")

    assert time.monotonic() - began_s < 5


@pytest.mark.e2e
def test_a_machine_without_slurm_is_told_so(folder: Path) -> None:
    with pytest.raises(SlurmMissing, match=r"squeue cannot be run .*slurm-client"):
        Commands({"PATH": str(folder)}).run("squeue")


@pytest.mark.e2e
def test_every_call_is_told_to_the_watcher_also_one_that_fails(folder: Path) -> None:
    make_command(folder, "squeue", "true")
    make_command(folder, "scontrol", "exit 1")
    calls: list[tuple[str, bool]] = []
    some = Commands({"PATH": f"{folder}:/bin"}, watch=lambda name, took_s, is_ok: calls.append((name, is_ok)))

    some.run("squeue")
    with pytest.raises(SlurmRefused):
        some.run("scontrol", "ping")

    assert calls == [("squeue", True), ("scontrol", False)]


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        pytest.param(
            "sbatch: error: invalid partition specified: nope\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified",
            SlurmRefused,
            "sbatch: Batch job submission failed: Invalid partition name specified",
            id="unknown partition",
        ),
        pytest.param(
            "sbatch: error: Batch job submission failed: Requested node configuration is not available",
            SlurmRefused,
            "Requested node configuration is not available",
            id="no GPUs of that type",
        ),
        pytest.param(
            "sbatch: error: AssocMaxSubmitJobLimit\n"
            "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy",
            SlurmRefused,
            "a quota is used up",
            id="quota",
        ),
        pytest.param(
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
            SlurmUnavailable,
            "the controller does not answer",
            id="controller down",
        ),
        pytest.param(
            "squeue: error: slurm_receive_msg: Socket timed out on send/recv operation",
            SlurmUnavailable,
            "the controller does not answer",
            id="controller slow",
        ),
        pytest.param(
            "squeue: error: Munge decode failed: Expired credential\n"
            "slurm_load_jobs error: Protocol authentication error",
            SlurmUnavailable,
            "clocks that agree",
            id="expired credential",
        ),
        pytest.param(
            "squeue: error: If munged is up, restart with --num-threads=10\n"
            "squeue: error: Munge encode failed: Failed to access socket",
            SlurmUnavailable,
            "munged must run here",
            id="no munged",
        ),
        pytest.param(
            "squeue: error: s_p_parse_file: cannot stat file /none: No such file or directory\n"
            "squeue: fatal: Unable to process configuration file",
            SlurmMissing,
            "set SLURM_CONF",
            id="no configuration",
        ),
        pytest.param("", SlurmRefused, "ended with 3 and said nothing", id="silence"),
    ],
)
def test_a_failure_is_one_line_that_says_whether_to_try_again(said: str, kind: type[SlurmError], message: str) -> None:
    error = failure(said.split(":")[0] or "squeue", 3, said)

    assert type(error) is kind
    assert message in str(error)
    assert "\n" not in str(error)


@pytest.mark.e2e
def test_output_that_was_cut_is_not_taken_for_a_short_list(folder: Path) -> None:
    # Echoes the marks that it was asked for, as squeue would, and stops inside the second record.
    make_command(folder, "sinfo", 'shift 4; printf "%s" "$1" | sed "s/:0/ /g; s/,//g"; echo; printf "h2"')

    with pytest.raises(OutputCut, match="sinfo: the output ends inside a record"):
        TextClient(commands(folder)).nodes()


@pytest.mark.e2e
def test_another_release_s_columns_are_refused(folder: Path) -> None:
    make_command(
        folder, "sinfo", 'shift 4; mark=$(printf "%s" "$1" | sed "s/.*Reason:0//"); printf "h1 idle%s\\n" "$mark"'
    )

    with pytest.raises(UnknownShape, match="sinfo: 6 columns were asked for, got 1"):
        TextClient(commands(folder)).nodes()


@pytest.mark.e2e
def test_a_submission_without_a_job_id_is_not_taken_for_one(folder: Path) -> None:
    make_command(folder, "sbatch", "echo Submitted batch job 7")

    with pytest.raises(UnknownShape, match="a job id was expected, got 'Submitted batch job 7"):
        TextClient(commands(folder)).submit(Submission("clean", "#!/bin/sh\n"))


def test_only_jobs_can_be_named_in_a_command_that_changes_something(folder: Path) -> None:
    client = TextClient(commands(folder))  # no command exists: reaching one would be SlurmMissing

    for ref in ("--user=root", "12_", "12_[0-3]", "", "12;ls"):
        with pytest.raises(ValueError, match="a job is 12 or 12_3"):
            client.cancel([ref])
    with pytest.raises(ValueError, match="Slurm takes 0 for no limit"):
        client.set_throttle(12, 0)


@pytest.mark.e2e
def test_changing_no_job_runs_no_command(folder: Path) -> None:
    client = TextClient(Commands({"PATH": str(folder)}))

    client.cancel([])
    client.requeue([])
    with pytest.raises(SlurmMissing):
        client.cancel(["1"])


def test_a_submission_becomes_options_of_sbatch() -> None:
    submission = Submission(
        "clean",
        "#!/bin/sh\n",
        partition="cleaning",
        gpus=1,
        gpu_type="h200",
        num_tasks=12,
        max_running=4,
        requeue=True,
        append_output=True,
        hold=True,
        options=("--nice=100",),
    )

    assert set(sbatch_options(submission)) == {
        "--job-name=clean",
        "--partition=cleaning",
        "--gres=gpu:h200:1",
        "--array=0-11%4",
        "--requeue",
        "--open-mode=append",
        "--hold",
        "--nice=100",
    }
    assert sbatch_options(Submission("t", "#!/bin/sh\n", requeue=False)) == ("--job-name=t", "--no-requeue")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("6-7%6", (2, 6)), ("0-899:2", (450, 0)), ("1,3,5-7", (5, 0)), ("4%1", (1, 1))],
)
def test_counts_the_waiting_tasks_of_an_array(text: str, expected: tuple[int, int]) -> None:
    assert array_tasks(text) == expected


@pytest.mark.parametrize(
    ("request_", "total"),
    [
        pytest.param(("gres:gpu:6", "N/A", "N/A", "N/A"), 6, id="a job"),
        pytest.param(("N/A", "gres:gpu:h200:2", "N/A", "N/A"), 4, id="a node, two nodes"),
        pytest.param(("N/A", "N/A", "gres:gpu:1", "N/A"), 8, id="a task, eight tasks"),
        pytest.param(("N/A", "N/A", "N/A", "gres:gpu:1"), 2, id="a socket"),
        pytest.param(("N/A", "N/A", "N/A", "N/A"), 0, id="none"),
    ],
)
def test_a_request_amounts_to_gpus(request_: tuple[str, str, str, str], total: int) -> None:
    found = asked_gpus(*request_, num_nodes=2, num_tasks=8)

    assert found.total == total
    assert isinstance(found, GpuCount)
