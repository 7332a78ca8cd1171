"""What the API server says when it refuses, told in a sentence: who lacks which right, what a pod has to change."""

import json
from pathlib import Path

import pytest
import yaml

from slackwater_operator.kube.errors import Call, Forbidden, Invalid, from_status
from slackwater_operator.kube.refusals import NAMESPACE_ROLE, OPERATOR_ACCOUNT
from slackwater_operator.resources import names

ROOT = Path(__file__).parents[2]
CALL = Call("create", "Pod default/tts-1")
OPERATOR = "system:serviceaccount:slackwater-system:slackwater-operator"


def refused(message: str, code: int = 403, reason: str = "Forbidden", causes: tuple[dict[str, str], ...] = ()) -> str:
    error = from_status(CALL, code, {"message": message, "reason": reason, "details": {"causes": causes}})
    assert isinstance(error, Forbidden if code == 403 else Invalid)
    return str(error)


def no_right(user: str, place: str) -> str:
    return f'pods "tts-1" is forbidden: User "{user}" cannot create resource "pods" in API group "" {place}'


def test_a_namespace_without_rights_is_told_with_the_command_that_gives_them() -> None:
    said = refused(no_right(OPERATOR, 'in the namespace "default"'))

    assert said == (
        "create Pod default/tts-1: 403 Forbidden: the operator has no rights in namespace default (create pods); "
        "to give them: kubectl create rolebinding slackwater-operator -n default "
        "--clusterrole=slackwater-operator-namespace --serviceaccount=slackwater-system:slackwater-operator"
    )


def test_a_right_that_the_operators_own_role_lacks_is_mended_by_its_manifests() -> None:
    said = refused(no_right(OPERATOR, "at the cluster scope"))

    assert said.endswith("the operator may not create pods in the cluster; apply its manifests again")


def test_a_person_without_rights_is_told_which() -> None:
    assert refused(no_right("ann", 'in the namespace "default"')).endswith(
        "ann may not create pods in namespace default"
    )


@pytest.mark.parametrize(
    ("user", "subject"),
    [("ann", "--user=ann"), ("system:serviceaccount:ci:robot", "--serviceaccount=ci:robot")],
)
def test_who_lacks_a_right_is_named_as_a_binding_names_it(user: str, subject: str) -> None:
    error = from_status(CALL, 403, {"message": no_right(user, "at the cluster scope"), "reason": "Forbidden"})

    assert isinstance(error, Forbidden)
    assert error.denial is not None
    assert error.denial.subject == subject


def test_a_pod_that_the_security_standard_does_not_take_is_told_what_to_change() -> None:
    said = refused(
        'pods "tts-1" is forbidden: violates PodSecurity "restricted:latest": '
        'privileged (container "worker" must not set securityContext.privileged=true), '
        "allowPrivilegeEscalation != false "
        '(container "worker" must set securityContext.allowPrivilegeEscalation=false), '
        'unrestricted capabilities (container "worker" must set securityContext.capabilities.drop=["ALL"]), '
        'runAsNonRoot != true (pod or container "worker" must set securityContext.runAsNonRoot=true)'
    )

    assert said == (
        "create Pod default/tts-1: 403 Forbidden: the namespace takes only pods of the standard restricted: "
        'container "worker" must not set securityContext.privileged=true; '
        'container "worker" must set securityContext.allowPrivilegeEscalation=false; and 2 more'
    )


@pytest.mark.parametrize(
    "value",
    [
        json.dumps({"capabilities": {"drop": ["ALL"]}, "privileged": True, "note": 'a } and a \\" inside'}),
        "core.SecurityContext{Capabilities:(*core.Capabilities)(0xc0), Privileged:(*bool)(0xc1)}",
    ],
    ids=["JSON", "as Go prints it"],
)
def test_a_whole_object_is_not_part_of_the_sentence(value: str) -> None:
    why = "cannot set `allowPrivilegeEscalation` to false and `privileged` to true"
    field = "spec.containers[0].securityContext"
    causes = ({"field": field, "message": f"Invalid value: {value}: {why}"},)

    said = refused(f'Pod "tts-1" is invalid: {field}: Invalid value: {value}: {why}', 422, "Invalid", causes)

    assert said == f"create Pod default/tts-1: {field}: {why} (422 Invalid)"


def test_a_short_value_stays() -> None:
    causes = ({"field": "spec.gpus", "message": 'Invalid value: "x": must be a number'},)

    assert 'spec.gpus: Invalid value: "x": must be a number' in refused("is invalid", 422, "Invalid", causes)


def test_any_other_refusal_is_told_as_it_came() -> None:
    quota = 'pods "tts-1" is forbidden: exceeded quota: gpus, requested: pods=1, used: pods=4, limited: pods=4'

    assert refused(quota) == f"create Pod default/tts-1: {quota} (403 Forbidden)"


def test_the_names_are_those_of_the_manifests() -> None:
    files = [*(ROOT / "manifests/operator").glob("rbac*.yaml")]
    roles = {one["metadata"]["name"] for file in files for one in yaml.safe_load_all(file.read_text()) if one}

    assert OPERATOR_ACCOUNT == names.SERVICE_ACCOUNT
    assert {NAMESPACE_ROLE, names.VIEW_CLUSTER_ROLE} <= roles
