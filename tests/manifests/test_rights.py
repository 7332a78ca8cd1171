"""RBAC as it stands in the files: least privilege, no wildcards, no secrets."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from slackwater_manifests import kustomize
from slackwater_manifests.kustomize import Object

MANIFESTS = Path(__file__).parents[2] / "manifests"
DEFAULT = kustomize.render(MANIFESTS / "overlays/default")
ROLES = [thing for thing in DEFAULT if thing["kind"] in ("Role", "ClusterRole")]
BINDINGS = [thing for thing in DEFAULT if thing["kind"] in ("RoleBinding", "ClusterRoleBinding")]


def name_of(thing: Object) -> str:
    return str(thing["metadata"]["name"])


def rights(role: Object) -> Iterator[tuple[str, str, str]]:
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    yield group, resource, verb


def role(name: str) -> Object:
    [found] = [one for one in ROLES if name_of(one) == name]
    return found


@pytest.mark.parametrize("role", ROLES, ids=name_of)
def test_no_role_has_a_wildcard(role: Object) -> None:
    assert "*" not in {part for right in rights(role) for part in right}
    assert not any("nonResourceURLs" in rule for rule in role["rules"])


@pytest.mark.parametrize("role", ROLES, ids=name_of)
def test_no_role_reaches_secrets_shells_or_other_peoples_rights(role: Object) -> None:
    resources = {resource for _, resource, _ in rights(role)}
    verbs = {verb for _, _, verb in rights(role)}

    assert not resources & {
        "secrets",
        "pods/exec",
        "pods/attach",
        "pods/portforward",
        "pods/ephemeralcontainers",
        "nodes/proxy",
        "serviceaccounts/token",
        "roles",
        "clusterroles",
        "rolebindings",
        "clusterrolebindings",
    }
    assert not verbs & {"impersonate", "escalate", "bind"}


def test_the_operator_writes_pods_only_where_a_namespace_lets_it() -> None:
    cluster_wide = role("slackwater-operator")
    writes = {
        (resource, verb) for group, resource, verb in rights(cluster_wide) if verb not in ("get", "list", "watch")
    }

    assert not any(
        resource.partition("/")[0] in ("pods", "nodes", "jobs", "deployments", "services") for resource, _ in writes
    )
    bound = {
        thing["metadata"]["namespace"]
        for thing in BINDINGS
        if thing["roleRef"]["name"] == "slackwater-operator-namespace"
    }
    assert bound == {"slackwater-inference", "slackwater-workers"}


def test_the_operator_touches_no_lease_but_its_own() -> None:
    rules = role("slackwater-operator-lease")["rules"]

    for rule in rules:
        assert rule.get("resourceNames") == ["slackwater-operator"] or rule["verbs"] == ["create"]


def test_only_the_operator_may_record_a_reclaim() -> None:
    recorders = {name_of(role) for role in ROLES if ("slackwater.dev", "reclaims", "record") in rights(role)}

    assert recorders == {"slackwater-operator"}


def test_statuses_are_written_by_our_controllers_alone() -> None:
    writers = {
        name_of(role)
        for role in ROLES
        for _, resource, verb in rights(role)
        if resource.endswith("/status") and verb == "patch"
    }

    assert writers == {"slackwater-operator", "slackwater-operator-namespace", "slackwater-slurm"}
    assert ("slackwater.dev", "cleaningjobs/status", "patch") in set(rights(role("slackwater-slurm")))


def test_every_binding_gives_a_role_of_ours_to_whom_it_is_made_for() -> None:
    for binding in BINDINGS:
        [subject] = binding["subjects"]
        assert (subject["kind"], subject["namespace"]) == ("ServiceAccount", "slackwater-system")
        assert subject["name"] in ("slackwater-operator", "slackwater-slurm")
        assert binding["roleRef"]["name"].startswith(subject["name"])
        assert binding["roleRef"]["name"] in {name_of(role) for role in ROLES}


def test_people_get_our_kinds_through_the_roles_that_they_have() -> None:
    labels = {name: role(name)["metadata"]["labels"] for name in ("slackwater-view", "slackwater-edit")}

    assert labels["slackwater-view"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert "rbac.authorization.k8s.io/aggregate-to-view" not in labels["slackwater-edit"]
    assert labels["slackwater-edit"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"


def test_people_cannot_change_what_a_reclaim_says() -> None:
    verbs = {verb for _, resource, verb in rights(role("slackwater-edit")) if resource == "reclaims"}

    assert verbs == {"create", "delete"}
