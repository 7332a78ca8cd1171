"""Pods for tests on real nodes: a shell script in the busybox image, or this checkout's Python by host paths; volumes.

Owns the manifests only; nothing here talks to a cluster.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from slackwater_controlplane.client import Object
from slackwater_controlplane.oci import BUSYBOX_IMAGE

CHECKOUT = Path(__file__).parents[4]
_LIBRARIES = ("/lib", "/lib64", "/usr/lib")


def pod(
    name: str,
    script: str = "",
    *,
    namespace: str = "default",
    command: Sequence[str] = (),
    gpus: int = 0,
    resource: str = "nvidia.com/gpu",
    node: str = "",
    selector: Mapping[str, str] | None = None,
    priority_class: str = "",
    grace_s: int = 5,
    restart: str = "Never",
    labels: Mapping[str, str] | None = None,
) -> Object:
    """A pod of one container `main` that runs a shell script, a command, or nothing but the image's sleep.

    node: binds it there without a scheduler.
    """
    container: Object = {"name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never"}
    if script:
        container["command"] = ["/bin/sh", "-c", script]
    if command:
        container["command"] = list(command)
    if gpus:
        container["resources"] = {"limits": {resource: str(gpus)}}
    spec: Object = {
        "containers": [container],
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": grace_s,
    }
    if node:
        spec["nodeName"] = node
    if selector:
        spec["nodeSelector"] = dict(selector)
    if priority_class:
        spec["priorityClassName"] = priority_class
    metadata = {"name": name, "namespace": namespace, "labels": dict(labels or {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def with_host_python(pod: Object) -> Object:
    """The pod with this checkout and its interpreter mounted read-only at their own paths, in every container."""
    spec = pod["spec"]
    for number, path in enumerate(python_paths()):
        name = f"host-{number}"
        spec.setdefault("volumes", []).append({"name": name, "hostPath": {"path": path, "type": "Directory"}})
        for container in spec["containers"]:
            mount = {"name": name, "mountPath": path, "readOnly": True}
            container.setdefault("volumeMounts", []).append(mount)
    return pod


def python_paths() -> list[str]:
    """The folders that the interpreter needs: its libraries, itself, its environment and this checkout."""
    wanted = {*_LIBRARIES, sys.base_prefix, sys.prefix, str(CHECKOUT)}
    there = [path for path in wanted if Path(path).is_dir()]
    return sorted(path for path in there if not any(Path(other) in Path(path).parents for other in there))


def host_volume(namespace: str, name: str, path: Path) -> list[Object]:
    """A folder of this machine as a volume, and the claim `name` by which pods of a namespace mount it."""
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    size = {"storage": "1Gi"}
    volume = f"{namespace}-{name}"
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": common | {"capacity": size, "hostPath": {"path": str(path), "type": "Directory"}},
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": namespace},
            "spec": common | {"volumeName": volume, "resources": {"requests": size}},
        },
    ]
