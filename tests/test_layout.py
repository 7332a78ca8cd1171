"""The checkout's shape: what may stand where, how large a module may grow, what no file may say."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("operator", "slurm", "inference", "kernels", "workers")
TOP = {*ROOMS, "manifests", "tests", "pyproject.toml", "README.md", "Makefile", "CHANGELOG.md", "LICENSE"}
MAX_LINES = 420  # "no module over about 400 lines"


def files() -> list[Path]:
    """What git tracks, and what it would."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


MODULES = [path for path in files() if path.suffix == ".py"]
PACKAGED = [path for path in MODULES if path.relative_to(ROOT).parts[0] in ROOMS]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_only_the_agreed_names_stand_at_the_top() -> None:
    tops = {path.relative_to(ROOT).parts[0] for path in files()}

    assert {name for name in tops if not name.startswith(".")} == TOP


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_one_package_and_a_readme(room: str) -> None:
    inside = {path.relative_to(ROOT / room).parts[0] for path in files() if path.is_relative_to(ROOT / room)}

    assert inside == {"README.md", f"slackwater_{room}"}
    assert (ROOT / room / f"slackwater_{room}" / "py.typed").is_file()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", PACKAGED, ids=name_of)
def test_a_module_says_what_it_owns(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))

    assert docstring
    assert docstring[0].isupper() or docstring.startswith("`")


@pytest.mark.parametrize("path", PACKAGED, ids=name_of)
def test_no_module_reads_the_environment_on_its_own(path: Path) -> None:
    reads = re.findall(r"os\.getenv|os\.environ\[|os\.environ\.get", path.read_text())

    assert not reads


def test_every_module_belongs_to_a_layer() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    unlayered = {"__main__", "testing", "schemas"}  # nothing imports them
    for contract in contracts:
        if contract["type"] != "layers":
            continue
        [package] = contract["containers"]
        room = package.removeprefix("slackwater_")
        layered = {name.strip() for layer in contract["layers"] for name in layer.split("|")}
        folder = ROOT / room / package
        modules = {path.stem for path in folder.glob("*.py")} | {
            path.parent.name for path in folder.glob("*/__init__.py")
        }

        assert modules - {"__init__"} - unlayered == layered, package


def test_entry_points_name_modules_of_ours() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]

    for target in (*points["slackwater.commands"].values(), *points["slackwater.sides"].values()):
        module = target.partition(":")[0].replace(".", "/")
        assert any((ROOT / room / f"{module}.py").is_file() for room in ROOMS), target


def test_every_make_target_of_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))

    named = set(re.findall(r"`make ([a-z-]+)", (ROOT / "README.md").read_text()))

    assert named
    assert named <= targets


@pytest.mark.parametrize("path", [path for path in files() if path.suffix == ".md"], ids=name_of)
def test_links_between_our_pages_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_locks_pin_by_hash_and_name_no_registry() -> None:
    locks = sorted((ROOT / ".setup/locks").glob("*.lock"))

    assert {lock.stem for lock in locks} == {"operator", "workers", "inference", "demo", "dev", "build", "uv"}
    for lock in locks:
        text = lock.read_text()
        assert "://" not in text
        pins = re.findall(r"^[a-z0-9-]+==", text, flags=re.MULTILINE)
        assert pins
        assert text.count("--hash=sha256:") >= len(pins)


def test_torch_is_pinned_only_where_it_is_needed() -> None:
    with_torch = {lock.stem for lock in (ROOT / ".setup/locks").glob("*.lock") if "\ntorch==" in lock.read_text()}

    assert with_torch == {"inference", "demo", "dev"}
