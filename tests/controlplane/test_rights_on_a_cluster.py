"""What the operator's service account may and may not do, asked of a real API server with its own identity."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slackwater_controlplane.build import Programs, cache_folder
from slackwater_controlplane.client import Admin, ApiError
from slackwater_controlplane.fixtures import new_control_plane
from slackwater_operator.resources import names

MANIFESTS = Path(__file__).parents[2] / "manifests"
OPERATOR = f"system:serviceaccount:{names.OPERATOR_NAMESPACE}:{names.SERVICE_ACCOUNT}"
GROUPS = ("system:serviceaccounts", f"system:serviceaccounts:{names.OPERATOR_NAMESPACE}", "system:authenticated")
SYSTEM = names.OPERATOR_NAMESPACE
INFERENCE = "slackwater-inference"
WORKERS = "slackwater-workers"
RBAC = "rbac.authorization.k8s.io"

pytestmark = pytest.mark.controlplane


@dataclass(frozen=True, slots=True)
class Right:
    """A verb on a resource; resource/subresource.  namespace "" is everywhere."""

    verb: str
    resource: str
    group: str = ""
    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        where = f" in {self.namespace}" if self.namespace else ""
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''} {self.name}{where}".replace(
            "  ", " "
        )


FORBIDDEN = (
    Right("get", "secrets", namespace=SYSTEM),
    Right("list", "secrets"),
    Right("watch", "secrets", namespace=INFERENCE),
    Right("get", "configmaps", namespace="kube-system"),
    Right("create", "pods"),
    Right("create", "pods", namespace="default"),
    Right("delete", "pods", namespace="kube-system"),
    Right("delete", "pods", namespace=SYSTEM),
    Right("deletecollection", "pods", namespace=WORKERS),
    Right("update", "pods", namespace=WORKERS),
    Right("create", "pods/exec", namespace=INFERENCE),
    Right("create", "pods/attach", namespace=INFERENCE),
    Right("create", "pods/portforward", namespace=INFERENCE),
    Right("get", "pods/log", namespace=INFERENCE),
    Right("create", "pods/binding", namespace=INFERENCE),
    Right("create", "pods/eviction", namespace=INFERENCE),
    Right("patch", "pods/ephemeralcontainers", namespace=INFERENCE),
    Right("patch", "pods/status", namespace="kube-system"),
    Right("patch", "nodes"),
    Right("delete", "nodes"),
    Right("patch", "nodes/status"),
    Right("get", "nodes/proxy"),
    Right("create", "namespaces"),
    Right("delete", "namespaces", name=INFERENCE),
    Right("create", "serviceaccounts/token", namespace=SYSTEM),
    Right("create", "serviceaccounts", namespace=SYSTEM),
    Right("create", "clusterroles", RBAC),
    Right("create", "rolebindings", RBAC, INFERENCE),
    Right("escalate", "clusterroles", RBAC),
    Right("bind", "clusterroles", RBAC),
    Right("impersonate", "users"),
    Right("create", "tokenreviews", "authentication.k8s.io"),
    Right("create", "deployments", "apps", "default"),
    Right("delete", "deployments", "apps", SYSTEM),
    Right("create", "daemonsets", "apps", INFERENCE),
    Right("create", "jobs", "batch", "kube-system"),
    Right("create", "cronjobs", "batch", WORKERS),
    Right("patch", "controllerrevisions", "apps", "kube-system"),
    Right("delete", "persistentvolumeclaims", namespace=WORKERS),
    Right("get", "leases", "coordination.k8s.io", "kube-system"),
    Right("update", "leases", "coordination.k8s.io", SYSTEM, "another"),
    Right("delete", "leases", "coordination.k8s.io", SYSTEM, "slackwater-operator"),
    Right("create", "customresourcedefinitions", "apiextensions.k8s.io"),
    Right("patch", "validatingadmissionpolicies", "admissionregistration.k8s.io"),
    Right("delete", "priorityclasses", "scheduling.k8s.io"),
    Right("patch", "poddisruptionbudgets", "policy", INFERENCE),
    Right("delete", "networkpolicies", "networking.k8s.io", SYSTEM),
    Right("list", "customresourcedefinitions", "apiextensions.k8s.io"),
    Right("list", "configmaps"),
    Right("list", "events"),
    Right("patch", "reclaims", names.GROUP, INFERENCE),
    Right("create", "gpuflavors", names.GROUP),
    Right("patch", "capacitypools", names.GROUP),
    Right("patch", "inferencedeployments", names.GROUP, INFERENCE),
    Right("delete", "cleaningjobs", names.GROUP, WORKERS),
    Right("update", "inferencedeployments/scale", names.GROUP, INFERENCE),
)
CHILDREN = (("apps", "deployments"), ("apps", "controllerrevisions"), ("batch", "jobs"), ("", "services"))
NEEDED = (
    *(Right(verb, resource) for resource in ("nodes", "pods") for verb in ("get", "list", "watch")),
    *(Right(verb, kind.plural, names.GROUP) for kind in names.KINDS for verb in ("get", "list", "watch")),
    *(Right("patch", f"{kind.plural}/status", names.GROUP) for kind in names.KINDS),
    *(Right(verb, names.RECLAIM.plural, names.GROUP) for verb in ("create", "delete", "record")),
    *(Right(verb, "pods", namespace=room) for room in (INFERENCE, WORKERS) for verb in ("create", "patch", "delete")),
    *(Right("patch", "pods/status", namespace=room) for room in (INFERENCE, WORKERS)),
    *(Right(verb, resource, group) for group, resource in CHILDREN for verb in ("get", "list", "watch")),
    *(
        Right(verb, resource, group, room)
        for group, resource in CHILDREN
        for verb in ("create", "patch", "delete")
        for room in (INFERENCE, WORKERS)
    ),
    *(Right(verb, "events", "events.k8s.io") for verb in ("create", "patch")),
    *(Right("list", "events", "events.k8s.io", room) for room in (INFERENCE, WORKERS)),
    Right("create", "leases", "coordination.k8s.io", SYSTEM),
    *(Right(verb, "leases", "coordination.k8s.io", SYSTEM, names.LEASE) for verb in ("get", "update")),
)


@pytest.fixture(scope="module")
def operator(controlplane_programs: Programs) -> Iterator[Admin]:
    """The operator's identity on a control plane with manifests/overlays/default."""
    if (reason := controlplane_programs.why_not("control-plane")) is not None:
        pytest.skip(reason)
    with new_control_plane(controlplane_programs, cache_folder(os.environ)) as cluster:
        kubectl = controlplane_programs.path("kubectl")
        command = [str(kubectl), "--kubeconfig", str(cluster.kubeconfig()), "apply", "-k"]
        subprocess.run([*command, str(MANIFESTS / "overlays/default")], check=True, capture_output=True)
        cluster.admin.wait_established(*(kind.crd for kind in names.KINDS))
        with Admin(cluster.kubeconfig(OPERATOR, GROUPS)) as operator:
            yield operator


