"""The images of manifests/images: what is in them, and that each program runs as a restricted pod runs it."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from slackwater_controlplane import archive, images
from slackwater_controlplane.build import cache_folder
from slackwater_controlplane.images import Image, Images, copied_files
from slackwater_controlplane.package_index import pip_settings

DOCKERFILES = sorted((images.ROOT / "manifests/images").glob("*.Dockerfile"))

# Processes of their own PID namespace, nothing writable but /tmp, user 65532 without any capability.
_POD = """
    mount --make-rprivate / && mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" &&
    mount -t tmpfs -o mode=1777 tmpfs "$0/tmp" && mount -t proc proc "$0/proc" || exit 99
    root=$0
    exec env -i PATH="$IMAGE_PATH" HOME=/tmp /usr/sbin/chroot "$root" \
        /usr/bin/setpriv --reuid 65532 --regid 65532 --clear-groups --no-new-privs --bounding-set -all "$@"
"""


@pytest.fixture(scope="module")
def built() -> Images:
    made = Images(cache_folder(os.environ), os.environ, root=images.ROOT)
    if (why := made.why_not()) is not None:
        pytest.skip(why)
    return made


@pytest.fixture(scope="module")
def run(built: Images, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command in an image's root as a restricted pod would."""
    roots: dict[str, Path] = {}

    def one(name: str, *command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        image = built.ours(name)
        if name not in roots:
            roots[name] = tmp_path_factory.mktemp(name)
            archive.unpack(image.archive, roots[name])
            roots[name].chmod(0o755)  # it becomes /
        entry = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "sh", "-c", _POD, str(roots[name])]
        variables = dict(line.split("=", 1) for line in archive.config(image.archive)["config"]["Env"])
        environ = {**os.environ, "IMAGE_PATH": variables["PATH"]}
        return subprocess.run([*entry, *command], env=environ, capture_output=True, text=True, timeout=timeout_s)

    return one


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_installs_by_hash_and_runs_as_nobody_of_the_host(path: Path) -> None:
    text = path.read_text()

    installs = [line for line in text.replace("\\\n", " ").splitlines() if "pip install" in line or " install " in line]

    assert all("--require-hashes" in line or "--no-index" in line for line in installs)
    assert "\nUSER 65532:65532\n" in text
    assert text.rstrip().endswith('ENTRYPOINT ["env", "--block-signal=TERM", "slackwater"]')
    assert re.search(r"^ARG BASE=python:3\.11-slim", text, re.MULTILINE)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_copies_our_sources_after_the_packages(path: Path) -> None:
    copied = copied_files(path.read_text(), images.ROOT)
    last = path.read_text().rpartition("FROM ${BASE}")[2]

    assert "operator/slackwater_operator/start.py" in copied
    assert not [name for name in copied if "__pycache__" in name]
    assert last.index("COPY --from=packages") < last.index("COPY --from=code")


def test_pip_settings_of_the_environment_win() -> None:
    listed = ":env:.cert='/a.crt'\nglobal.cert='/b.crt'\nglobal.index-url='https://index.invalid/simple'\n"

    assert pip_settings(listed) == {"cert": "/a.crt", "index-url": "https://index.invalid/simple"}


@pytest.mark.controlplane
@pytest.mark.long
@pytest.mark.parametrize("name", ["operator", "worker"])
class TestAnImage:
    def test_runs_as_65532_and_blocks_sigterm_first(self, built: Images, name: str) -> None:
        config = archive.config(built.ours(name).archive)["config"]

        assert config["User"] == "65532:65532"
        assert config["Entrypoint"] == ["env", "--block-signal=TERM", "slackwater"]

    def test_has_no_torch_and_no_way_to_install(
        self, run: Callable[..., subprocess.CompletedProcess[str]], name: str
    ) -> None:
        asked = "import importlib.util as u; print([m for m in ('torch', 'pip') if u.find_spec(m)])"

        done = run(name, "python", "-c", asked)

        assert done.stdout.strip() == "[]", done.stderr

    def test_remembers_nothing_of_the_machine_that_built_it(
        self, run: Callable[..., subprocess.CompletedProcess[str]], name: str
    ) -> None:
        done = run(name, "sh", "-c", "cat /etc/pip.conf /etc/apt/sources.list /etc/resolv.conf 2>/dev/null; true")

        assert done.stdout.strip() == ""

    def test_writes_only_to_tmp(self, run: Callable[..., subprocess.CompletedProcess[str]], name: str) -> None:
        done = run(name, "sh", "-c", "id -u; touch /tmp/a && touch /opt/a /etc/a")

        assert done.stdout.strip() == "65532"
        assert done.stderr.count("Read-only file system") == 2

    def test_knows_its_version(self, run: Callable[..., subprocess.CompletedProcess[str]], name: str) -> None:
        done = run(name, "slackwater", "--version")

        assert done.stdout.startswith("slackwater "), done.stderr


@pytest.mark.controlplane
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "command"),
    [
        pytest.param("operator", ("gateway", "--help"), id="gateway"),
        pytest.param("operator", ("operator", "run", "--help"), id="operator"),
        pytest.param("worker", ("clean", "run", "--help"), id="worker"),
        pytest.param("worker", ("clean", "keep", "--help"), id="keeper"),
    ],
)
def test_a_command_loads_what_it_needs(
    run: Callable[..., subprocess.CompletedProcess[str]], name: str, command: tuple[str, ...]
) -> None:
    done = run(name, "slackwater", *command)

    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


@pytest.mark.controlplane
@pytest.mark.long
def test_the_same_sources_are_not_built_twice(built: Images) -> None:
    first = built.ours("operator").archive.stat()

    again: Image = built.ours("operator")

    assert again.archive.stat().st_mtime_ns == first.st_mtime_ns
