"""A real Slurm on this machine: munge, a controller and several nodes with GPUs that are only counted.

Owns the daemons' life: their folder, ports, start, end and crashes.  Does not own what their configuration says
(`lab_config`, `templates`).  Used by `make slurm-up`, the tests and the bench.  Touches nothing outside its folder;
needs root, since GPUs must be character devices (mknod) and jobs of a controller that is not root run as itself.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from slackwater_slurm.core import SlurmMissing, SlurmRefused, SlurmUnavailable, SlurmVersion
from slackwater_slurm.lab_config import LabSettings, cgroup_conf, gres_conf, slurm_conf
from slackwater_slurm.templates.settings import NodeGroup

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "sinfo", "scancel")
# Daemons live in sbin, which is not in every user's PATH.
_SBIN = ("/usr/sbin", "/usr/local/sbin", "/sbin")
_MARK = "SLACKWATER_SLURM_LAB"  # in the environment of every daemon: tells ours from others by more than a number
_MAX_SOCKET_PATH = 107  # sun_path of unix(7), less the zero
_START_S = 20.0
_POLL_S = 0.01
# What would change the commands' behaviour or output, or make a lab inside a job believe that it is that job.
_FOREIGN = ("SLURM", "SBATCH", "SALLOC", "SRUN", "SQUEUE", "SINFO", "SCONTROL", "SCANCEL", "SACCT", "SSTAT", "SPRIO")


def why_not() -> str | None:
    """Why no lab can be started on this machine, in one line; None when one can."""
    missing = [name for name in PROGRAMS if _find(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed; `make slurm-up` installs Slurm as root from Debian's packages"
    if os.geteuid() != 0:
        return "the lab needs root, to make device files that Slurm takes for GPUs"
    try:
        socket.getaddrinfo(_host(), None)
    except OSError as error:
        return f"this machine's name {_host()!r} does not resolve ({error}); add it to /etc/hosts"
    return None


def _host() -> str:
    return socket.gethostname().partition(".")[0]


def _find(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path=os.pathsep.join(_SBIN))


class Lab:
    """One cluster in one folder.  As a context manager it starts, and ends with the block or with this process."""

    def __init__(self, folder: Path, settings: LabSettings | None = None) -> None:
        self.folder = folder.resolve()
        self.settings = settings or LabSettings()
        self.conf = self.folder / "slurm.conf"
        self._children: list[subprocess.Popen[bytes]] = []
        self._guard: subprocess.Popen[bytes] | None = None

    @classmethod
    def attach(cls, folder: Path) -> "Lab":
        """The lab that another process started in `folder`.  Raises SlurmMissing when there is none."""
        try:
            document = json.loads((folder / "lab.json").read_text())
        except FileNotFoundError as error:
            raise SlurmMissing(f"no lab in {folder}; start one with `make slurm-up`") from error
        document["nodes"] = tuple(NodeGroup(**node) for node in document["nodes"])
        document["overrides"] = tuple((key, value) for key, value in document["overrides"])
        document["partitions"] = tuple(document["partitions"])
        return cls(folder, LabSettings(**document))

    # ---- life

    def start(self) -> None:
        """Write the files, start all daemons and return when every node is idle: well under a second.

        Raises SlurmMissing when this machine cannot, SlurmUnavailable with the log's last line when a daemon dies.
        """
        if (reason := why_not()) is not None:
            raise SlurmMissing(reason)
        if len(str(self.folder / "munge/socket")) > _MAX_SOCKET_PATH:
            raise SlurmMissing(f"{self.folder} is too long a path for a socket; give a shorter one")
        if self.pids():
            raise SlurmRefused(f"a lab runs in {self.folder} already; end it with `make slurm-down`")
        self._write_files()
        self._start_munged()
        self.start_controller()
        for name in self.settings.node_names:
            self._spawn(name, "slurmd", "-D", "-N", name, "-f", str(self.conf))
        self.wait_idle()

    def stop(self) -> None:
        """Cancel every job and end every process, also those of a lab whose controller is dead.  Keeps the folder."""
        if self.is_alive("slurmctld"):
            with contextlib.suppress(SlurmUnavailable, SlurmRefused):  # what does not answer is killed below
                self.cancel_all()
        for name in ("slurmctld", *self.settings.node_names, "munged"):
            if (pid := self.pid(name)) is not None:
                os.kill(pid, signal.SIGTERM)
        self._await_end(lambda: not self.pids(), 3.0)
        # Step daemons and jobs that hung, and their children: a few rounds, as each may have forked meanwhile.
        while pids := self.pids():
            for pid in pids:
                _kill(pid)
            self._await_end(lambda: not self.pids(), 1.0)
        for child in self._children:
            child.wait()
        self._children.clear()
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait()
            self._guard = None

    def __enter__(self) -> "Lab":
        # The guard reads until this process ends, however it ends, and then stops what is left.
        code = "import sys, pathlib; from slackwater_slurm.lab import Lab; sys.stdin.read(); "
        code += "folder = pathlib.Path(sys.argv[1]); (folder / 'lab.json').exists() and Lab.attach(folder).stop()"
        self._guard = subprocess.Popen(
            [sys.executable, "-c", code, str(self.folder)], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- crashes and returns

    def kill(self, name: str) -> None:
        """SIGKILL one daemon, `slurmctld` or a node's name, and return when it is gone.  Its jobs go on."""
        pid = self.pid(name)
        if pid is None:
            raise SlurmRefused(f"{name} is not running in {self.folder}")
        os.kill(pid, signal.SIGKILL)
        self._await_end(lambda: not self.is_alive(name), 5.0)

    def crash_node(self, name: str) -> None:
        """Kill a node as a power cut would: its daemon, step daemons and jobs at once."""
        jobs = {pid for pid in self.pids() if _environ(pid).get("SLURMD_NODENAME") == name}
        steps = {_parent(pid) for pid in jobs} & set(self.pids())  # whose names do not tell the node
        self.kill(name)
        for pid in sorted(steps) + sorted(jobs):
            _kill(pid)
        self._await_end(lambda: not (jobs | steps) & set(self.pids()), 5.0)

    def start_controller(self) -> None:
        """Start slurmctld, after a `kill` too, and return when it answers."""
        self._spawn("slurmctld", "slurmctld", "-D", "-f", str(self.conf))
        self._wait(lambda: "UP" in self._try("scontrol", "ping"), "slurmctld", "slurmctld does not answer")

    def start_node(self, name: str) -> None:
        """Start a node's slurmd after a `kill`."""
        self._spawn(name, "slurmd", "-D", "-N", name, "-f", str(self.conf))

    def wait_idle(self) -> None:
        """Return when every node is idle."""

        def all_idle() -> bool:
            lines = self._try("sinfo", "-h", "-N", "-O", "NodeList:60,StateLong:20").splitlines()
            states = {tuple(line.split()) for line in lines}
            return states == {(name, "idle") for name in self.settings.node_names}

        self._wait(all_idle, self.settings.node_names[0], "nodes are not idle")

    def reset(self) -> None:
        """Bring the lab back to four idle nodes and nothing else, whatever was done to it."""
        if not self.is_alive("slurmctld"):
            self.start_controller()
        for name in self.settings.node_names:
            if not self.is_alive(name):
                self.start_node(name)
        self.cancel_all(grace_s=0.5)
        for pid in self._job_pids():  # of jobs that a killed controller has forgotten
            _kill(pid)
        for line in self.run("scontrol", "show", "reservation", "-o").splitlines():
            if line.startswith("ReservationName="):
                self.run("scontrol", "delete", line.split()[0])
        for line in set(self.run("sinfo", "-h", "-N", "-O", "NodeList:60,StateLong:20").splitlines()):
            name, state = line.split()
            if state.rstrip("*").startswith(("drain", "down")):
                self._try("scontrol", "update", f"NodeName={name}", "State=RESUME")
        for line in self.run("scontrol", "show", "partition", "-o").splitlines():
            if "State=UP" not in line.split():
                self.run("scontrol", "update", line.split()[0], "State=UP")
        self.wait_idle()

    # ---- what a user does

    def environment(self) -> dict[str, str]:
        """This process's environment, pointed at the lab and at nothing else of Slurm."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
        return {**kept, "SLURM_CONF": str(self.conf), "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}

    def run(self, *command: str, timeout_s: float = 15.0, input: str | None = None) -> str:
        """Run one Slurm command in the lab's folder and return what it printed.

        Raises SlurmUnavailable when it takes longer, SlurmRefused with its own words when it fails.
        """
        try:
            done = subprocess.run(
                command,
                env=self.environment(),
                cwd=self.folder,  # where a job's output goes unless it says otherwise
                input=input,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise SlurmUnavailable(f"{command[0]} gave no answer within {timeout_s:g} s") from error
        if done.returncode != 0:
            said = " ".join((done.stderr or done.stdout).split())
            raise SlurmRefused(f"{command[0]} ended with {done.returncode}: {said}")
        return done.stdout

    def submit(self, script: str, *options: str) -> int:
        """sbatch a script's text; returns the job id."""
        printed = self.run("sbatch", "--parsable", *options, input=script)
        return int(printed.strip().partition(";")[0])

    def cancel_all(self, grace_s: float = 3.0) -> None:
        """Cancel every job and return when none is left; those that do not leave within `grace_s` are killed."""

        def ids() -> list[str]:
            return sorted(set(self.run("squeue", "-h", "-a", "-o", "%A").split()))

        if left := ids():
            self._try("scancel", *left)  # fails for one that has ended meanwhile
            self._await_end(lambda: not ids(), grace_s)
        # A job that completes takes no more signals through Slurm, so its processes are ended as what they are.
        for pid in self._job_pids() if ids() else []:
            _kill(pid)
        self._await_end(lambda: not ids(), 10.0)
        if left := ids():
            raise SlurmUnavailable(f"jobs {', '.join(left)} do not end")

    def saved_s(self) -> float:
        """When the controller last wrote its jobs to disk, in seconds since the epoch; 0 before it ever did."""
        state = self.folder / "state/job_state"
        return state.stat().st_mtime if state.exists() else 0.0

    # ---- processes

    def pids(self) -> list[int]:
        """Every process of this lab: daemons, step daemons and jobs."""
        return [pid for pid in _all_pids() if self._is_ours(pid)]

    def _job_pids(self) -> list[int]:
        return [pid for pid in self.pids() if "SLURM_JOB_ID" in _environ(pid)]

    def pid(self, name: str) -> int | None:
        """A daemon's process id while it runs: `munged`, `slurmctld` or a node's name."""
        try:
            pid = int((self.folder / "run" / f"{name}.pid").read_text())
        except FileNotFoundError:
            return None
        return pid if self._is_ours(pid) else None

    def is_alive(self, name: str) -> bool:
        return self.pid(name) is not None

    def _is_ours(self, pid: int) -> bool:
        environ = _environ(pid)
        is_job = "SLURM_JOB_ID" in environ and environ.get("SLURM_CONF") == str(self.conf)
        return is_job or environ.get(_MARK) == str(self.folder)

    def _spawn(self, name: str, program: str, *arguments: str) -> None:
        path = _find(program)
        assert path is not None, "why_not() was asked"
        environment = {**self.environment(), _MARK: str(self.folder)}
        with (self.folder / "log" / f"{name}.out").open("ab") as out:
            child = subprocess.Popen(
                [path, *arguments],
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._children.append(child)
        # Its mark is readable only a moment after exec; before that it would pass for dead.
        while not self._is_ours(child.pid) and child.poll() is None:
            time.sleep(0.001)
        (self.folder / "run" / f"{name}.pid").write_text(str(child.pid))

    def _start_munged(self) -> None:
        folder = self.folder / "munge"
        key = folder / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self._spawn(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={folder / 'socket'}",
            f"--log-file={self.folder / 'log/munged.log'}",
            f"--pid-file={folder / 'pid'}",
            f"--seed-file={folder / 'seed'}",
        )
        self._wait((folder / "socket").exists, "munged", "munged opened no socket")

    # ---- files

    def _write_files(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("state", "spool", "run", "log", "munge", "dev"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir()
        self.folder.chmod(0o755)  # munged refuses a socket that others could replace
        for node in self.settings.node_names:
            (self.folder / "spool" / node).mkdir()
        for index in range(max(node.num_gpus for node in self.settings.nodes)):
            # The null device under another name: what slurmd takes for a GPU must be a character device.
            os.mknod(self.folder / f"dev/nvidia{index}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        version = SlurmVersion.parse(subprocess.check_output([str(_find("slurmctld")), "-V"], text=True))
        ports = dict(
            zip(("slurmctld", *self.settings.node_names), free_ports(1 + len(self.settings.nodes)), strict=True)
        )
        self.conf.write_text(slurm_conf(self.settings, version, str(self.folder), _host(), ports))
        (self.folder / "gres.conf").write_text(gres_conf(self.settings, str(self.folder)))
        (self.folder / "cgroup.conf").write_text(cgroup_conf(version))
        (self.folder / "lab.json").write_text(json.dumps(asdict(self.settings), indent=1))

    # ---- waiting

    def _try(self, *command: str) -> str:
        """What a command printed, or nothing when it failed: for questions that are asked again."""
        try:
            return self.run(*command, timeout_s=3.0)
        except (SlurmRefused, SlurmUnavailable):
            return ""

    def _wait(self, is_done: Callable[[], bool], name: str, complaint: str) -> None:
        deadline_s = time.monotonic() + _START_S
        while not is_done():
            if not self.is_alive(name) or time.monotonic() > deadline_s:
                raise SlurmUnavailable(f"{complaint}: {self._last_words(name)}")
            time.sleep(_POLL_S)

    def _await_end(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_done() and time.monotonic() < deadline_s:
            for child in self._children:
                child.poll()  # reap, or it stays in the process table
            time.sleep(_POLL_S)

    def _last_words(self, name: str) -> str:
        for path in (self.folder / f"log/{name}.log", self.folder / f"log/{name}.out"):
            lines = path.read_text().splitlines() if path.exists() else []
            if wrong := [line for line in lines if "error" in line or "fatal" in line] or lines:
                return "; ".join(wrong[-3:])  # the last is often only that it gives up
        return "it said nothing"


def free_ports(count: int) -> list[int]:
    """TCP ports of 127.0.0.1 that nobody listens on just now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _environ(pid: int) -> Mapping[str, str]:
    """A process's environment at its start; empty for one that is gone, a zombie or not ours to read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in raw.decode(errors="surrogateescape").split("\0") if entry)
    return {key: value for key, _, value in pairs}


def _parent(pid: int) -> int:
    """A process's parent; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(status.partition("PPid:")[2].split()[0])


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
