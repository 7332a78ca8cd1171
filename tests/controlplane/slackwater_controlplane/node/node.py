"""One real node: containerd, runc, a GPU device plug-in and a kubelet, together in a cell.

Owns their start, their end, and what breaks in between (`kill_kubelet`).  The node's folder holds everything that it
writes, but for its sockets under /run and its pods' network, which the cell's end takes along.  Who makes the API
server's credentials and waits for the node to be Ready is cluster.py.
"""

import concurrent.futures
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from slackwater_controlplane.build import Programs
from slackwater_controlplane.certs import Pair
from slackwater_controlplane.node import config
from slackwater_controlplane.node.cell import Cell, CellError, Mounts
from slackwater_controlplane.node.device_plugin import Devices
from slackwater_controlplane.processes import ProcessName

PACKAGE_ROOT = Path(__file__).parents[2]
CONTAINERD_READY_S = 20.0
IMPORT_TIMEOUT_S = 300.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """What a node is to the cluster.

    number: from 0, unique in its cluster; its address and its pods' range follow from it.   gpus: of `resource`.
    """

    name: str
    number: int
    labels: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 8
    resource: str = "nvidia.com/gpu"

    @property
    def device_ids(self) -> tuple[str, ...]:
        return tuple(f"GPU-{self.name}-{number}" for number in range(self.gpus))


@dataclass(frozen=True, slots=True)
class Folders:
    """Folders of the machine at fixed paths of a node, for volumes of `hostPath`: (source, path on the node)."""

    written: tuple[tuple[Path, str], ...] = ()
    read: tuple[tuple[Path, str], ...] = ()


