"""The network namespace of one test cluster: its addresses, its way to the machine, and its end.

A cluster's servers, nodes, pods and firewall rules all live in one namespace, so they touch nothing of the machine
and several clusters fit side by side.  A veth pair leads from the machine to it: tests use the API server and the
pods by the same addresses as the cluster itself.  All addresses are of 198.18.0.0/15, which the internet never
routes (RFC 2544), so they hide nothing that the machine may want to reach.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

NAMESPACES = Path("/run/netns")
PREFIX = "slackwater"
# One third octet a cluster, four of the pods' octets each.
MAX_CLUSTERS = 64
MAX_NODES = 4
PROGRAMS = ("ip", "nsenter", "unshare", "mount")
_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-(\d+)")


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of the cluster with this number; node and pod ranges are counted from 0."""

    index: int

    @property
    def api(self) -> str:
        return f"198.18.{self.index}.1"

    @property
    def machine(self) -> str:
        """The address of the machine outside, as the cluster sees it."""
        return f"198.18.{self.index}.254"

    @property
    def pods(self) -> str:
        """The range that holds the pods of every node."""
        return f"198.19.{self.index * MAX_NODES}.0/22"

    def node(self, number: int) -> str:
        return f"198.18.{self.index}.{10 + number}"

    def node_pods(self, number: int) -> str:
        return f"198.19.{self.index * MAX_NODES + number}.0/24"


class NetworkNamespace:
    """A context manager that makes a namespace and at its end ends what still runs in it and removes it."""

    def __init__(self) -> None:
        self.name = ""
        self.addresses = Addresses(0)

    @property
    def enter(self) -> tuple[str, ...]:
        """The prefix of a command that shall run in it (`ip netns exec` would hide the cgroup mounts)."""
        return ("nsenter", f"--net={NAMESPACES / self.name}", "--")

    def __enter__(self) -> Self:
        remove_stale()
        index = self._claim()
        try:
            self._connect(index)
        except BaseException:
            remove(self.name)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        remove(self.name)

    def _claim(self) -> int:
        """Take the first free number: making its veth device fails when another process has that number."""
        for index in range(MAX_CLUSTERS):
            name = f"{PREFIX}-{index}-{os.getpid()}-{_started(os.getpid())}"
            if _device(index) in os.listdir("/sys/class/net") or (NAMESPACES / name).exists():
                continue
            _run("ip", "netns", "add", name)
            try:
                _run("ip", "link", "add", _device(index), "type", "veth", "peer", "name", "outside", "netns", name)
            except OSError:
                remove(name)
                continue
            self.name, self.addresses = name, Addresses(index)
            return index
        raise OSError(f"all {MAX_CLUSTERS} test networks are in use; see `ip netns list`")

    def _connect(self, index: int) -> None:
        addresses = self.addresses
        _run(*self.enter, "ip", "link", "set", "lo", "up")
        for address in (addresses.api, *(addresses.node(number) for number in range(MAX_NODES))):
            _run(*self.enter, "ip", "address", "add", f"{address}/32", "dev", "lo")
        _run(*self.enter, "ip", "link", "set", "outside", "up")
        _run(*self.enter, "ip", "route", "add", f"{addresses.machine}/32", "dev", "outside", "src", addresses.api)
        # The servers look for the interface of the default route to find their own address.
        _run(*self.enter, "ip", "route", "add", "default", "dev", "lo")
        _run(*self.enter, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        device = _device(index)
        _run("ip", "address", "add", f"{addresses.machine}/24", "dev", device)
        _run("ip", "link", "set", device, "up")
        _run("ip", "route", "add", addresses.pods, "via", addresses.api, "dev", device)


def why_not() -> str | None:
    """Why no network namespace can be made here, in words for a skipped test; None when it can."""
    if os.geteuid() != 0:
        return "real nodes need root"
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"real nodes need the programs {', '.join(missing)}; .setup/controlplane nodes installs them"
    # A try in a namespace that ends with the command: whether namespaces, devices and routes are allowed at all.
    trial = "ip link add trial0 type veth peer name trial1 && mount --make-rshared /"
    answer = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", trial],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if answer.returncode == 0 else f"no namespaces with veth devices here: {answer.stderr.strip()}"


def remove_stale() -> list[str]:
    """Remove the namespaces whose makers are gone, with what still runs in them; their names."""
    gone = []
    for path in NAMESPACES.glob(f"{PREFIX}-*") if NAMESPACES.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and _started(int(match[2])) != int(match[3]):
            remove(path.name)
            gone.append(path.name)
    return gone


def remove(name: str) -> None:
    """End what runs in a namespace of ours, then remove it; its devices, routes and rules go with it."""
    path = NAMESPACES / name
    try:
        inode = path.stat().st_ino
    except FileNotFoundError:
        return
    _end_members(inode)
    # A veth pair goes at once by its outer end, while a namespace may linger until its last socket is closed.
    if match := _NAME.fullmatch(name):
        subprocess.run(["ip", "link", "delete", _device(int(match[1]))], capture_output=True, check=False)
    try:
        _run("ip", "netns", "delete", name)
    except OSError:
        if path.exists():  # else another session that found it stale was faster
            raise


def members(inode: int) -> list[int]:
    """The processes whose network namespace has this inode number."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "ns/net").stat().st_ino == inode:
                    found.append(int(entry.name))
    return found


def _end_members(inode: int) -> None:
    for wait_s, number in ((2.0, signal.SIGTERM), (5.0, signal.SIGKILL)):
        for pid in members(inode):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        until = time.monotonic() + wait_s
        while (left := members(inode)) and time.monotonic() < until:
            time.sleep(0.05)
        if not left:
            return


def _device(index: int) -> str:
    return f"slkwtr{index}"


def _started(pid: int) -> int:
    """When a process started, in ticks since boot, 0 when there is none: with that, an id names one process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def _run(*argv: str) -> None:
    answer = subprocess.run(argv, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise OSError(f"{' '.join(argv)}: {answer.stderr.strip() or answer.returncode}")