def may(user: Admin, right: Right) -> bool:
    resource, _, subresource = right.resource.partition("/")
    attributes = {
        "verb": right.verb,
        "group": right.group,
        "resource": resource,
        "subresource": subresource,
        "namespace": right.namespace,
        "name": right.name,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = user.raw("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review).json()
    return bool(answer["status"]["allowed"])


@pytest.mark.parametrize("right", FORBIDDEN, ids=str)
def test_the_operator_may_not(operator: Admin, right: Right) -> None:
    assert not may(operator, right)


@pytest.mark.parametrize("right", NEEDED, ids=str)
def test_the_operator_may(operator: Admin, right: Right) -> None:
    assert may(operator, right)


POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "one"},
    "spec": {"containers": [{"name": "c", "image": "i:1"}]},
}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        pytest.param("GET", "/api/v1/secrets", None, id="read secrets"),
        pytest.param("GET", f"/api/v1/namespaces/{SYSTEM}/secrets/any", None, id="read a secret of its own namespace"),
        pytest.param("POST", "/api/v1/namespaces/default/pods", POD, id="make a pod elsewhere"),
        pytest.param("DELETE", "/api/v1/namespaces/kube-system/pods/any", None, id="delete a pod elsewhere"),
        pytest.param("DELETE", f"/api/v1/namespaces/{WORKERS}/pods", None, id="delete all workers at once"),
        pytest.param("DELETE", "/api/v1/nodes/any", None, id="delete a node"),
        pytest.param("PATCH", "/apis/slackwater.dev/v1alpha1/capacitypools/east", {"spec": {}}, id="change a pool"),
        pytest.param("GET", f"/api/v1/namespaces/{INFERENCE}/pods/any/log", None, id="read a log"),
    ],
)
def test_a_request_that_is_forbidden_is_refused(
    operator: Admin, method: str, path: str, body: dict[str, object] | None
) -> None:
    content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"

    with pytest.raises(ApiError) as refused:
        operator.raw(method, path, body, content_type=content_type)

    assert (refused.value.code, refused.value.reason) == (403, "Forbidden")
