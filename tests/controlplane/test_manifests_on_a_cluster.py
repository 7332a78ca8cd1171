"""The manifests on a real API server: they apply, and what they allow and forbid is what happens."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slackwater_controlplane.build import Programs, cache_folder
from slackwater_controlplane.client import Admin, ApiError, Object
from slackwater_controlplane.cluster import ControlPlane
from slackwater_controlplane.fixtures import new_control_plane
from slackwater_manifests import kustomize
from slackwater_operator.resources import names
from slackwater_operator.testing.resources import a_question, a_reclaim, a_service

MANIFESTS = Path(__file__).parents[2] / "manifests"
OPERATOR = f"system:serviceaccount:{names.OPERATOR_NAMESPACE}:{names.SERVICE_ACCOUNT}"
OPERATORS = ("system:serviceaccounts", f"system:serviceaccounts:{names.OPERATOR_NAMESPACE}", "system:authenticated")
PEOPLE = ("system:authenticated",)
INFERENCE = "slackwater-inference"
WORKERS = "slackwater-workers"
RECLAIMS = "reclaims.slackwater.dev"
CRDS = "customresourcedefinitions.apiextensions.k8s.io"
SECURE: Object = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}

pytestmark = pytest.mark.controlplane


class Installed:
    """A control plane with manifests/overlays/default, applied as a person does."""

    def __init__(self, cluster: ControlPlane, kubectl: Path) -> None:
        self.cluster = cluster
        self.admin = cluster.admin
        self._kubectl = kubectl
        self.output = self.kubectl("apply", "-k", str(MANIFESTS / "overlays/default"))
        self.admin.wait_established(*(kind.crd for kind in names.KINDS))
        self.operator = Admin(cluster.kubeconfig(OPERATOR, OPERATORS))

    def kubectl(self, *arguments: str) -> str:
        command = [str(self._kubectl), "--kubeconfig", str(self.cluster.kubeconfig()), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def person(self, name: str, role: str, namespace: str) -> Admin:
        """Somebody with one of Kubernetes' own roles in a namespace."""
        self.admin.apply(
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "RoleBinding",
                "metadata": {"name": name, "namespace": namespace},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": name}],
            }
        )
        person = Admin(self.cluster.kubeconfig(name, PEOPLE))
        _until_allowed(person, "get", "reclaims", namespace)
        return person


def may(
    user: Admin, verb: str, resource: str, group: str, namespace: str = "", subresource: str = "", name: str = ""
) -> bool:
    attributes = {
        "verb": verb,
        "group": group,
        "resource": resource,
        "subresource": subresource,
        "namespace": namespace,
        "name": name,
    }
    review = user.raw(
        "POST",
        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        },
    ).json()
    return bool(review["status"]["allowed"])


def _until_allowed(person: Admin, verb: str, resource: str, namespace: str) -> None:
    """Roles are added up by a controller, some moments after they were made."""
    for _ in range(200):
        if may(person, verb, resource, names.GROUP, namespace):
            return
    pytest.fail(f"{verb} {resource} in {namespace} never became allowed")


@pytest.fixture(scope="module")
def installed(controlplane_programs: Programs) -> Iterator[Installed]:
    if (reason := controlplane_programs.why_not("control-plane")) is not None:
        pytest.skip(reason)
    with new_control_plane(controlplane_programs, cache_folder(os.environ)) as cluster:
        yield Installed(cluster, controlplane_programs.path("kubectl"))


@pytest.fixture(scope="module")
def kubectl(controlplane_programs: Programs) -> Path:
    if (reason := controlplane_programs.why_not("control-plane")) is not None:
        pytest.skip(reason)
    return controlplane_programs.path("kubectl")


def by_name(objects: list[Object]) -> dict[tuple[str, str, str], Object]:
    return {(one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]): one for one in objects}


@pytest.mark.parametrize("overlay", ["default", "full", "test"])
def test_kubectl_renders_what_our_own_reader_renders(kubectl: Path, overlay: str) -> None:
    folder = MANIFESTS / "overlays" / overlay

    done = subprocess.run([str(kubectl), "kustomize", str(folder)], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    theirs = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert by_name(theirs) == by_name(kustomize.render(folder))


def test_applying_it_again_changes_nothing(installed: Installed) -> None:
    folder = str(MANIFESTS / "overlays/default")

    # `apply` says "configured" of what the server has completed in its own words; `diff` asks the server.
    assert installed.kubectl("diff", "-k", folder) == ""
    again = installed.kubectl("apply", "-k", folder)

    assert len(again.splitlines()) == len(installed.output.splitlines())
    deployment = installed.admin.get("deployments.apps", names.SERVICE_ACCOUNT, names.OPERATOR_NAMESPACE)
    assert deployment["metadata"]["generation"] == 1


@pytest.mark.parametrize("overlay", ["default", "full", "test"])
def test_the_server_accepts_every_object_of_an_overlay(installed: Installed, overlay: str) -> None:
    objects = kustomize.render(MANIFESTS / "overlays" / overlay)
    for crd in stand_ins(installed.admin, objects):
        installed.admin.apply(crd)
        installed.kubectl("wait", "--for=condition=Established", f"crd/{crd['metadata']['name']}")

    output = installed.kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "-k", str(MANIFESTS / "overlays" / overlay)
    )

    assert len(output.splitlines()) == len(objects)


