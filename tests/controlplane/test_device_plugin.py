"""The test GPU device plug-in, against a stand-in for the kubelet that speaks the other half of the protocol."""

import os
import queue
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from slackwater_controlplane.node.device_plugin import VARIABLE, Devices
from slackwater_controlplane.node.protocol import LIST_PODS, PLUGIN, PLUGIN_SERVICE, REGISTER, RESOURCES

TIMEOUT_S = 20.0


def serialized(message: Any) -> bytes:
    return bytes(message.SerializeToString())


class Kubelet:
    """Takes registrations, and answers which pod holds what with what a test says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: queue.Queue[Any] = queue.Queue()
        self.pods: list[Any] = []
        self._server: grpc.Server | None = None

    def start(self) -> None:
        """Begin as a real one does: no sockets of plug-ins are left, then its own is there."""
        for socket in self.folder.glob("*.sock"):
            socket.unlink()
        server = grpc.server(futures.ThreadPoolExecutor(2))
        for method, request, answer in (
            (REGISTER, PLUGIN["RegisterRequest"], self.register),
            (LIST_PODS, RESOURCES["ListPodResourcesRequest"], self.list_pods),
        ):
            service, _, name = method.removeprefix("/").partition("/")
            handler = grpc.unary_unary_rpc_method_handler(answer, request.FromString, serialized)
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
        server.add_insecure_port(f"unix:{self.folder / 'kubelet.sock'}")
        server.start()
        self._server = server

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()

    def register(self, request: Any, _context: Any) -> Any:
        self.requests.put(request)
        return PLUGIN["Empty"]()

    def list_pods(self, _request: Any, _context: Any) -> Any:
        return RESOURCES["ListPodResourcesResponse"](pod_resources=self.pods)


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not pytest's own folder: a socket's path has 108 bytes at most.
    with tempfile.TemporaryDirectory(prefix="slkw-") as name:
        path = Path(name) / "device-plugins"
        path.mkdir()
        yield path


@pytest.fixture
def kubelet(folder: Path) -> Iterator[Kubelet]:
    kubelet = Kubelet(folder)
    kubelet.start()
    yield kubelet
    kubelet.stop()


@pytest.fixture
def devices(folder: Path, kubelet: Kubelet) -> Iterator[Devices]:
    devices = Devices(folder, folder / "kubelet.sock", resource="nvidia.com/gpu", ids=("GPU-0", "GPU-1"))
    devices.write()
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    plugin = subprocess.Popen(devices.argv(str(folder)), env=environ, stderr=subprocess.DEVNULL)
    yield devices
    plugin.kill()
    plugin.wait()


def test_names_its_devices_and_says_when_one_fails(folder: Path, kubelet: Kubelet, devices: Devices) -> None:
    request = kubelet.requests.get(timeout=TIMEOUT_S)
    assert (request.version, request.resource_name) == ("v1beta1", "nvidia.com/gpu")

    with grpc.insecure_channel(f"unix:{folder / request.endpoint}") as channel:
        watch = channel.unary_stream(
            f"/{PLUGIN_SERVICE}/ListAndWatch",
            request_serializer=serialized,
            response_deserializer=PLUGIN["ListAndWatchResponse"].FromString,
        )(PLUGIN["Empty"](), timeout=TIMEOUT_S)
        first = {device.ID: device.health for device in next(watch).devices}
        devices.mark("GPU-1", healthy=False)
        second = {device.ID: device.health for device in next(watch).devices}
        watch.cancel()

    assert first == {"GPU-0": "Healthy", "GPU-1": "Healthy"}
    assert second == {"GPU-0": "Healthy", "GPU-1": "Unhealthy"}


def test_gives_a_container_its_devices_in_the_environment(folder: Path, kubelet: Kubelet, devices: Devices) -> None:
    request = kubelet.requests.get(timeout=TIMEOUT_S)

    with grpc.insecure_channel(f"unix:{folder / request.endpoint}") as channel:
        allocate = channel.unary_unary(
            f"/{PLUGIN_SERVICE}/Allocate",
            request_serializer=serialized,
            response_deserializer=PLUGIN["AllocateResponse"].FromString,
        )
        wanted = PLUGIN["ContainerAllocateRequest"](devices_ids=["GPU-1", "GPU-0"])
        answer = allocate(PLUGIN["AllocateRequest"](container_requests=[wanted]), timeout=TIMEOUT_S)

    (container,) = answer.container_responses
    assert [(env.key, env.value) for env in container.envs] == [(VARIABLE, "GPU-0,GPU-1")]


def test_registers_again_with_the_next_kubelet(kubelet: Kubelet, devices: Devices) -> None:
    kubelet.requests.get(timeout=TIMEOUT_S)

    kubelet.stop()
    kubelet.start()

    assert kubelet.requests.get(timeout=TIMEOUT_S).endpoint == "nvidia.com_gpu.sock"


def test_tells_which_pod_holds_which_device(kubelet: Kubelet, devices: Devices) -> None:
    held = RESOURCES["ContainerDevices"](resource_name="nvidia.com/gpu", device_ids=["GPU-1"])
    other = RESOURCES["ContainerDevices"](resource_name="example.com/nic", device_ids=["nic-0"])
    container = RESOURCES["ContainerResources"](name="main", devices=[held, other])
    kubelet.pods.append(RESOURCES["PodResources"](name="worker", namespace="cleaning", containers=[container]))

    assert devices.holders() == {"GPU-1": ("cleaning", "worker")}


def test_refuses_to_mark_a_device_that_is_not_there(devices: Devices) -> None:
    with pytest.raises(ValueError, match="no device GPU-9"):
        devices.mark("GPU-9", healthy=False)
