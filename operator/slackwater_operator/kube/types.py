"""What the client speaks: JSON objects as dicts, resources as addresses, and times as Kubernetes writes them.

Owns the list of built-in resources that the operator touches; the names of our own kinds belong to
`resources`.  Imported by all modules of this package and by those who call it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any
from urllib.parse import quote

Object = dict[str, Any]
Key = tuple[str, str]  # (namespace, name); the namespace is "" for cluster-wide objects


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object and where the API server keeps it."""

    group: str  # "" for the core group
    version: str
    plural: str
    kind: str
    namespaced: bool

    @property
    def api_version(self) -> str:
        """As objects carry it: `v1`, `apps/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """The path of a collection, an object or a part of it.

        namespace: None means all of them, for a collection.  Raises ValueError if an object of a
        namespaced kind is named without its namespace.
        """
        parts = ["/apis", self.group, self.version] if self.group else ["/api", self.version]
        if self.namespaced and namespace:
            parts += ["namespaces", quote(namespace, safe="")]
        elif self.namespaced and name is not None:
            raise ValueError(f"{self.kind} {name!r} needs a namespace")
        parts.append(self.plural)
        if name is not None:
            parts.append(quote(name, safe=""))
        if subresource is not None:
            parts.append(subresource)
        return "/".join(parts)

    def title(self, name: str | None, namespace: str | None = None) -> str:
        """How messages name an object: `Pod serving/tts-1`, or `Pod serving/*` for a collection."""
        where = f"{namespace}/" if namespace and self.namespaced else ""
        return f"{self.kind} {where}{'*' if name is None else name}"


PODS = Resource("", "v1", "pods", "Pod", True)
NODES = Resource("", "v1", "nodes", "Node", False)
SERVICES = Resource("", "v1", "services", "Service", True)
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap", True)
SECRETS = Resource("", "v1", "secrets", "Secret", True)
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", False)
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount", True)
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", True)
EVENTS = Resource("events.k8s.io", "v1", "events", "Event", True)
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease", True)
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment", True)
STATEFUL_SETS = Resource("apps", "v1", "statefulsets", "StatefulSet", True)
JOBS = Resource("batch", "v1", "jobs", "Job", True)
DISRUPTION_BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", True)
PRIORITY_CLASSES = Resource("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", False)
CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False)


def custom(plural: str, kind: str, namespaced: bool) -> Resource:
    """A kind of our own API group."""
    return Resource("slackwater.dev", "v1alpha1", plural, kind, namespaced)


def name_of(obj: Mapping[str, Any]) -> str:
    """The object's name; "" before the server has given one."""
    return str(obj.get("metadata", {}).get("name", ""))


def namespace_of(obj: Mapping[str, Any]) -> str:
    """The object's namespace, "" if it has none."""
    return str(obj.get("metadata", {}).get("namespace", ""))


def uid_of(obj: Mapping[str, Any]) -> str:
    """What tells this object from another one of the same name at another time."""
    return str(obj.get("metadata", {}).get("uid", ""))


def key_of(obj: Mapping[str, Any]) -> Key:
    """(namespace, name), as caches are keyed."""
    metadata = obj.get("metadata", {})
    return metadata.get("namespace", ""), metadata.get("name", "")


def version_of(obj: Mapping[str, Any]) -> int:
    """The object's resourceVersion as a number: Kubernetes promises that it grows, for objects of one kind.

    0 for an object that no server has seen.
    """
    text = obj.get("metadata", {}).get("resourceVersion", "")
    return int(text) if text.isdigit() else 0


def stamp(at_s: float) -> str:
    """RFC 3339 with whole seconds, as in `metadata`: `2026-11-29T10:00:02Z`."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_stamp(at_s: float) -> str:
    """RFC 3339 with microseconds, as Leases and Events want it: `2026-11-29T10:00:02.000250Z`."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@lru_cache(maxsize=4096)  # pods that are made within one second have the same
def parse_stamp(text: str) -> float:
    """Seconds since 1970 of an RFC 3339 time.  Raises ValueError for anything else."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return moment.timestamp()
