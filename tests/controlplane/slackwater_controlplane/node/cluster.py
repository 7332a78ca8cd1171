"""`NodeCluster`: a control plane with real nodes, service addresses and DNS, all in one network namespace.

Owns the order of starting and ending; the parts are the ControlPlane, Node, proxy and dns.  Used by the `node_cluster`
fixture, by end-to-end tests and by measurements.
"""

import logging
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from slackwater_controlplane import dns, leftovers, netns, oci, proxy
from slackwater_controlplane.build import Programs
from slackwater_controlplane.client import Admin, Object
from slackwater_controlplane.cluster import ControlPlane
from slackwater_controlplane.errors import StartError
from slackwater_controlplane.flags import SERVERS, Settings
from slackwater_controlplane.leftovers import Record
from slackwater_controlplane.netns import NetworkNamespace
from slackwater_controlplane.node.cell import Cell, remove_cgroups
from slackwater_controlplane.node.node import NO_FOLDERS, PACKAGE_ROOT, Folders, Node, NodeSpec, Place, start_together

logger = logging.getLogger(__name__)

PRODUCT = "nvidia.com/gpu.product"
SITE = "topology.kubernetes.io/region"
# Two flavours at one site: what a pool of ours is made of at the least.
TWO_FLAVORS = (
    NodeSpec("h200-0", 0, {PRODUCT: "NVIDIA-H200", SITE: "site-a"}),
    NodeSpec("rtx5090-0", 1, {PRODUCT: "NVIDIA-GeForce-RTX-5090", SITE: "site-a"}),
)
NODE_PROGRAMS = (
    *("kubelet", "containerd", "containerd-shim-runc-v2", "ctr", "runc", "ptp", "loopback", "host-local"),
    *("kube-proxy", "coredns", "kubectl"),
)
BUSYBOX = (Path("/bin/busybox"), Path("/usr/bin/busybox"))
READY_S = 60.0  # about 5 s on an idle machine; tests share it with builds
_POLL_S = 0.05
# Run by the next session when this one was killed, so it must find this package by itself.
_UNDO = """
import sys
sys.path.insert(0, sys.argv[1])
from slackwater_controlplane.node.cluster import remove_rest
remove_rest(sys.argv[2])
"""


def why_not(programs: Programs) -> str | None:
    """Why no real nodes can be had here, in one line; None when they can."""
    if (reason := netns.why_not()) is not None:
        return reason
    if _busybox() is None:
        return "real nodes need a static busybox; `.setup/controlplane nodes` installs busybox-static"
    if not any(os.access(folder / "nft", os.X_OK) for folder in (Path("/usr/sbin"), Path("/usr/bin"), Path("/sbin"))):
        return "real nodes need nft; `.setup/controlplane nodes` installs nftables"
    return programs.why_not(*SERVERS, *NODE_PROGRAMS)