def stand_ins(admin: Admin, objects: list[Object]) -> list[Object]:
    """Definitions without a schema, of the kinds of others that are not here: names are checked, fields are not."""
    known = {crd["spec"]["names"]["kind"] for crd in admin.list(CRDS)}
    foreign = {
        (*one["apiVersion"].split("/"), one["kind"], "namespace" in one["metadata"])
        for one in objects
        if ("." in one["apiVersion"].partition("/")[0] and not one["apiVersion"].partition("/")[0].endswith(".k8s.io"))
        or one["apiVersion"].startswith("gateway.")
    }
    return [
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {
                "name": f"{_plural(kind)}.{group}",
                "annotations": {"api-approved.kubernetes.io": "unapproved, a stand-in"},
            },
            "spec": {
                "group": group,
                "scope": "Namespaced" if is_namespaced else "Cluster",
                "names": {"kind": kind, "plural": _plural(kind), "singular": kind.lower()},
                "versions": [
                    {
                        "name": version,
                        "served": True,
                        "storage": True,
                        "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
                    }
                ],
            },
        }
        for group, version, kind, is_namespaced in sorted(foreign)
        if kind not in known
    ]


def _plural(kind: str) -> str:
    word = kind.lower()
    if word.endswith("y") and not word.endswith("ay"):
        return f"{word[:-1]}ies"
    return f"{word}{'es' if word.endswith('s') else 's'}"


def test_the_operators_pods_are_admitted_to_a_restricted_namespace(installed: Installed) -> None:
    deployment = installed.admin.wait_for(
        "deployments.apps",
        names.SERVICE_ACCOUNT,
        lambda one: bool(one.get("status", {}).get("replicas") == 2),
        names.OPERATOR_NAMESPACE,
    )

    assert deployment["status"]["unavailableReplicas"] == 2  # there is no node, but nobody refused them


def a_pod(namespace: str, name: str = "one", **spec: Any) -> Object:
    container = {"name": "engine", "image": "slackwater/engine:0.1.0", "securityContext": SECURE}
    secure = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    given = {"containers": [container], "securityContext": secure} | spec
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": given,
    }


@pytest.mark.parametrize("namespace", [INFERENCE, WORKERS])
@pytest.mark.parametrize("priority", [priority.name for priority in names.PRIORITIES])
def test_a_restricted_pod_is_admitted_with_each_priority(installed: Installed, namespace: str, priority: str) -> None:
    pod = a_pod(namespace, priorityClassName=priority)

    answer = installed.operator.raw(
        "POST", f"/api/v1/namespaces/{namespace}/pods", pod, params={"dryRun": "All"}
    ).json()

    assert answer["spec"]["priority"] == {one.name: one.value for one in names.PRIORITIES}[priority]


@pytest.mark.parametrize("namespace", [INFERENCE, WORKERS, names.OPERATOR_NAMESPACE])
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"securityContext": {}}, id="root"),
        pytest.param({"hostNetwork": True}, id="host network"),
        pytest.param({"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}, id="host path"),
        pytest.param(
            {"containers": [{"name": "engine", "image": "x:1", "securityContext": {"privileged": True}}]},
            id="privileged",
        ),
    ],
)
def test_a_pod_that_is_not_restricted_is_refused(installed: Installed, namespace: str, spec: Object) -> None:
    with pytest.raises(ApiError, match="violates PodSecurity") as refused:
        installed.admin.create(a_pod(namespace, **spec))

    assert refused.value.code == 403


def test_a_person_asks_with_a_dry_run_and_takes_nothing_back(installed: Installed, namespace_of_ours: str) -> None:
    alice = installed.person("alice", "edit", namespace_of_ours)

    alice.create(a_question(namespace=namespace_of_ours))
    with pytest.raises(ApiError, match=r"spec\.dryRun must be true") as refused:
        alice.create(a_reclaim(namespace=namespace_of_ours))

    assert (refused.value.code, "alice has no verb record" in str(refused.value)) == (403, True)
    alice.delete(RECLAIMS, "three-times", namespace_of_ours)
    assert installed.admin.find(RECLAIMS, "three-times", namespace_of_ours) is None