NO_FOLDERS = Folders()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node lives: its network, its cgroup, and how it reaches the API server as itself.

    enter: prefix that joins the network namespace.   cgroup: unique on the machine.   serving: the certificate with
    which the kubelet answers the API server.
    """

    folder: Path
    cgroup: str
    enter: tuple[str, ...]
    address: str
    pod_range: str
    kubeconfig: Path
    client_ca: Path
    serving: Pair


class Node:
    """A node's processes; a context manager, or `start` and `stop`."""

    def __init__(
        self,
        spec: NodeSpec,
        place: Place,
        programs: Programs,
        *,
        images: Sequence[Path] = (),
        folders: Folders = NO_FOLDERS,
    ) -> None:
        """images: tar files that are loaded before the kubelet starts; the pause image must be among them."""
        self.spec = spec
        self.place = place
        self.paths = config.Paths(place.folder)
        self._programs = programs
        self._images = tuple(images)
        self.devices = Devices(
            self.paths.device_plugins, self.paths.pod_resources, resource=spec.resource, ids=spec.device_ids
        )
        self.cell = Cell(
            place.cgroup,
            place.folder,
            enter=place.enter,
            mounts=Mounts(
                # One fixed path for all kubelets of a machine, whatever --root-dir says: hence a namespace each.
                binds=((self.paths.kubelet, config.KUBELET_ROOT), *folders.written),
                views=folders.read,
                scratch=("/run", "/var/log", "/var/lib/cni"),
                settings=tuple((self._setting(name), f"/proc/sys/{name}") for name in config.KERNEL_SETTINGS),
            ),
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything and return when the kubelet is started; the API server says when the node is Ready."""
        self._write_files()
        self.cell.open()
        try:
            self._start_containerd()
            self.load(*self._images)
            if self.spec.gpus:
                self.cell.start(
                    "device-plugin",
                    self.devices.argv(f"{config.KUBELET_ROOT}/device-plugins"),
                    {"PYTHONPATH": str(PACKAGE_ROOT)},
                )
            self.restart_kubelet()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process of the node at once, containers included, as a power cut would; start() brings it back."""
        self.cell.close()

    def remove(self) -> None:
        """Stop and delete what the node wrote."""
        self.stop()
        shutil.rmtree(self.place.folder, ignore_errors=True)

    def kill_kubelet(self) -> None:
        """Kill the kubelet alone: containers run on, and the node's lease is renewed no more."""
        self.cell.stop("kubelet", sig=signal.SIGKILL)

    def restart_kubelet(self) -> None:
        """Start a kubelet, after ending the one that runs."""
        self.cell.stop("kubelet", wait_s=10.0)
        # The plug-in must tell the new kubelet's socket from the old one's, and the kubelet needs the folder.
        (self.paths.device_plugins / "kubelet.sock").unlink(missing_ok=True)
        labels = ",".join(f"{key}={value}" for key, value in self.spec.labels.items())
        self.cell.start(
            "kubelet",
            [
                self._programs.path("kubelet"),
                f"--config={self.place.folder / 'kubelet.yaml'}",
                f"--kubeconfig={self.place.kubeconfig}",
                f"--hostname-override={self.spec.name}",
                f"--node-ip={self.place.address}",
                f"--root-dir={config.KUBELET_ROOT}",
                f"--cert-dir={self.place.folder / 'kubelet-certs'}",
                f"--node-labels={labels}",
                "--v=2",
            ],
        )

    def load(self, *images: Path) -> None:
        """Load image files (OCI layouts in tar files); a name that is there already is replaced."""
        for image in images:
            load(self._programs, self.paths.containerd_socket, image)

    def ctr(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run containerd's own client in the namespace of Kubernetes."""
        return _ctr(self._programs, self.paths.containerd_socket, *words)

    def processes(self) -> list[ProcessName]:
        """Every process of the node as the machine counts them, containers included; for leak checks and memory."""
        return [name for pid in _descendants(self.cell.pid) if (name := ProcessName.of(pid)) is not None]

    def _start_containerd(self) -> None:
        containerd = self._programs.path("containerd")
        # containerd looks for its shim beside itself only by way of the PATH.
        path = f"{containerd.parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        self.paths.containerd_socket.unlink(missing_ok=True)
        self.cell.start("containerd", [containerd, "--config", self.place.folder / "containerd.toml"], {"PATH": path})
        _await(
            lambda: self.paths.containerd_socket.exists() and self.ctr("version").returncode == 0,
            CONTAINERD_READY_S,
            lambda: f"containerd of {self.spec.name} does not answer; its log ends:\n{self.cell.tail('containerd')}",
            lambda: self.cell.check("containerd"),
        )

    def _write_files(self) -> None:
        for folder in (self.paths.device_plugins, self.paths.cni, self.place.folder / "settings"):
            folder.mkdir(parents=True, exist_ok=True)
        for name, value in config.KERNEL_SETTINGS.items():
            self._setting(name).write_text(value)
        text = config.containerd(
            self.paths,
            runc=self._programs.path("runc"),
            cni_plugins=self._programs.path("ptp").parent,
            snapshotter=config.snapshotter(self.place.folder.resolve(), Path("/proc/mounts").read_text()),
        )
        (self.place.folder / "containerd.toml").write_text(text)
        (self.paths.cni / "10-pods.conflist").write_text(config.network(self.place.pod_range))
        text = config.kubelet(
            self.paths, address=self.place.address, client_ca=self.place.client_ca, serving=self.place.serving
        )
        (self.place.folder / "kubelet.yaml").write_text(text)
        self.devices.write()

    def _setting(self, name: str) -> Path:
        return self.place.folder / "settings" / name.replace("/", ".")


def load(programs: Programs, socket: Path, image: Path) -> None:
    """Load an image file on the node whose containerd has this socket; any process may, not its owner alone."""
    answer = _ctr(programs, socket, "images", "import", str(image))
    if answer.returncode != 0:
        raise CellError(f"{socket.parent.name} could not load {image}: {answer.stderr.strip()}")


def _ctr(programs: Programs, socket: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [programs.path("ctr"), "-a", socket, "-n", "k8s.io", *words],
        capture_output=True,
        text=True,
        timeout=IMPORT_TIMEOUT_S,
        check=False,
    )


def start_together(nodes: Sequence[Node]) -> None:
    """Start nodes at once; when one fails all are stopped, and its error raised."""
    with concurrent.futures.ThreadPoolExecutor(len(nodes)) as pool:
        attempts = [pool.submit(node.start) for node in nodes]
        concurrent.futures.wait(attempts)
    for attempt in attempts:
        if (error := attempt.exception()) is not None:
            for node in nodes:
                node.stop()
            raise error


def _await(
    is_so: Callable[[], bool], timeout_s: float, complaint: Callable[[], str], check: Callable[[], None]
) -> None:
    until = time.monotonic() + timeout_s
    while not is_so():
        check()
        if time.monotonic() > until:
            raise CellError(complaint())
        time.sleep(_POLL_S)


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in children:
            found.extend(_descendants(int(child)))
    return found
