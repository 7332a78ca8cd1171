"""The programs of the test cluster: which there are, how each is built, and where the built ones lie.

Owns the table of programs and their cache, `<cache>/controlplane/<digest>/NAME`, whose digest covers the module's
go.mod and go.sum and the flags: whatever changes a program changes its folder.  Does not own what runs them.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slackwater_controlplane.errors import BuildError, ToolsMissing

GO = Path(__file__).parent / "go"
KUBERNETES = "v1.36.3"
_STRIPPED = "-s -w"
_VERSION = "k8s.io/component-base/version"
_KUBERNETES_FLAGS = (
    f"{_STRIPPED} -X {_VERSION}.gitVersion={KUBERNETES} -X {_VERSION}.gitMajor=1 -X {_VERSION}.gitMinor=36"
)
_PROGRESS_S = 20.0
_LAST_LINES = 15

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Program:
    """One program to build.

    module: folder in `go/`.   package: the import path of its main package.   libraries: what pkg-config must know.
    cold_s: about how long it takes on two cores after those before it, to tell whoever waits.
    """

    name: str
    group: str
    module: str
    package: str
    tags: tuple[str, ...] = ()
    ldflags: str = _STRIPPED
    uses_c: bool = False
    libraries: tuple[str, ...] = ()
    cold_s: int = 5


def _kubernetes(name: str, group: str, cold_s: int) -> Program:
    package = f"k8s.io/kubernetes/cmd/{name}"
    return Program(name, group, "kubernetes", package, ldflags=_KUBERNETES_FLAGS, cold_s=cold_s)


def _containerd(name: str, cold_s: int) -> Program:
    package = f"github.com/containerd/containerd/v2/cmd/{name}"
    return Program(name, "nodes", "containerd", package, tags=("no_btrfs", "no_zfs"), cold_s=cold_s)


def _cni(name: str, kind: str) -> Program:
    return Program(name, "nodes", "cni", f"github.com/containernetworking/plugins/plugins/{kind}/{name}")


# In the order in which they are built: what is needed first comes first.
PROGRAMS = (
    Program("etcd", "control-plane", "kubernetes", "go.etcd.io/etcd/server/v3", ldflags=_KUBERNETES_FLAGS, cold_s=60),
    _kubernetes("kube-apiserver", "control-plane", 190),
    _kubernetes("kube-controller-manager", "control-plane", 60),
    _kubernetes("kube-scheduler", "control-plane", 10),
    _kubernetes("kubectl", "control-plane", 20),
    Program("kwok", "kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok", cold_s=80),
    _kubernetes("kubelet", "nodes", 30),
    _containerd("containerd", 60),
    _containerd("containerd-shim-runc-v2", 5),
    _containerd("ctr", 5),
    _cni("bridge", "main"),
    _cni("ptp", "main"),
    _cni("loopback", "main"),
    _cni("host-local", "ipam"),
    Program(
        "runc",
        "nodes",
        "runc",
        "github.com/opencontainers/runc",
        tags=("seccomp",),
        uses_c=True,
        libraries=("libseccomp",),
    ),
    _kubernetes("kube-proxy", "nodes", 10),
    Program("coredns", "nodes", "coredns", "github.com/coredns/coredns", cold_s=90),
    Program("envoy-gateway", "gateway", "envoygateway", "github.com/envoyproxy/gateway/cmd/envoy-gateway", cold_s=240),
)
GROUPS = tuple(dict.fromkeys(program.group for program in PROGRAMS))


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where everything built is kept: the Makefile's CACHE."""
    if chosen := environ.get("SLACKWATER_CACHE"):
        return Path(chosen)
    return Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "/root") / ".cache") / "slackwater"