def test_a_person_cannot_delete_a_record_and_the_operator_can(installed: Installed, namespace_of_ours: str) -> None:
    carol = installed.person("carol", "admin", namespace_of_ours)
    installed.operator.create(a_reclaim(namespace=namespace_of_ours))

    with pytest.raises(ApiError, match="which only the operator deletes") as refused:
        carol.delete(RECLAIMS, "tts-1", namespace_of_ours)

    assert refused.value.code == 403
    installed.operator.delete(RECLAIMS, "tts-1", namespace_of_ours)
    assert installed.admin.find(RECLAIMS, "tts-1", namespace_of_ours) is None


def test_who_may_only_look_sees_reclaims_and_makes_none(installed: Installed, namespace_of_ours: str) -> None:
    bob = installed.person("bob", "view", namespace_of_ours)

    assert bob.list(RECLAIMS, namespace_of_ours) == []
    with pytest.raises(ApiError, match="cannot create resource") as refused:
        bob.create(a_question(namespace=namespace_of_ours))
    assert refused.value.code == 403


def test_a_namespace_with_a_record_can_be_deleted(installed: Installed) -> None:
    installed.admin.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "leaving"}})
    installed.operator.create(a_reclaim(namespace="leaving"))

    installed.admin.delete("namespaces", "leaving")

    installed.admin.wait_gone("namespaces", "leaving")


@pytest.fixture
def namespace_of_ours(installed: Installed) -> Iterator[str]:
    """A namespace for people's resources, empty of Reclaims at the end."""
    name = "people"
    if installed.admin.find("namespaces", name) is None:
        installed.admin.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield name
    installed.admin.delete_all(RECLAIMS, name)


def test_an_eviction_stops_at_the_floor_of_the_service(installed: Installed) -> None:
    admin = installed.admin
    service = admin.create(a_service(namespace=INFERENCE, minReplicas=2))
    admin.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}})
    for name in ("a", "b", "c"):
        _serve(admin, a_pod(INFERENCE, name, nodeName="n1"), service)
    _wait_counted(admin, healthy=3, floor=2)

    _evict(admin, "a")
    with pytest.raises(ApiError, match="would violate the pod's disruption budget") as refused:
        _evict(admin, "b")

    assert refused.value.code == 429
    assert "deletionTimestamp" in admin.get("pods", "a", INFERENCE)["metadata"]
    admin.delete_all("pods", INFERENCE)  # at once: on this node nobody ends them


def _serve(admin: Admin, pod: Object, service: Object) -> None:
    """Make a replica that is ready, as far as the API server knows."""
    pod["metadata"]["labels"] = {names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_KIND: names.POD_INFERENCE}
    owner = {key: service[key] for key in ("apiVersion", "kind")} | {
        "name": service["metadata"]["name"],
        "uid": service["metadata"]["uid"],
        "controller": True,
    }
    pod["metadata"]["ownerReferences"] = [owner]
    admin.create(pod)
    ready = {"type": "Ready", "status": "True"}
    status = {"status": {"phase": "Running", "conditions": [ready]}}
    admin.patch("pods", pod["metadata"]["name"], status, INFERENCE, subresource="status", kind="strategic")


def _wait_counted(admin: Admin, *, healthy: int, floor: int) -> None:
    """Until the disruption controller knows.  It looks for new kinds twice a minute, and again when a pod changes."""
    deadline_s = time.monotonic() + 90
    while time.monotonic() < deadline_s:
        status = admin.get("poddisruptionbudgets.policy", "slackwater-replicas", INFERENCE).get("status", {})
        if (status.get("currentHealthy"), status.get("desiredHealthy")) == (healthy, floor):
            return
        time.sleep(1)
        admin.patch("pods", "c", {"metadata": {"annotations": {"nudge": str(time.monotonic())}}}, INFERENCE)
    pytest.fail(f"the budget was not counted: {status}")


def _evict(admin: Admin, name: str) -> None:
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": INFERENCE}}
    admin.raw("POST", f"/api/v1/namespaces/{INFERENCE}/pods/{name}/eviction", body)


def test_it_uninstalls_with_records_of_reclaims_still_there(installed: Installed) -> None:
    """The last test of the module: nothing is left for another one."""
    installed.operator.create(a_reclaim("left", namespace=INFERENCE))

    installed.kubectl("delete", "--timeout=120s", "-k", str(MANIFESTS / "overlays/default"))

    for name in (INFERENCE, WORKERS, names.OPERATOR_NAMESPACE):
        assert installed.admin.find("namespaces", name) is None
    assert not [crd for crd in installed.admin.list(CRDS) if crd["spec"]["group"] == names.GROUP]
