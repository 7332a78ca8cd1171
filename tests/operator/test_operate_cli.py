"""`slackwater get`, `explain` and `what-if` against a pretended API server: what they print, and how they fail."""

import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from slackwater_operator import cli
from slackwater_operator.kube.types import EVENTS, PODS
from slackwater_operator.operate.watches import resource_of
from slackwater_operator.resources import names
from slackwater_operator.testing.kube import FakeKube
from slackwater_operator.testing.resources import a_flavor, a_job, a_pool, a_service

RESOURCES = {kind.kind: resource_of(kind) for kind in names.KINDS}


@pytest.fixture
def fake() -> Iterator[FakeKube]:
    with FakeKube.in_thread() as fake:
        for obj in (a_flavor(), a_pool(), a_service(), a_job()):
            fake.put(RESOURCES[obj["kind"]], obj)
        fake.add_node("n-1", 4, {"nvidia.com/gpu.product": "h200"})
        for index in range(3):
            fake.put(PODS, worker(f"podcasts-{index}"))
        yield fake


@pytest.fixture
def kubeconfig(fake: FakeKube, tmp_path: Path) -> str:
    return str(fake.write_kubeconfig(tmp_path / "kubeconfig"))


def worker(name: str) -> dict[str, object]:
    marks = {
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_KIND: names.POD_CLEANING,
        names.LABEL_OWNER: "podcasts",
        names.LABEL_FLAVOR: "h200",
        names.LABEL_POOL: "east",
    }
    gpu = {"limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": "1"}}
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "labels": marks,
            "creationTimestamp": "2026-11-30T08:00:00Z",
        },
        "spec": {"nodeName": "n-1", "containers": [{"name": "worker", "image": "worker:1", "resources": gpu}]},
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-30T08:00:01Z"}],
            "containerStatuses": [{"name": "worker", "state": {"running": {"startedAt": "2026-11-30T08:00:01Z"}}}],
        },
    }


def event(name: str, uid: str, note: str) -> dict[str, object]:
    return {
        "metadata": {"name": name, "namespace": "default"},
        "eventTime": "2026-11-30T10:00:01.000000Z",
        "type": "Normal",
        "reason": "ReplicaStarted",
        "note": note,
        "regarding": {"kind": "InferenceDeployment", "name": "tts", "namespace": "default", "uid": uid},
    }


def call(command: str, *arguments: str) -> int:
    app = command.replace("-", "_")
    return cli.call(EntryPoint(command, f"slackwater_operator.operate.cli:{app}", cli.GROUP), [*arguments])


