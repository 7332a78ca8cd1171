"""The pure parts of `cluster.kube`: reading pods and nodes, making pods, names and times."""

import json
from typing import Any

import pytest

from slackwater_operator.cluster.kube.clock import Clock
from slackwater_operator.cluster.kube.endings import first_verdict, last_verdict
from slackwater_operator.cluster.kube.fits import fits, read_wishes
from slackwater_operator.cluster.kube.keep import KEEP_NODE, KEEP_POD
from slackwater_operator.cluster.kube.making import Place, replica, worker
from slackwater_operator.cluster.kube.owners import Owner
from slackwater_operator.cluster.kube.pods import Ended, read_pod
from slackwater_operator.cluster.kube.takes import reservations
from slackwater_operator.resources import CleaningJob, GPUFlavor, InferenceDeployment, names, parse
from slackwater_operator.testing.resources import a_flavor, a_job, a_service, edited

TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
UID = {"metadata/uid": "1-2-3", "metadata/generation": 1}


def place(*, is_bound: bool = True, **flavor: Any) -> Place:
    return Place("n1", "east", parse(GPUFlavor, a_flavor("h200", tolerations=[TAINT], **flavor)), is_bound)


def made_worker(job: dict[str, Any] | None = None, **flavor: Any) -> dict[str, Any]:
    obj = edited(job or a_job("clean", input={"claimName": "audio", "path": "/in"}), UID)
    return worker(parse(CleaningJob, obj), place(**flavor), "clean-0001", "idle")


def made_replica(template: dict[str, Any] | None = None, *, is_bound: bool = True, reclaim: str = "") -> dict[str, Any]:
    service = parse(InferenceDeployment, edited(a_service("tts"), UID))
    given = template or {"spec": {"containers": [{"name": "engine", "image": "engine:1"}]}}
    return replica(service, given, "r1", place(is_bound=is_bound), 2, "tts-0001", "traffic", reclaim)


@pytest.mark.parametrize(("asked_s", "given_s"), [(None, 120), (5, 120), (600, 600)])
def test_a_replica_that_somebody_else_ends_has_the_time_that_its_streams_were_promised(
    asked_s: int | None, given_s: int
) -> None:
    grace = {} if asked_s is None else {"terminationGracePeriodSeconds": asked_s}

    body = made_replica({"spec": {"containers": [{"name": "engine", "image": "engine:1"}], **grace}})

    assert body["spec"]["terminationGracePeriodSeconds"] == given_s


def test_a_worker_speaks_its_command_line_with_ledger_receipt_and_its_own_name() -> None:
    spec = made_worker()["spec"]

    [container] = spec["containers"]
    assert " ".join(container["args"]) == (
        "clean run /in --output /ledger --job clean --worker $(POD_NAME) --receipt-file /dev/termination-log"
    )
    assert container["env"][0]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert {(mount["mountPath"], mount.get("readOnly", False)) for mount in container["volumeMounts"]} == {
        ("/ledger", False),
        ("/in", True),
        ("/tmp", False),
    }
    assert (container["terminationMessagePath"], spec["restartPolicy"]) == ("/dev/termination-log", "Never")


def test_arguments_of_the_template_stand() -> None:
    job = edited(a_job("clean"), {"spec/template/spec/containers/0/args": ["clean", "run", "/elsewhere"]})

    assert made_worker(job)["spec"]["containers"][0]["args"] == ["clean", "run", "/elsewhere"]


@pytest.mark.parametrize("body", [made_worker(), made_replica()], ids=["worker", "replica"])
def test_a_pod_is_restricted_owned_tolerant_and_bound(body: dict[str, Any]) -> None:
    spec, metadata = body["spec"], body["metadata"]

    assert spec["securityContext"]["runAsNonRoot"] is True
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]) == (65532, 65532)
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    assert spec["nodeName"] == "n1"
    assert TAINT in spec["tolerations"]
    [owner] = metadata["ownerReferences"]
    assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == ("1-2-3", True, True)
    assert metadata["labels"][names.LABEL_MANAGED_BY] == names.MANAGED_BY


def test_gpus_go_to_the_main_container_by_the_flavor_s_name() -> None:
    side = {"name": "side", "image": "side:1"}
    job = edited(a_job("clean"), {"spec/gpusPerWorker": 4})
    job["spec"]["template"]["spec"]["containers"].append(side)

    main, other = made_worker(job, resourceName="amd.com/gpu")["spec"]["containers"]

    assert main["resources"] == {"limits": {"amd.com/gpu": "4"}, "requests": {"amd.com/gpu": "4"}}
    assert "resources" not in other


