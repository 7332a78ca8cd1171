"""What the pretended API server says of itself: its version and the kinds that it serves.

Clients that look kinds up before they use them (kopf, kubectl) ask for this first.
"""

from collections.abc import Iterable

from slackwater_operator.kube import types
from slackwater_operator.kube.types import Object, Resource, custom
from slackwater_operator.testing.kube_store import Refused

_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]

SERVED: tuple[Resource, ...] = (
    *(value for value in vars(types).values() if isinstance(value, Resource)),
    custom("gpuflavors", "GPUFlavor", False),
    custom("capacitypools", "CapacityPool", False),
    custom("inferencedeployments", "InferenceDeployment", True),
    custom("cleaningjobs", "CleaningJob", True),
    custom("reclaims", "Reclaim", True),
)
SHORT_NAMES = {"gpuflavors": "gpf", "capacitypools": "cpool", "inferencedeployments": "infd"}
SHORT_NAMES |= {"cleaningjobs": "clj", "reclaims": "rcl"}


def answer(path: str, served: Iterable[Resource] = SERVED) -> Object | bytes:
    """The answer to a GET outside all collections.  Raises Refused with 404."""
    groups = {resource.group: resource.version for resource in served}
    match path.strip("/").split("/"):
        case ["version"]:
            return {"major": "1", "minor": "36", "gitVersion": "v1.36.3"}
        case ["readyz" | "livez" | "healthz"]:
            return b"ok"
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            return {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [_group(group, version) for group, version in groups.items() if group],
            }
        case ["apis", group] if group in groups:
            return {"kind": "APIGroup", "apiVersion": "v1", **_group(group, groups[group])}
        case ["api", "v1"]:
            return _resources("", "v1", served)
        case ["apis", group, version] if groups.get(group) == version:
            return _resources(group, version, served)
    raise Refused(404, "NotFound", f"the server could not find the requested resource {path}")


def _group(group: str, version: str) -> Object:
    known = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [known], "preferredVersion": known}


def _resources(group: str, version: str, served: Iterable[Resource]) -> Object:
    found: list[Object] = []
    for resource in served:
        if resource.group != group:
            continue
        ours = resource.plural in SHORT_NAMES
        found.append(
            {
                "name": resource.plural,
                "singularName": resource.kind.lower(),
                "namespaced": resource.namespaced,
                "kind": resource.kind,
                "verbs": _VERBS,
                "shortNames": [SHORT_NAMES[resource.plural]] if ours else [],
                "categories": ["gpu"] if ours else [],
            }
        )
        status = {"name": f"{resource.plural}/status", "singularName": "", "kind": resource.kind}
        found.append({**status, "namespaced": resource.namespaced, "verbs": ["get", "patch", "update"]})
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/{version}" if group else version,
        "resources": found,
    }