def test_get_shows_who_holds_each_gpu(kubeconfig: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("get", "--kubeconfig", kubeconfig) == 0

    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split()[:4] == ["n-1", "east", "h200", "4"]
    assert "cleaning default/podcasts x3" in last
    assert last.endswith("1 idle")


def test_get_shows_one_namespace_to_somebody_who_may_look_at_no_other(
    fake: FakeKube, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.put(RESOURCES["CleaningJob"], a_job("others", "other"))

    assert call("get", "jobs", "-n", "default", "--kubeconfig", kubeconfig) == 0

    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["JOB", "default/podcasts"]
    assert {(seen.plural, seen.namespace) for seen in fake.requests} == {("cleaningjobs", "default")}


@pytest.mark.parametrize("topic", ["pools", "jobs", "services", "reclaims"])
def test_get_prints_json_for_scripts(kubeconfig: str, capsys: pytest.CaptureFixture[str], topic: str) -> None:
    assert call("get", topic, "-o", "json", "--kubeconfig", kubeconfig) == 0

    assert topic in json.loads(capsys.readouterr().out)


def test_explain_tells_conditions_and_decisions(
    fake: FakeKube, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    condition = {"type": "Ready", "status": "False", "reason": "NoReplicas", "message": "1 is wanted, none is there"}
    fake.update(RESOURCES["InferenceDeployment"], "tts", {"status": {"conditions": [condition]}}, "default")
    [service] = fake.objects(RESOURCES["InferenceDeployment"])
    fake.put(EVENTS, event("e-1", service["metadata"]["uid"], "started 1 replica: traffic needs it"))
    fake.put(EVENTS, event("e-2", "of-a-service-that-is-gone", "started 9 replicas: traffic needs it"))

    assert call("explain", "infd/tts", "--kubeconfig", kubeconfig) == 0

    said = capsys.readouterr().out
    assert "1 is wanted, none is there" in said
    assert "started 1 replica: traffic needs it" in said
    assert "started 9 replicas" not in said  # of a deleted service of the same name


def test_what_if_names_the_workers_that_would_stop_and_changes_nothing(
    fake: FakeKube, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.update(RESOURCES["InferenceDeployment"], "tts", {"spec": {"minReplicas": 3}}, "default")

    assert call("what-if", "infd/tts", "--traffic", "3", "-o", "json", "--kubeconfig", kubeconfig) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["replicas"] == {"have": 0, "need": 3, "onIdleGPUs": 1, "unmet": 0}
    assert [worker["job"] for worker in found["workers"]] == ["default/podcasts"] * 2
    assert found["demandIsAssumed"] is True
    assert {seen.verb for seen in fake.requests} <= {"list", "watch", "raw", "get"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["explain", "tts"], "wanted KIND/NAME with one of gpf, cpool, infd, clj, rcl", id="no kind"),
        pytest.param(["explain", "pod/tts"], "wanted KIND/NAME", id="not one of our kinds"),
        pytest.param(["explain", "infd/other"], "get InferenceDeployment default/other", id="no such object"),
        pytest.param(["what-if", "clj/podcasts"], "traffic is a service's: wanted infd/NAME", id="not a service"),
        pytest.param(["what-if", "infd/other"], "there is no service default/other", id="no such service"),
        pytest.param(["get", "-n", "default"], "belong to no namespace: leave -n out", id="a namespace of pools"),
        pytest.param(["get", "nodes"], "'nodes' is not one of", id="no such topic"),
        pytest.param(["get", "--context", "other"], "no context 'other'", id="no such context"),
    ],
)
def test_an_error_is_one_line_and_exit_code_two(
    kubeconfig: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert call(*arguments, "--kubeconfig", kubeconfig) == cli.BAD_INPUT

    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def no_right(resource: str, place: str) -> str:
    what = f'cannot list resource "{resource}" in API group "" {place}'
    return f'{resource} "none" is forbidden: User "ann@corp" {what}'


@pytest.mark.parametrize(
    ("arguments", "plural", "place", "said"),
    [
        pytest.param(
            ["get"],
            "nodes",
            "at the cluster scope",
            "ann@corp may not list nodes in the cluster; an administrator lets you look: kubectl create "
            "clusterrolebinding slackwater-view-cluster-ann-corp --clusterrole=slackwater-view-cluster --user=ann@corp",
            id="the fleet",
        ),
        pytest.param(
            ["get", "jobs", "-n", "default"],
            "cleaningjobs",
            'in the namespace "default"',
            "ann@corp may not list cleaningjobs in namespace default; an administrator lets you look: kubectl create "
            "rolebinding view-ann-corp -n default --clusterrole=view --user=ann@corp",
            id="a namespace",
        ),
    ],
)
def test_somebody_who_may_not_look_is_told_at_once_who_can_change_that_and_how(
    fake: FakeKube,
    kubeconfig: str,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    plural: str,
    place: str,
    said: str,
) -> None:
    fake.fail("list", plural, code=403, reason="Forbidden", message=no_right(plural, place))

    assert call(*arguments, "--kubeconfig", kubeconfig) == cli.BAD_INPUT

    assert said in capsys.readouterr().err


def test_explain_tells_the_conditions_to_somebody_who_may_not_read_events(
    fake: FakeKube, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = no_right("events", 'in the namespace "default"')
    fake.fail("list", "events", code=403, reason="Forbidden", message=message)

    assert call("explain", "cpool/east", "--kubeconfig", kubeconfig) == 0

    said = capsys.readouterr().out
    assert "CapacityPool east" in said
    assert "not shown: ann@corp may not list events in namespace default" in said


def test_a_kubeconfig_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("operator", "run", "--kubeconfig", str(tmp_path / "none")) == cli.BAD_INPUT

    assert "cannot read kubeconfig" in capsys.readouterr().err