def test_an_engine_is_ready_when_it_says_so_on_its_port() -> None:
    spec = made_replica()["spec"]

    [engine] = spec["containers"]
    assert engine["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": 8080}
    assert engine["startupProbe"]["periodSeconds"] == 1
    assert engine["ports"] == [{"name": "http", "containerPort": 8080}]
    assert spec["priorityClassName"] == "slackwater-inference"


def test_a_replica_that_waits_adds_its_node_to_every_alternative_of_the_template() -> None:
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    disk = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n9"]}]}
    wanted = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [zone, disk]}}
    template = {
        "spec": {"containers": [{"name": "engine", "image": "e"}], "affinity": {"nodeAffinity": wanted}},
    }

    body = made_replica(template, is_bound=False, reclaim="tts-1")

    terms = body["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    only = {"key": "metadata.name", "operator": "In", "values": ["n1"]}
    assert terms["nodeSelectorTerms"] == [
        {**zone, "matchFields": [only]},
        {"matchFields": [*disk["matchFields"], only]},
    ]
    assert "nodeName" not in body["spec"]
    assert body["metadata"]["annotations"][names.ANNOTATION_RECLAIM] == "tts-1"
    assert template["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] == {
        "nodeSelectorTerms": [zone, disk]
    }


def test_what_is_read_from_a_slimmed_pod_is_what_is_read_from_the_whole() -> None:
    body = made_worker() | {
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True"}, {"type": "Initialized", "status": "True"}],
            "containerStatuses": [{"name": "worker", "state": {"running": {"startedAt": "2026-11-29T10:00:02Z"}}}],
        }
    }
    body["metadata"] |= {"uid": "u", "resourceVersion": "7", "creationTimestamp": "2026-11-29T10:00:00Z"}
    whole = read_pod(json.loads(json.dumps(body)))

    slim = KEEP_POD(json.loads(json.dumps(body)))

    assert read_pod(slim) == whole
    assert (whole.owner, whole.policy_flavor, whole.gpus("nvidia.com/gpu")) == ("default/clean", "east/h200", 1)
    assert len(json.dumps(slim)) < 0.6 * len(json.dumps(body))


def test_a_pod_that_is_not_ours_and_wants_no_gpu_keeps_its_name_alone() -> None:
    pod = {
        "metadata": {"name": "web", "namespace": "shop", "resourceVersion": "1", "labels": {"a": "b"}},
        "spec": {"containers": [{"name": "web", "resources": {"limits": {"cpu": "1", "hugepages-2Mi": "4Mi"}}}]},
    }

    assert KEEP_POD(pod) == {"metadata": {"name": "web", "namespace": "shop", "resourceVersion": "1"}}


