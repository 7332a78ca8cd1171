"""What scheduler, kubelet and people do to a pretended cluster, in a few words each.

Owns no state: `FakeKube` inherits these helpers, which write straight into its store.
"""

from copy import deepcopy
from typing import Any

from slackwater_operator.kube.types import NODES, PODS, Object, Resource, key_of, micro_stamp, stamp
from slackwater_operator.testing.kube_merge import merge_patch
from slackwater_operator.testing.kube_store import Store


class Hands:
    """Direct writes, also of what no client may write."""

    store: Store

    def wall_s(self) -> float:
        """Seconds since 1970."""
        raise NotImplementedError

    def put(self, resource: Resource, obj: Object) -> Object:
        """Make or replace an object, its status too."""
        whole = {"apiVersion": resource.api_version, "kind": resource.kind, **obj}
        return deepcopy(self.store.put((resource.group, resource.plural), whole))

    def get(self, resource: Resource, name: str, namespace: str | None = None) -> Object | None:
        """A copy of the object, or None."""
        key = (namespace or "" if resource.namespaced else "", name)
        return deepcopy(self.store.find((resource.group, resource.plural), key))

    def objects(self, resource: Resource, namespace: str | None = None) -> list[Object]:
        """Copies of all of them, by name."""
        return deepcopy(self.store.all((resource.group, resource.plural), namespace))

    def update(self, resource: Resource, name: str, patch: Object, namespace: str | None = None) -> Object:
        """Merge something into an object, its status too."""
        key = (namespace or "" if resource.namespaced else "", name)
        return self.put(resource, merge_patch(self.store.read((resource.group, resource.plural), key), patch))

    def remove(self, resource: Resource, name: str, namespace: str | None = None) -> None:
        """Take an object away at once."""
        key = (namespace or "" if resource.namespaced else "", name)
        self.store.remove((resource.group, resource.plural), key)

    def add_node(
        self, name: str, gpus: int = 8, labels: dict[str, str] | None = None, *, resource: str = "nvidia.com/gpu"
    ) -> Object:
        """A Ready node with so many GPUs."""
        amount = {"cpu": "64", "memory": "512Gi", "pods": "110", resource: str(gpus)}
        return self.put(
            NODES,
            {
                "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}},
                "spec": {},
                "status": {
                    "capacity": amount,
                    "allocatable": amount,
                    "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
                },
            },
        )

    def bind_pod(self, namespace: str, name: str, node: str) -> Object:
        """As the scheduler does."""
        scheduled = {"type": "PodScheduled", "status": "True"}
        patch = {"spec": {"nodeName": node}, "status": {"conditions": [scheduled]}}
        return self.update(PODS, name, patch, namespace)

    def run_pod(self, namespace: str, name: str, *, ready: bool = True, ip: str = "127.0.0.1") -> Object:
        """As the kubelet does once its containers run."""
        pod = self._pod(namespace, name)
        now = stamp(self.wall_s())
        truth = "True" if ready else "False"
        status = {
            "phase": "Running",
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "startTime": pod.get("status", {}).get("startTime", now),
            "conditions": [
                {"type": kind, "status": truth if "eady" in kind else "True", "lastTransitionTime": now}
                for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
            ],
            "containerStatuses": [
                {"name": one, "ready": ready, "restartCount": 0, "state": {"running": {"startedAt": now}}}
                for one in self._containers(pod)
            ],
        }
        return self.update(PODS, name, {"status": status}, namespace)

    def finish_pod(
        self, namespace: str, name: str, exit_code: int = 0, message: str = "", *, reason: str | None = None
    ) -> None:
        """As the kubelet does once its containers have ended; a pod that was deleted is gone then.

        message: what the program wrote to its termination log.
        """
        pod = self._pod(namespace, name)
        now = stamp(self.wall_s())
        ended: Object = {"exitCode": exit_code, "reason": reason or ("Error" if exit_code else "Completed")}
        ended |= {"startedAt": pod.get("status", {}).get("startTime", now), "finishedAt": now}
        if message:
            ended["message"] = message
        status = {
            "phase": "Failed" if exit_code else "Succeeded",
            "conditions": [{"type": "Ready", "status": "False", "reason": "PodCompleted", "lastTransitionTime": now}],
            "containerStatuses": [
                {"name": one, "ready": False, "restartCount": 0, "state": {"terminated": ended}}
                for one in self._containers(pod)
            ],
        }
        self.update(PODS, name, {"status": status}, namespace)
        if "deletionTimestamp" in pod["metadata"]:
            self.remove(PODS, name, namespace)

    def refuse_pod(self, namespace: str, name: str, reason: str = "OutOfnvidia.com/gpu") -> None:
        """As the kubelet does with a pod that finds no device."""
        message = f"Pod was rejected: Node didn't have enough resource: {reason.removeprefix('OutOf')}"
        self.update(PODS, name, {"status": {"phase": "Failed", "reason": reason, "message": message}}, namespace)

    def now(self) -> str:
        """The server's time with microseconds."""
        return micro_stamp(self.wall_s())

    def _pod(self, namespace: str, name: str) -> Object:
        found = self.get(PODS, name, namespace)
        if found is None:
            known = sorted("/".join(key_of(pod)) for pod in self.objects(PODS))
            raise LookupError(f"no pod {namespace}/{name}, only {', '.join(known) or 'none'}")
        return found

    def _containers(self, pod: Object) -> list[Any]:
        return [container.get("name") for container in pod.get("spec", {}).get("containers") or ()]
