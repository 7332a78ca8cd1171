"""A device plug-in for GPUs that exist by name only, speaking the kubelet's real protocol.

`python -m slackwater_controlplane.node.device_plugin FOLDER NAME` serves the devices that FOLDER/NAME.json names,
below the kubelet's device-plugin folder; `Devices` writes that file and is the tests' side: it marks devices unhealthy
and asks the kubelet which pod holds which.  A pod finds its devices in NVIDIA_VISIBLE_DEVICES, as with NVIDIA's own.

The plug-in registers again whenever the kubelet makes its socket anew: a kubelet that starts removes every plug-in's
socket and forgets the plug-ins.
"""

import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from slackwater_controlplane.node.protocol import (
    LIST_PODS,
    PLUGIN,
    PLUGIN_SERVICE,
    REGISTER,
    RESOURCES,
    VERSION,
)

logger = logging.getLogger(__name__)
VARIABLE = "NVIDIA_VISIBLE_DEVICES"
# A test that marks a device unhealthy waits for the kubelet's next status anyway, which takes longer.
LOOK_EVERY_S = 0.1
CALL_TIMEOUT_S = 5.0
KUBELET_SOCKET = "kubelet.sock"


class Devices:
    """The devices of one node and resource, as tests see them.

    folder: the kubelet's device-plugin folder.   pod_resources: its pod-resources socket.
    """

    def __init__(self, folder: Path, pod_resources: Path, *, resource: str, ids: Sequence[str]) -> None:
        self.resource = resource
        self.ids = tuple(ids)
        self._name = resource.replace("/", "_")
        self._folder = folder
        self._pod_resources = pod_resources
        self._unhealthy: set[str] = set()

    def write(self) -> None:
        """Tell the plug-in which devices there are; it looks again by itself."""
        content = {"resource": self.resource, "devices": {name: name not in self._unhealthy for name in self.ids}}
        # Not in the folder itself: the kubelet empties it when it starts.
        target = self._folder.parent / f"{self._name}.json"
        fresh = target.with_suffix(".fresh")
        fresh.write_text(json.dumps(content))
        os.replace(fresh, target)

    def mark(self, device: str, *, healthy: bool) -> None:
        """Say that a device has failed or is well again; the node's allocatable count follows within a second or so."""
        if device not in self.ids:
            raise ValueError(f"no device {device}; there are {', '.join(self.ids)}")
        (self._unhealthy.discard if healthy else self._unhealthy.add)(device)
        self.write()

    def argv(self, folder: str) -> tuple[str, ...]:
        """The command of the plug-in; folder: the device-plugin folder as that process sees it."""
        return (sys.executable, "-m", "slackwater_controlplane.node.device_plugin", folder, self._name)

    def holders(self) -> dict[str, tuple[str, str]]:
        """Which pod (namespace, name) holds each device that is in use, by the kubelet's own account."""
        with grpc.insecure_channel(f"unix:{self._pod_resources}") as channel:
            call = channel.unary_unary(
                LIST_PODS,
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=RESOURCES["ListPodResourcesResponse"].FromString,
            )
            answer = call(RESOURCES["ListPodResourcesRequest"](), timeout=CALL_TIMEOUT_S, wait_for_ready=True)
        return {
            device: (pod.namespace, pod.name)
            for pod in answer.pod_resources
            for container in pod.containers
            for entry in container.devices
            if entry.resource_name == self.resource
            for device in entry.device_ids
        }


class Plugin:
    """The serving side: one socket, registered with the kubelet that is there now."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._file = folder.parent / f"{name}.json"
        self._changed = threading.Condition()
        self._content: dict[str, Any] = {}
        self._look()

    def run(self) -> None:
        """Serve until the process is ended, through as many kubelets as come."""
        while True:
            kubelet = self._kubelet()
            if kubelet is None:
                self._pause()
                continue
            server = self._serve()
            try:
                self._register()
                while self._kubelet() == kubelet:
                    self._pause()
                    self._look()
            except grpc.RpcError as error:
                logger.info("registration failed, again in %s s: %s", LOOK_EVERY_S, error)
                self._pause()
            finally:
                server.stop(None)
                with self._changed:
                    self._changed.notify_all()

    def options(self, _request: Any, _context: grpc.ServicerContext) -> Any:
        return PLUGIN["DevicePluginOptions"]()

    def list_and_watch(self, _request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """The devices now, and again at every change, until the kubelet goes."""
        sent = None
        while context.is_active():
            with self._changed:
                if self._content == sent:
                    self._changed.wait(1.0)
                    continue
                sent = self._content
            devices = [
                PLUGIN["Device"](ID=name, health="Healthy" if healthy else "Unhealthy")
                for name, healthy in sent["devices"].items()
            ]
            yield PLUGIN["ListAndWatchResponse"](devices=devices)

    def allocate(self, request: Any, _context: grpc.ServicerContext) -> Any:
        """What a container gets: its devices by name, in the variable that NVIDIA's container tools read."""
        responses = []
        for container in request.container_requests:
            env = PLUGIN["Env"](key=VARIABLE, value=",".join(sorted(container.devices_ids)))
            responses.append(PLUGIN["ContainerAllocateResponse"](envs=[env]))
        return PLUGIN["AllocateResponse"](container_responses=responses)

    def _serve(self) -> grpc.Server:
        def serialize(message: Any) -> bytes:
            return bytes(message.SerializeToString())

        server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
        handlers = {
            "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(
                self.options, PLUGIN["Empty"].FromString, serialize
            ),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self.list_and_watch, PLUGIN["Empty"].FromString, serialize
            ),
            "Allocate": grpc.unary_unary_rpc_method_handler(
                self.allocate, PLUGIN["AllocateRequest"].FromString, serialize
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PLUGIN_SERVICE, handlers),))
        socket = self._folder / f"{self._name}.sock"
        socket.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        return server

    def _register(self) -> None:
        request = PLUGIN["RegisterRequest"](
            version=VERSION,
            endpoint=f"{self._name}.sock",
            resource_name=self._content["resource"],
            options=PLUGIN["DevicePluginOptions"](),
        )
        with grpc.insecure_channel(f"unix:{self._folder / KUBELET_SOCKET}") as channel:
            call = channel.unary_unary(
                REGISTER,
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=PLUGIN["Empty"].FromString,
            )
            call(request, timeout=CALL_TIMEOUT_S)
        logger.info("registered %s with %d devices", self._content["resource"], len(self._content["devices"]))

    def _look(self) -> None:
        content = json.loads(self._file.read_text())
        with self._changed:
            if content != self._content:
                self._content = content
                self._changed.notify_all()

    def _kubelet(self) -> tuple[int, int] | None:
        """What tells one kubelet's socket from the next one's; None while there is none."""
        try:
            stat = (self._folder / KUBELET_SOCKET).stat()
        except FileNotFoundError:
            return None
        return stat.st_ino, stat.st_ctime_ns

    def _pause(self) -> None:
        threading.Event().wait(LOOK_EVERY_S)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    Plugin(Path(sys.argv[1]), sys.argv[2]).run()


if __name__ == "__main__":
    main()