def test_a_node_keeps_its_devices_labels_and_readiness() -> None:
    node = {
        "metadata": {"name": "n1", "labels": {"zone": "a"}, "annotations": {"x": "y"}},
        "spec": {"unschedulable": True, "podCIDR": "10.0.0.0/24"},
        "status": {
            "capacity": {"cpu": "4", "nvidia.com/gpu": "8"},
            "allocatable": {"nvidia.com/gpu": "7"},
            "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": "x"}],
            "images": [{"names": ["a"]}],
        },
    }

    assert KEEP_NODE(node) == {
        "metadata": {"name": "n1", "labels": {"zone": "a"}},
        "spec": {"unschedulable": True},
        "status": {
            "capacity": {"nvidia.com/gpu": "8"},
            "allocatable": {"nvidia.com/gpu": "7"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


@pytest.mark.parametrize(
    ("containers", "first", "wanted"),
    [
        pytest.param([1, 2], [], 3, id="containers together"),
        pytest.param([1], [4], 4, id="what runs before may want more"),
        pytest.param([2], [1], 2, id="or less"),
    ],
)
def test_a_pod_wants_what_the_scheduler_counts(containers: list[int], first: list[int], wanted: int) -> None:
    def some(counts: list[int]) -> list[dict[str, Any]]:
        return [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": str(count)}}} for count in counts]

    pod = read_pod({"metadata": {"name": "p"}, "spec": {"containers": some(containers), "initContainers": some(first)}})

    assert pod.gpus("nvidia.com/gpu") == wanted


def in_zone(operator: str, *values: str) -> dict[str, Any]:
    term = {"matchExpressions": [{"key": "zone", "operator": operator, "values": list(values)}]}
    return {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    }


@pytest.mark.parametrize(
    ("spec", "taints", "does"),
    [
        pytest.param({}, [], True, id="asks nothing"),
        pytest.param({"nodeSelector": {"zone": "a"}}, [], True, id="selector"),
        pytest.param({"nodeSelector": {"zone": "b"}}, [], False, id="another selector"),
        pytest.param(in_zone("In", "a", "b"), [], True, id="affinity"),
        pytest.param(in_zone("NotIn", "a"), [], False, id="affinity to others"),
        pytest.param(in_zone("DoesNotExist"), [], False, id="affinity to none"),
        pytest.param({}, [{"key": "k", "value": "v", "effect": "NoSchedule"}], False, id="taint"),
        pytest.param({}, [{"key": "k", "effect": "PreferNoSchedule"}], True, id="soft taint"),
        pytest.param({"tolerations": [{"operator": "Exists"}]}, [{"key": "k", "effect": "NoExecute"}], True, id="any"),
        pytest.param(
            {"tolerations": [{"key": "k", "value": "w"}]},
            [{"key": "k", "value": "v", "effect": "NoSchedule"}],
            False,
            id="tolerates another",
        ),
    ],
)
def test_a_pod_fits_a_node_as_the_scheduler_says(
    spec: dict[str, Any], taints: list[dict[str, Any]], does: bool
) -> None:
    assert fits(read_wishes(spec), "n1", {"zone": "a"}, taints) is does


@pytest.mark.parametrize("words", ["", "  \n", "Traceback\nValueError", "{not json", '{"path": "/x"}', "[]"])
def test_only_a_whole_receipt_is_one(words: str) -> None:
    assert Ended(75, words, None, None).receipt is None


def test_a_receipt_may_be_padded() -> None:
    receipt = {"path": "/x", "size_bytes": 1, "sha256": "ab"}

    assert Ended(75, json.dumps(receipt) + " " * 99 + "\n", None, None).receipt == receipt


def test_a_worker_that_never_began_loses_nothing_and_one_that_vanished_is_not_vouched_for() -> None:
    never, vanished = first_verdict(None, had_begun=False), first_verdict(None, had_begun=True)
    assert never is not None
    assert vanished is not None
    assert (never.outcome, vanished.outcome) == ("Checkpointed", "Unverified")
    assert last_verdict(Ended(75, "", None, None), None).outcome == "Unverified"


@pytest.mark.parametrize(
    ("freed", "room", "gpus", "expected"),
    [
        pytest.param({"a": (2, 2)}, {}, 1, {"a": 2}, id="one replica a victim"),
        pytest.param({"a": (2, 2)}, {}, 2, {"a": 1}, id="two victims for one replica"),
        pytest.param({"a": (1, 1), "b": (1, 1)}, {}, 2, {}, id="not on two nodes"),
        pytest.param({"a": (1, 1)}, {"a": 1}, 2, {"a": 1}, id="with one that is free"),
        pytest.param({"a": (8, 1)}, {}, 1, {"a": 1}, id="never more than victims"),
        pytest.param({"a": (1, 1)}, {"a": 2}, 2, {}, id="what is free already counts for itself"),
    ],
)
def test_replicas_wait_for_what_a_take_back_brings(
    freed: dict[str, tuple[int, int]], room: dict[str, int], gpus: int, expected: dict[str, int]
) -> None:
    assert reservations(freed, room, gpus) == expected


def test_back_off_doubles_to_a_minute_and_an_edit_clears_it() -> None:
    owner = Owner(generation=1)
    delays = [owner.failed(100.0, "said") for _ in range(8)]
    owner.broken, owner.is_done = "bad", True
    was_able = owner.may_start(1000.0)

    owner.edited(2)

    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert (was_able, owner.may_start(100.0), owner.failures) == (False, True, 0)


def test_workers_that_find_nothing_to_do_are_no_failure_and_those_that_end_together_count_once() -> None:
    owner = Owner()
    for ended_s in (100.0, 100.2, 103.0):
        owner.found_nothing(ended_s)

    assert (owner.failures, owner.rests, owner.not_before_s) == (0, 2, 105.0)
    assert owner.why_not(104.0) == (
        "its workers found nothing left to do and its keeper has not said so yet; it waits for 1 s more"
    )


def test_a_wall_clock_that_was_set_is_noticed_and_jitter_is_not() -> None:
    wall_s = [1000.0]
    clock = Clock(lambda: wall_s[0])
    first = clock.sync(10.0)
    wall_s[0] = 1001.1
    jitter = clock.sync(11.0)
    before = clock.moment(1000.0)
    wall_s[0] = 1062.0
    was_set = clock.sync(12.0)

    assert (first, jitter, was_set) == (False, False, True)
    assert (before, clock.moment(1050.0), clock.wall(0.0)) == (10.0, 0.0, 1050.0)
