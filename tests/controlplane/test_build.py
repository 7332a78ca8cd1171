"""Building programs: the cache, two at once, and what is said when it does not work.  With a Go module of its own."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from slackwater_controlplane.build import GO, PROGRAMS, Program, Programs, cache_folder
from slackwater_controlplane.errors import BuildError, ToolsMissing

HELLO = Program("hello", "greetings", "greetings", "example.org/greetings/hello")
BYE = Program("bye", "greetings", "greetings", "example.org/greetings/bye")
MAIN = 'package main\n\nimport "os"\n\nfunc main() { os.Stdout.WriteString("%s\\n") }\n'

needs_go = pytest.mark.skipif(shutil.which("go") is None, reason="no Go here")


@pytest.fixture
def go(tmp_path: Path) -> Path:
    """A folder of modules with one module of two programs."""
    module = tmp_path / "go/greetings"
    for name in ("hello", "bye"):
        (module / name).mkdir(parents=True)
        (module / name / "main.go").write_text(MAIN % name)
    (module / "go.mod").write_text("module example.org/greetings\n\ngo 1.21\n")
    return module.parent


def programs_in(go: Path, said: list[str] | None = None, environ: dict[str, str] | None = None) -> Programs:
    say = said.append if said is not None else lambda _: None
    cache = go.parent / "cache"
    return Programs(cache, environ or dict(os.environ), go=go, programs=(HELLO, BYE), say=say)


@needs_go
def test_builds_what_is_asked_for_and_nothing_else(go: Path) -> None:
    said: list[str] = []
    programs = programs_in(go, said)

    programs.build("hello")

    assert subprocess.check_output([programs.path("hello")], text=True) == "hello\n"
    assert programs.missing() == ["bye"]
    assert [line for line in said if "building" in line] == ["   0s building hello (1 of 1)"]
    with pytest.raises(BuildError, match=r"bye is not built; run `\.setup/controlplane greetings`"):
        programs.path("bye")


@needs_go
def test_a_second_build_needs_no_go_at_all(go: Path) -> None:
    programs_in(go).build("greetings")
    said: list[str] = []

    programs_in(go, said, {"PATH": "/nonexistent"}).build("greetings")

    assert said == []


@needs_go
def test_another_version_or_flag_is_another_program(go: Path) -> None:
    programs = programs_in(go)
    programs.build()

    flagged = Programs(go.parent / "cache", os.environ, go=go, programs=(replace(HELLO, tags=("fast",)), BYE))
    only_hello_is_missing = flagged.missing()
    (go / "greetings/go.mod").write_text("module example.org/greetings\n\ngo 1.22\n")

    assert only_hello_is_missing == ["hello"]
    assert programs.missing() == ["hello", "bye"]


@needs_go
def test_programs_of_a_module_lie_in_one_folder(go: Path) -> None:
    programs = programs_in(go)

    programs.build()

    assert programs.path("hello").parent == programs.path("bye").parent


@needs_go
def test_a_build_that_fails_names_the_program_and_leaves_nothing_half(go: Path) -> None:
    (go / "greetings/hello/main.go").write_text("package main\n\nfunc main() { nonsense() }\n")
    programs = programs_in(go)

    with pytest.raises(BuildError, match=r"at hello:\n(.*\n)*.*undefined: nonsense"):
        programs.build("hello", "bye")

    assert programs.missing() == ["hello", "bye"]
    assert not list(programs.folder.glob(".building-*"))
    assert not list(programs.folder.rglob("hello"))


@needs_go
def test_what_a_killed_build_left_is_removed_by_the_next(go: Path) -> None:
    programs = programs_in(go)
    left = programs.folder / ".building-old"
    left.mkdir(parents=True)
    (left / "hello").write_text("half")

    programs.build("hello")

    assert not left.exists()


@needs_go
def test_two_that_build_the_same_at_once_build_it_once(go: Path) -> None:
    said: list[str] = []

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: programs_in(go, said).build("hello"), range(2)))

    assert len([line for line in said if "building hello" in line]) == 1
    assert len([line for line in said if "built hello" in line]) == 1


def test_says_in_one_line_that_go_is_missing(go: Path) -> None:
    with pytest.raises(ToolsMissing, match=r"^building needs Go 1\.21 or newer, and no `go` is on the PATH$"):
        programs_in(go, environ={"PATH": "/nonexistent"}).build()


@needs_go
def test_says_in_one_line_that_go_is_too_old(go: Path) -> None:
    (go / "greetings/go.mod").write_text("module example.org/greetings\n\ngo 9.99.1\n")

    with pytest.raises(ToolsMissing, match=r"^building needs Go 9\.99\.1 or newer, found go1\.[0-9.]+$"):
        programs_in(go).build()


@needs_go
def test_says_which_library_is_missing(go: Path) -> None:
    program = replace(HELLO, uses_c=True, libraries=("libnonsense",))
    programs = Programs(go.parent / "cache", os.environ, go=go, programs=(program,))

    with pytest.raises(ToolsMissing, match="apt-get install libnonsense-dev pkg-config"):
        programs.build()


def test_refuses_a_name_that_it_does_not_know(go: Path) -> None:
    with pytest.raises(BuildError, match="no program or group nodes; the groups are greetings"):
        programs_in(go).build("nodes")


def test_the_reason_to_skip_names_what_to_type(go: Path) -> None:
    reason = programs_in(go).why_not("hello")

    assert reason == "hello not built; `.setup/controlplane greetings` builds what is missing"


def test_every_program_of_ours_has_its_module_and_stands_in_its_tools_file() -> None:
    for program in PROGRAMS:
        assert f'_ "{program.package}"' in (GO / program.module / "tools.go").read_text()
        assert (GO / program.module / "go.sum").stat().st_size > 0


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        pytest.param({"SLACKWATER_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a", id="our own variable"),
        pytest.param({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/slackwater", id="the desktop's variable"),
        pytest.param({"HOME": "/c"}, "/c/.cache/slackwater", id="home"),
        pytest.param({"SLACKWATER_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/slackwater", id="empty"),
    ],
)
def test_the_cache_is_where_the_makefile_has_it(environ: dict[str, str], folder: str) -> None:
    assert cache_folder(environ) == Path(folder)
