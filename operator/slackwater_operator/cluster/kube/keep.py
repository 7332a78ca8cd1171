"""What the caches keep of pods and nodes.

Owns the slimming that holds the operator's memory down at thousands of pods: all that this package reads, nothing
else.  A pod that is neither ours nor wants a GPU keeps its name alone.
"""

from slackwater_operator.kube.trim import Keep, lean
from slackwater_operator.kube.types import Object
from slackwater_operator.resources import names

_META = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
)
_SPEC = (
    "nodeName",
    "priorityClassName",
    "preemptionPolicy",
    "nodeSelector",
    "affinity",
    "tolerations",
    "schedulingGates",
    "terminationGracePeriodSeconds",
)
_STATUS = ("phase", "reason", "message", "podIP", "nominatedNodeName")
_CONDITIONS = ("Ready", "PodScheduled")


def is_device(resource: str) -> bool:
    """Whether a resource may be a GPU: an extended one, that is one with a domain of its own."""
    return "/" in resource and "kubernetes.io/" not in resource


def keep_pod(obj: Object) -> Object:
    """A pod, slimmed."""
    metadata, spec, status = obj.get("metadata", {}), obj.get("spec", {}), obj.get("status", {})
    labels = metadata.get("labels") or {}
    kept: Object = {"metadata": {key: metadata[key] for key in _META if key in metadata}}
    containers = [_container(one) for one in spec.get("containers", ())]
    first = [_container(one) for one in spec.get("initContainers", ())]
    is_ours = labels.get(names.LABEL_MANAGED_BY) == names.MANAGED_BY
    if not is_ours and not any("resources" in one for one in (*containers, *first)):
        return kept
    annotations = metadata.get("annotations") or {}
    kept["metadata"] |= {
        "labels": dict(labels),
        "annotations": {key: value for key, value in annotations.items() if key.startswith(f"{names.GROUP}/")},
    }
    if controllers := [one for one in metadata.get("ownerReferences") or () if one.get("controller")]:
        kept["metadata"]["ownerReferences"] = [{"uid": one["uid"], "controller": True} for one in controllers]
    kept["spec"] = {key: spec[key] for key in _SPEC if key in spec} | {"containers": containers}
    if first:
        kept["spec"]["initContainers"] = first
    kept["status"] = {key: status[key] for key in _STATUS if key in status}
    kept["status"]["conditions"] = [one for one in status.get("conditions", ()) if one.get("type") in _CONDITIONS]
    kept["status"]["containerStatuses"] = [
        {key: one[key] for key in ("name", "state") if key in one} for one in status.get("containerStatuses", ())
    ]
    return kept


def _container(container: Object) -> Object:
    kept = {key: container[key] for key in ("name", "restartPolicy") if key in container}
    resources = container.get("resources", {})
    devices = {
        name: value
        for name, value in {**(resources.get("requests") or {}), **(resources.get("limits") or {})}.items()
        if is_device(name)
    }
    return kept | ({"resources": {"limits": devices}} if devices else {})


def keep_node(obj: Object) -> Object:
    """A node, slimmed."""
    metadata, spec, status = obj.get("metadata", {}), obj.get("spec", {}), obj.get("status", {})
    kept: Object = {"metadata": {key: metadata[key] for key in (*_META, "labels") if key in metadata}, "status": {}}
    kept["spec"] = {key: spec[key] for key in ("unschedulable", "taints") if spec.get(key)}
    for field in ("capacity", "allocatable"):
        kept["status"][field] = {name: value for name, value in status.get(field, {}).items() if is_device(name)}
    kept["status"]["conditions"] = [
        {key: one[key] for key in ("type", "status") if key in one}
        for one in status.get("conditions", ())
        if one.get("type") == "Ready"
    ]
    return kept


def _shared(slim: Keep) -> Keep:
    return lambda obj: lean(slim(obj))


KEEP_POD = _shared(keep_pod)
KEEP_NODE = _shared(keep_node)
