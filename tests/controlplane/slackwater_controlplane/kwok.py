"""Nodes and pods without processes: kwok on a control plane, with GPUs that are only counted.

Owns kwok's process and the fake nodes.  What they do is `stages`.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from slackwater_controlplane.client import Object
from slackwater_controlplane.cluster import ControlPlane
from slackwater_controlplane.errors import StartError
from slackwater_controlplane.servers import Server
from slackwater_controlplane.stages import DOWN, stages_file

FAKE = "kwok.x-k8s.io/node"
PRODUCT = "nvidia.com/gpu.product"
GPU = "nvidia.com/gpu"
T = TypeVar("T")

_START_S = 60.0
_PARALLEL = 8
_POLL_S = 0.1


class Kwok:
    """kwok beside one control plane.  As a context manager it starts, and ends with the block."""

    def __init__(self, cluster: ControlPlane, *, parallel: int = 8) -> None:
        self.cluster = cluster
        self._parallel = parallel
        self._names: list[str] = []

    # ---- life

    def start(self) -> None:
        """Start kwok and return when it says that it is ready."""
        cluster = self.cluster
        config = cluster.folder / "kwok.yaml"
        config.write_text(stages_file(self._parallel))
        self._port = cluster.place.free_ports(1)[0]
        command = [
            str(cluster.programs.path("kwok")),
            f"--kubeconfig={cluster.kubeconfig('kwok', ('system:masters',))}",
            f"--config={config}",
            "--manage-all-nodes=false",
            f"--manage-nodes-with-annotation-selector={FAKE}=fake",
            "--node-lease-duration-seconds=40",
            f"--node-ip={cluster.place.address}",
            f"--server-address={cluster.place.address}:{self._port}",
        ]
        self.server = Server("kwok", command, folder=cluster.folder, record=cluster.record, enter=cluster.place.enter)
        self.server.start()
        self.server.wait(self._is_ready, _START_S)

    def stop(self) -> None:
        self.server.stop()

    def __enter__(self) -> "Kwok":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _is_ready(self) -> bool:
        answer = self.cluster.place.get(f"http://{self.cluster.place.address}:{self._port}/healthz")
        return answer is not None and answer[0] == 200

    # ---- nodes

    def add_nodes(
        self,
        count: int,
        *,
        prefix: str = "h200",
        product: str = "NVIDIA-H200",
        gpus: int = 8,
        labels: Mapping[str, str] | None = None,
        is_tainted: bool = False,
    ) -> list[str]:
        """Create nodes `PREFIX-N` and return their names when all are ready and pods may go there.

        labels: besides the GPU's product.   is_tainted: pods must tolerate `kwok.x-k8s.io/node`, beside real nodes.
        """
        first = sum(name.rpartition("-")[0] == prefix for name in self._names)
        names = [f"{prefix}-{number}" for number in range(first, first + count)]
        bodies = [_node(name, product, gpus, labels or {}, is_tainted) for name in names]
        self._names += names
        self._each(self.cluster.admin.create, bodies)
        self._await_usable(set(names))
        return names

    def _await_usable(self, names: set[str]) -> None:
        deadline_s = time.monotonic() + _START_S
        while left := names - {one["metadata"]["name"] for one in self.cluster.admin.list("nodes") if _is_usable(one)}:
            if time.monotonic() > deadline_s:
                raise StartError(f"{len(left)} of {len(names)} fake nodes are not ready, {min(left)} for one")
            time.sleep(_POLL_S)

    def remove_nodes(self, names: Iterable[str] | None = None) -> None:
        """Remove nodes, all that were added here by default, with whatever pods they have."""
        gone = list(self._names if names is None else names)
        admin = self.cluster.admin
        on_them = [pod for pod in admin.list("pods") if pod["spec"].get("nodeName") in set(gone)]
        self._each(
            lambda pod: admin.delete("pods", pod["metadata"]["name"], pod["metadata"]["namespace"], grace_s=0), on_them
        )
        self._each(lambda name: admin.delete("nodes", name), gone)
        self._names = [name for name in self._names if name not in gone]

    def break_node(self, name: str) -> None:
        """A node that is not ready any more, as after a power cut; its pods are not told."""
        admin = self.cluster.admin
        admin.patch("nodes", name, {"metadata": {"labels": {DOWN: "true"}}})
        condition = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
        admin.patch("nodes", name, {"status": {"conditions": [condition]}}, subresource="status", kind="strategic")

    def mend_node(self, name: str) -> None:
        """Back from `break_node`; returns when it is ready."""
        self.cluster.admin.patch("nodes", name, {"metadata": {"labels": {DOWN: None}}})
        self.cluster.admin.wait_for("nodes", name, _is_usable)

    def set_gpus(self, name: str, allocatable: int) -> None:
        """How many of a node's GPUs its device plugin calls healthy."""
        status = {"status": {"allocatable": {GPU: str(allocatable)}}}
        self.cluster.admin.patch("nodes", name, status, subresource="status")

    def _each(self, act: Callable[[T], object], items: Iterable[T]) -> None:
        with ThreadPoolExecutor(_PARALLEL) as pool:
            for _ in pool.map(act, items):
                pass


def is_ready(node: Object) -> bool:
    """Whether a node or pod says that it is ready."""
    conditions = node.get("status", {}).get("conditions") or []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _is_usable(node: Object) -> bool:
    """Ready, and the controllers have taken away the taint that every new node gets."""
    keys = [taint["key"] for taint in node["spec"].get("taints", ())]
    return is_ready(node) and not any(key.startswith("node.kubernetes.io/") for key in keys)


def _node(name: str, product: str, gpus: int, labels: Mapping[str, str], is_tainted: bool) -> Object:
    room = {"cpu": "128", "memory": "1Ti", "ephemeral-storage": "1Ti", "pods": "256", GPU: str(gpus)}
    all_labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "type": "kwok", PRODUCT: product}
    spec = {"taints": [{"key": FAKE, "value": "fake", "effect": "NoSchedule"}]} if is_tainted else {}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": {FAKE: "fake"}, "labels": {**all_labels, **labels}},
        "spec": spec,
        "status": {"allocatable": room, "capacity": room},
    }
