"""What a person sees of `slackwater slurm run` and `status`: the table, and one line for every mistake."""

import io
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from rich.console import Console

from slackwater_operator.cli import call
from slackwater_slurm import status
from slackwater_slurm.config import load
from slackwater_slurm.core import NodeState
from slackwater_slurm.testing import FakeSlurm


def table(slurm: FakeSlurm) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(status.render(status.document(slurm, slurm.now_s)))
    return console.export_text()


def test_the_table_fits_80_columns_and_says_what_the_gpus_do() -> None:
    slurm = FakeSlurm({"h1": ("h200", 4), "h2": ("h200", 4), "r1": ("rtx5090", 2)}, user="somebody")
    slurm.train(3, "h200")
    slurm.set_state("r1", NodeState.DRAINED)

    lines = table(slurm).splitlines()

    assert lines[0].startswith("fake: 10 GPUs, 3 training, 0 cleaning, 5 idle, 2 unavailable; in use 38%")
    assert [line.split()[:7] for line in lines[3:5]] == [
        ["h200", "2", "8", "3", "0", "5", "0"],
        ["rtx5090", "1", "2", "0", "0", "0", "2"],
    ]
    assert "not for cleaning: r1 (drained)" in lines[5]
    assert not any("…" in line for line in lines)


def test_a_cluster_without_gpus_has_a_table_too() -> None:
    assert "0 GPUs" in table(FakeSlurm({}))


# --- settings and command line ---------------------------------------------------------------------------

POINT = EntryPoint("slurm", "slackwater_slurm.cli:app", "slackwater.commands")

GOOD = "jobs: [{name: pod, input: in, output: ledger}]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "must hold a mapping", id="empty"),
        pytest.param("jobs: [", "is not YAML", id="not YAML"),
        pytest.param("jobs: []", "jobs: ", id="no jobs"),
        pytest.param("jobs: [{name: pod, input: in}]", "jobs[0].output: is required", id="missing"),
        pytest.param(GOOD + "tick: 3", "tick: unknown key; did you mean 'tick_s'?", id="unknown key"),
        pytest.param(
            "jobs: [{name: p, input: i, output: o, max_worker: 3}]", "did you mean 'max_workers'?", id="in a job"
        ),
        pytest.param(GOOD + "tick_s: 0", "tick_s: input should be greater than or equal to 0.1, got 0", id="bounds"),
        pytest.param(
            "jobs: [{name: p, input: i, output: o, min_workers: 9, max_workers: 2}]",
            "min_workers (9) is above max_workers (2)",
            id="bounds that disagree",
        ),
        pytest.param(
            "jobs: [{name: p, input: i, output: o}, {name: q, input: i, output: o}]",
            "the output 'o' is used twice",
            id="one ledger for two jobs",
        ),
        pytest.param(GOOD + "partition: 'a b'", "partition: ", id="a partition that is none"),
        pytest.param(
            "jobs: [{name: p, input: i, output: o, gpu_types: [h200, h200]}]", "names a type twice", id="a type twice"
        ),
    ],
)
def test_a_bad_configuration_gets_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "slurm.yaml"
    path.write_text(text)

    code = call(POINT, ["run", "--config", str(path)])

    said = capsys.readouterr().err
    assert code == 2
    assert message in said
    assert said.count("\n") == 1


def test_paths_are_taken_from_the_files_folder(tmp_path: Path) -> None:
    (tmp_path / "slurm.yaml").write_text(GOOD)

    job = load(tmp_path / "slurm.yaml").jobs[0]

    assert (job.output, job.logs_folder) == (tmp_path / "ledger", tmp_path / "ledger-logs")


def test_without_slurms_commands_status_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    code = call(POINT, ["status"])

    said = capsys.readouterr().err
    assert code == 2
    assert "install Slurm's commands" in said
    assert said.count("\n") == 1


def test_a_slurm_conf_that_is_not_there_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    code = call(POINT, ["status", "--conf", "/nowhere/slurm.conf"])

    assert code == 2
    assert "/nowhere/slurm.conf" in capsys.readouterr().err
