"""The command line: exit codes, and one clear line for each mistake."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slackwater_workers.cli import app
from slackwater_workers.ledger.store import PosixStore
from slackwater_workers.testing import make_input, numbered, work

COPY = ["--cleaner", "slackwater_workers.testing:CopyCleaner"]


@pytest.fixture
def ledger(memory_path: Path) -> Path:
    work(PosixStore(memory_path / "ledger"), make_input(memory_path / "in", numbered(5)))
    return memory_path / "ledger"


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_verify_ends_0_on_a_sound_ledger_and_1_on_a_damaged_one(ledger: Path) -> None:
    sound, said = run("verify", ledger, "--json")
    (ledger / "part" / "s000000" / "1").unlink()
    damaged, explained = run("verify", ledger)

    assert (sound, json.loads(said)["items_done"]) == (0, 5)
    assert damaged == 1
    assert "part/s000000/1 is gone" in explained


def test_status_needs_no_worker(ledger: Path) -> None:
    code, said = run("status", ledger)
    _, as_json = run("status", ledger, "--json")

    assert code == 0
    assert "5 items cleaned" in said
    assert (json.loads(as_json)["items_total"], json.loads(as_json)["items_open"]) == (5, 0)


def test_export_says_what_it_wrote(ledger: Path, tmp_path: Path) -> None:
    code, said = run("export", ledger, tmp_path / "out")

    assert code == 0
    assert "5 items" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["run", "{t}/none", "-o", "{t}/l"], "does not exist", id="no input"),
        pytest.param(["run", "{t}/file", "-o", "{t}/l"], "must be a folder", id="input is a file"),
        pytest.param(["run", "{t}/empty", "-o", "{t}/l"], "no audio files in", id="no audio"),
        pytest.param(["run", "{t}/in", "-o", "{t}/file"], "must be a folder or not exist", id="ledger is a file"),
        pytest.param(["run", "{t}/in", "-o", "{t}/in"], "is not a ledger and not empty", id="ledger is something else"),
        pytest.param(["run", "{t}/in", "-o", "{t}/l", "--set", "speed=2"], "unknown setting 'speed'", id="setting"),
        pytest.param(["run", "{t}/in", "-o", "{t}/l", "--cleaner", "no:such"], "no cleaner at 'no:such'", id="cleaner"),
        pytest.param(["verify", "{t}/none"], "does not exist", id="verify nothing"),
        pytest.param(["verify", "{t}/empty"], "holds no ledger yet", id="verify an empty folder"),
        pytest.param(["status", "{t}/empty"], "holds no ledger yet", id="status of an empty folder"),
    ],
)
def test_a_mistake_is_exit_code_2_and_says_what_to_do(tmp_path: Path, arguments: list[str], words: str) -> None:
    make_input(tmp_path, {"file": b"", "in/a.wav": b"one", "empty/notes.txt": b""})
    filled = [argument.replace("{t}", str(tmp_path)) for argument in arguments]

    code, said = run(*filled, *(COPY if filled[0] == "run" and "--cleaner" not in filled else []))

    assert code == 2
    assert words in said


def test_a_wrong_input_makes_no_ledger(tmp_path: Path) -> None:
    run("run", tmp_path / "none", "-o", tmp_path / "ledger", *COPY)

    assert not (tmp_path / "ledger").exists()


def test_other_settings_on_an_old_ledger_are_named(ledger: Path) -> None:
    code, said = run("run", ledger.parent / "in", "-o", ledger, "--set", "loudness_lufs=-20", *COPY)

    assert code == 2
    assert "loudness_lufs=-23.0 (now -20.0)" in said