class Programs:
    """The programs in one cache.

    go: folder of the module folders.   environ: what `go` runs with.
    """

    def __init__(
        self,
        cache: Path,
        environ: Mapping[str, str],
        *,
        go: Path = GO,
        programs: tuple[Program, ...] = PROGRAMS,
        say: Say = lambda _: None,
    ) -> None:
        self.folder = cache / "controlplane"
        self._environ = dict(environ)
        self._go = go
        self._programs = programs
        self._say = say

    # ---- looking

    def select(self, names: Iterable[str]) -> tuple[Program, ...]:
        """The programs that `names` mean, groups or programs, in the order of the table; all when there are none."""
        asked = set(names)
        if unknown := asked - {p.name for p in self._programs} - {p.group for p in self._programs}:
            groups = ", ".join(dict.fromkeys(p.group for p in self._programs))
            raise BuildError(f"no program or group {', '.join(sorted(unknown))}; the groups are {groups}")
        return tuple(p for p in self._programs if not asked or asked & {p.name, p.group})

    def path(self, name: str) -> Path:
        """Where a program lies.  Raises BuildError when it is not built."""
        program = self._named(name)
        path = self._path(program)
        if not path.exists():
            raise BuildError(f"{name} is not built; run `.setup/controlplane {program.group}`")
        return path

    def missing(self, *names: str) -> list[str]:
        """Those of the named programs and groups that are not built."""
        return [program.name for program in self.select(names) if not self._path(program).exists()]

    def why_not(self, *names: str) -> str | None:
        """Why the named programs cannot be used, in one line; None when all are built."""
        if not (missing := self.missing(*names)):
            return None
        groups = " ".join(dict.fromkeys(self._named(name).group for name in missing))
        return f"{', '.join(missing)} not built; `.setup/controlplane {groups}` builds what is missing"

    def module_folder(self, program: str) -> Path:
        """Where Go unpacked the source of a program's module, for the files that it carries beside the code."""
        chosen = self._named(program)
        done = subprocess.run(
            ["go", "list", "-mod=readonly", "-f", "{{.Module.Dir}}", chosen.package],
            cwd=self._go / chosen.module,
            env=self._go_environ(chosen),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise BuildError(f"no source of {program}: {done.stderr.strip()}")
        return Path(done.stdout.strip())

    # ---- building

    def build(self, *names: str) -> None:
        """Build what is missing of the named programs and groups (all without names), one after another.

        Raises BuildError naming the program, with the compiler's last lines; what was built before stays.
        """
        wanted = [program for program in self.select(names) if not self._path(program).exists()]
        if not wanted:
            return
        self._check_tools(wanted)
        self.folder.mkdir(parents=True, exist_ok=True)
        started_s = time.monotonic()
        minutes = -(-sum(program.cold_s for program in wanted) // 60)
        listed = ", ".join(program.name for program in wanted)
        self._say(f"from source, about {minutes} min on two cores the first time: {listed}")
        with self._lock():
            for number, program in enumerate(wanted, 1):
                if not self._path(program).exists():  # another process may have built it while this one waited
                    self._build(program, f"{program.name} ({number} of {len(wanted)})", started_s)

    def _build(self, program: Program, label: str, started_s: float) -> None:
        target = self._path(program)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is one rename; a build that is killed leaves only this folder.
        work = Path(tempfile.mkdtemp(prefix=".building-", dir=self.folder))
        command = ["go", "build", "-mod=readonly", "-buildvcs=false", "-trimpath"]
        command += ["-tags", ",".join(program.tags), "-ldflags", program.ldflags, "-o", str(work / program.name)]
        begun_s = time.monotonic()
        self._say(f"{begun_s - started_s:4.0f}s building {label}")
        try:
            with (work / "log").open("w+") as log:
                with subprocess.Popen(
                    [*command, program.package],
                    cwd=self._go / program.module,
                    env=self._go_environ(program),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                ) as process:
                    try:
                        self._await(process, label, begun_s, started_s)
                    except BaseException:
                        process.kill()
                        raise
                if process.returncode:
                    log.seek(0)
                    said = "\n  ".join(log.read().splitlines()[-_LAST_LINES:])
                    raise BuildError(f"go ended with {process.returncode} at {program.name}:\n  {said}")
            os.replace(work / program.name, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        size_mb = target.stat().st_size / 1e6
        took_s = time.monotonic() - begun_s
        self._say(f"{time.monotonic() - started_s:4.0f}s built {program.name} in {took_s:.0f} s, {size_mb:.0f} MB")

    def _await(self, process: subprocess.Popen[bytes], label: str, begun_s: float, started_s: float) -> None:
        while True:
            try:
                process.wait(_PROGRESS_S)
            except subprocess.TimeoutExpired:
                now_s = time.monotonic()
                self._say(f"{now_s - started_s:4.0f}s still building {label}, for {now_s - begun_s:.0f} s now")
            else:
                return

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """One build at a time in a cache.  The kernel frees the lock when its holder ends, however it ends."""
        with (self.folder / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._say("waiting for another build to end")
                fcntl.flock(lock, fcntl.LOCK_EX)
            for left in self.folder.glob(".building-*"):  # the lock is ours, so nobody works there
                shutil.rmtree(left, ignore_errors=True)
            yield

    def _check_tools(self, programs: Iterable[Program]) -> None:
        path = self._environ.get("PATH")
        if shutil.which("go", path=path) is None:
            raise ToolsMissing(f"building needs Go {self._go_needed(programs)} or newer, and no `go` is on the PATH")
        said = subprocess.run(["go", "env", "GOVERSION"], env=self._go_environ(None), capture_output=True, text=True)
        needed = self._go_needed(programs)
        if _version(said.stdout) < _version(needed):
            raise ToolsMissing(
                f"building needs Go {needed} or newer, found {said.stdout.strip() or said.stderr.strip()}"
            )
        for library in dict.fromkeys(library for program in programs for library in program.libraries):
            found = shutil.which("pkg-config", path=path) is not None
            if not found or subprocess.run(["pkg-config", "--exists", library], env=self._environ).returncode:
                raise ToolsMissing(f"building needs {library} and pkg-config: apt-get install {library}-dev pkg-config")

    def _go_needed(self, programs: Iterable[Program]) -> str:
        files = {(self._go / program.module / "go.mod") for program in programs}
        found = [re.search(r"^go (\S+)$", file.read_text(), re.MULTILINE) for file in files]
        return max((match[1] for match in found if match), key=_version)

    def _go_environ(self, program: Program | None) -> dict[str, str]:
        uses_c = program is not None and program.uses_c
        # A person's own flags and workspaces must not change what is built, nor may Go fetch another Go.
        ours = {"GOFLAGS": "", "GOWORK": "off", "GOTOOLCHAIN": "local", "CGO_ENABLED": "1" if uses_c else "0"}
        return {**self._environ, **ours}

    # ---- where

    def _named(self, name: str) -> Program:
        for program in self._programs:
            if program.name == name:
                return program
        raise BuildError(f"no program {name}")

    def _path(self, program: Program) -> Path:
        return self.folder / self._digest(program) / program.name

    def _digest(self, program: Program) -> str:
        """The same for all programs of a module that share their flags: they lie in one folder."""
        module = self._go / program.module
        parts = [(module / name).read_bytes() for name in ("go.mod", "go.sum") if (module / name).exists()]
        parts.append(repr((program.module, program.tags, program.ldflags, program.uses_c)).encode())
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