class NodeCluster:
    """A context manager; afterwards no process, mount, namespace, firewall rule or cgroup of it is left."""

    def __init__(
        self,
        programs: Programs,
        runs: Path,
        specs: Sequence[NodeSpec] = TWO_FLAVORS,
        *,
        settings: Settings | None = None,
        images: Sequence[Path] = (),
        folders: Folders = NO_FOLDERS,
    ) -> None:
        """runs: folder of the state files by which a killed run's rest is ended.   images: loaded on every node.

        folders: what every node sees of this machine at fixed paths.
        """
        self.programs = programs
        self.specs = tuple(specs)
        self.network = NetworkNamespace()
        self.nodes: dict[str, Node] = {}
        self.started_in_s: dict[str, float] = {}
        self._runs = runs
        self._settings = settings
        self._images = tuple(images)
        self._folders = folders
        self._stack = ExitStack()

    @property
    def admin(self) -> Admin:
        return self.plane.admin

    def __enter__(self) -> Self:
        leftovers.sweep(self._runs)
        begun_s = time.monotonic()
        with ExitStack() as stack:
            # Sockets lie below it, and a socket's path has 108 bytes at most: not pytest's own folder.
            self.folder = Path(tempfile.mkdtemp(prefix="slkw-"))
            record = Record.create(self._runs, self.folder, "nodes")
            stack.callback(record.end)
            undo: list[str] = []
            stack.callback(lambda: record.drop_undo(*undo) if undo else None)
            stack.enter_context(self.network)
            undo += [sys.executable, "-c", _UNDO, str(PACKAGE_ROOT), self.network.name]
            record.add_undo(*undo)
            self.plane = ControlPlane(
                self.folder / "plane",
                self.programs,
                record,
                address=self.network.addresses.api,
                enter=self.network.enter,
                settings=self._settings,
            )
            stack.enter_context(self.plane)
            self._note("control plane", begun_s)
            self._start_nodes(stack)
            self._note("nodes", begun_s)
            self._start_services(stack)
            self._note("all", begun_s)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def kubectl(
        self, *words: str, stdin: str | None = None, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator; its exit code is for the caller to judge."""
        return subprocess.run(
            [self.programs.path("kubectl"), f"--kubeconfig={self.plane.kubeconfig()}", *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def load(self, *images: Path) -> None:
        """Load image files on every node."""
        for node in self.nodes.values():
            node.load(*images)

    def wait_ready(self, name: str, timeout_s: float = READY_S) -> Object:
        """The Node object, once it is Ready with all its GPUs."""
        node = self.nodes[name]

        def is_ready(found: Object) -> bool:
            capacity = found["status"].get("allocatable", {}).get(node.spec.resource, "0")
            return is_node_ready(found) and capacity == str(node.spec.gpus)

        deadline_s = time.monotonic() + timeout_s
        while True:
            found = self.admin.find("nodes", name)
            if found is not None and is_ready(found):
                return found
            node.cell.check("kubelet", "containerd")
            if time.monotonic() > deadline_s:
                raise StartError(f"{name} is not Ready after {timeout_s:g} s: {node.cell.tail('kubelet')}")
            time.sleep(_POLL_S)

    def _start_nodes(self, stack: ExitStack) -> None:
        busybox = _busybox()
        assert busybox is not None, "why_not was asked first"
        pause = oci.busybox_image(busybox, self.folder / "busybox.tar")
        for spec in self.specs:
            node = Node(spec, self._place(spec), self.programs, images=(pause, *self._images), folders=self._folders)
            self.nodes[spec.name] = node
            stack.callback(node.remove)
        start_together(list(self.nodes.values()))
        for name in self.nodes:
            self.wait_ready(name)

    def _start_services(self, stack: ExitStack) -> None:
        """Service addresses and DNS, in a cell of their own."""
        address = self.network.addresses.api
        for body in dns.objects(address):
            self.admin.apply(body)
        self.services = Cell(f"{self.network.name}.services", self.folder / "services", enter=self.network.enter)
        stack.enter_context(self.services)
        corefile = dns.write_corefile(self.folder / "Corefile", self.plane.kubeconfig(dns.USER), address)
        self.services.start(dns.NAME, dns.command(self.programs.path(dns.NAME), corefile))
        self.services.start(
            proxy.NAME,
            proxy.command(
                self.programs.path(proxy.NAME),
                self.plane.kubeconfig(proxy.USER),
                node=self.specs[0].name,
                address=address,
            ),
        )
        for name, url in ((dns.NAME, dns.ready_url(address)), (proxy.NAME, proxy.health_url(address))):
            self._await(name, lambda url=url: _answers(url))  # type: ignore[misc]  # the default binds the loop's value

    def _await(self, name: str, is_ready: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + READY_S
        while not is_ready():
            self.services.check(name)
            if time.monotonic() > deadline_s:
                raise StartError(f"{name} is not ready after {READY_S:g} s; its log ends:\n{self.services.tail(name)}")
            time.sleep(_POLL_S)

    def _place(self, spec: NodeSpec) -> Place:
        addresses = self.network.addresses
        address = addresses.node(spec.number)
        return Place(
            folder=self.folder / spec.name,
            cgroup=f"{self.network.name}.{spec.name}",
            enter=self.network.enter,
            address=address,
            pod_range=addresses.node_pods(spec.number),
            kubeconfig=self.plane.kubeconfig(f"system:node:{spec.name}", ("system:nodes",)),
            client_ca=self.plane.ca_file,
            serving=self.plane.authority.server(f"kubelet-{spec.name}", (address, spec.name)),
        )

    def _note(self, part: str, begun_s: float) -> None:
        self.started_in_s[part] = time.monotonic() - begun_s
        logger.info("%s ready after_s=%.1f", part, self.started_in_s[part])


def remove_rest(network: str) -> None:
    """Remove what a killed run left of its network and cgroups; the nodes' processes ended with their owner."""
    netns.remove(network)
    remove_cgroups(f"{network}.*")


def is_node_ready(node: Object) -> bool:
    """Whether a Node object says Ready."""
    return any(
        one["type"] == "Ready" and one["status"] == "True" for one in node.get("status", {}).get("conditions", [])
    )


def container_state(pod: Object, container: str = "main") -> Mapping[str, Object]:
    """A container's state by the pod's status: `waiting`, `running` or `terminated` with its facts; {} when unknown."""
    for status in pod.get("status", {}).get("containerStatuses", []):
        if status["name"] == container:
            state: Mapping[str, Object] = status["state"]
            return state
    return {}


def _busybox() -> Path | None:
    return next((path for path in BUSYBOX if path.exists() and oci.is_static(path)), None)


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the address is this machine's
    try:
        with opener.open(url, timeout=1.0):
            return True
    except (OSError, urllib.error.URLError):
        return False
