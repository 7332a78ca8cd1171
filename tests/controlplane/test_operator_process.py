"""The real operator process on a real API server, with the rights that its manifests give it and nodes of kwok."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slackwater_controlplane.build import Programs
from slackwater_controlplane.client import ApiError
from slackwater_controlplane.operator_rig import ACCOUNT, FLEET, MANIFESTS, PLURALS, SLOTS, Rig, all_words, new_rig
from slackwater_operator.resources import names
from slackwater_operator.testing.processes import wait_until
from slackwater_operator.testing.resources import a_job, a_pool, a_reclaim, a_service

pytestmark = [pytest.mark.controlplane, pytest.mark.timeout(240)]

SAFE_POD = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
SAFE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.fixture(scope="module")
def shared_rig(controlplane_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with new_rig(controlplane_programs, tmp_path_factory.mktemp("operator")) as rig:
        yield rig


@pytest.fixture
def rig(shared_rig: Rig, tmp_path: Path) -> Iterator[Rig]:
    shared_rig.folder = tmp_path
    shared_rig.gateway.say(in_flight=0, queued=0)
    yield shared_rig
    shared_rig.clean()


def test_fills_what_is_idle_and_gives_it_back_when_the_gateway_says_so(rig: Rig) -> None:
    rig.add_fleet()
    with rig.operator("one") as one:
        wait_until(lambda: rig.bound("inference") == 1 and rig.bound("cleaning") == 7, 60, all_words(one))
        wait_until(lambda: rig.gateway.real.told, 20, all_words(one))

        rig.gateway.say(in_flight=SLOTS, queued=2 * SLOTS, arrivals_total=3 * SLOTS)

        wait_until(lambda: len(rig.gateway.real.told or ()) == 3, 60, all_words(one))
        nodes = [pod["spec"]["nodeName"] for kind in ("inference", "cleaning") for pod in rig.pods(kind)]
        assert max(nodes.count(name) for name in set(nodes)) <= 4
        reclaims = rig.admin.list("reclaims.slackwater.dev", FLEET)
        assert sum(len(reclaim["spec"]["victims"]) for reclaim in reclaims) == 2

        def counts() -> tuple[int, int]:
            status = rig.service()["status"]
            return status["desiredReplicas"], status["readyReplicas"]

        wait_until(lambda: counts() == (3, 3), 30, lambda: f"{rig.service()['status']}\n{one.words()}")
        assert rig.condition(rig.service(), "SignalsFresh")["status"] == "True"
        pool = rig.admin.get("capacitypools.slackwater.dev", "east")
        assert pool["status"]["total"] == 8
        assert "Forbidden" not in one.words()


def test_a_new_template_takes_over_one_by_one_and_never_with_fewer_replicas(rig: Rig) -> None:
    rig.add_fleet(minReplicas=2)
    with rig.operator("one") as one:
        wait_until(lambda: rig.bound("inference") == 2 and rig.bound("cleaning") == 6, 60, all_words(one))
        wait_until(lambda: len(rig.gateway.real.told or ()) == 2, 30, all_words(one))
        before = rig.service()["status"]["servingRevision"]
        fewest: list[int] = []

        rig.admin.patch("inferencedeployments.slackwater.dev", "tts", {"spec": {"model": "newer"}}, FLEET)

        def is_done() -> bool:
            pods = rig.pods("inference")
            fewest.append(len(rig.gateway.real.told or ()))
            revisions = {pod["metadata"]["annotations"][names.ANNOTATION_REVISION] for pod in pods}
            return len(pods) == 2 and before not in revisions

        wait_until(is_done, 90, all_words(one))
        assert min(fewest) >= 2
        wait_until(lambda: rig.service()["status"]["servingRevision"] != before, 20, all_words(one))
        wait_until(lambda: rig.bound("cleaning") == 6, 60, all_words(one))


def test_a_gateway_that_falls_silent_shrinks_nothing(rig: Rig) -> None:
    rig.add_fleet()
    with rig.operator("one") as one:
        rig.gateway.say(in_flight=2 * SLOTS, arrivals_total=2 * SLOTS)
        wait_until(lambda: rig.bound("inference") == 2, 60, all_words(one))

        rig.gateway.call(rig.gateway.real.stop())
        try:
            wait_until(
                lambda: rig.condition(rig.service(), "SignalsFresh")["reason"] == "SignalsStale", 30, all_words(one)
            )
            time.sleep(5)

            assert rig.bound("inference") == 2
            assert rig.service()["status"]["mode"] == "Hold"
            assert one.words().count("does not answer") == 1
        finally:
            rig.gateway.call(rig.gateway.real.start())
        wait_until(lambda: rig.condition(rig.service(), "SignalsFresh")["status"] == "True", 30, all_words(one))


def test_another_replica_acts_within_ten_seconds_of_the_leaders_death(rig: Rig) -> None:
    rig.add_fleet()
    with rig.operator("one") as one:
        wait_until(one.leads, 60, all_words(one))
        with rig.operator("two") as two:
            wait_until(lambda: rig.bound("cleaning") == 7, 60, all_words(one, two))
            wait_until(lambda: two.health()[0] == 200, 60, all_words(two))
            assert not two.leads()

            one.kill()
            rig.gateway.say(in_flight=3 * SLOTS, arrivals_total=3 * SLOTS)
            took_s = wait_until(
                lambda: any(victim for victim in rig.admin.list("reclaims.slackwater.dev", FLEET)),
                30,
                all_words(one, two),
            )

            assert took_s <= 10.0
            assert two.leads()
            wait_until(lambda: rig.bound("inference") == 3, 30, all_words(two))


def test_the_standby_writes_nothing_and_nobody_lists_once_things_are_steady(rig: Rig) -> None:
    rig.add_fleet()
    with rig.operator("one") as one:
        wait_until(one.leads, 60, all_words(one))
        with rig.operator("two") as two:
            wait_until(lambda: rig.bound("cleaning") == 7, 60, all_words(one, two))
            wait_until(lambda: two.health()[0] == 200, 60, all_words(two))
            time.sleep(3)
            since = rig.plane.audit_position()
            time.sleep(20)

            asked = [event for event in rig.plane.audit(since) if event.user == ACCOUNT]

            assert [event.uri for event in asked if event.verb == "list"] == []
            writes = [event for event in asked if event.verb not in ("get", "list", "watch")]
            by_standby = [event for event in writes if "(two_" in event.user_agent]
            assert [event.uri for event in by_standby if event.resource != "leases"] == []
            by_leader = [f"{event.verb} {event.uri}" for event in writes if event.resource != "leases"]
            assert len(by_leader) <= 4, by_leader


def test_a_leader_that_was_frozen_writes_nothing_when_it_wakes_and_leads_no_longer(rig: Rig) -> None:
    rig.add_fleet()
    with rig.operator("one") as one:
        wait_until(one.leads, 60, all_words(one))
        with rig.operator("two") as two:
            wait_until(lambda: rig.bound("cleaning") == 7, 60, all_words(one, two))
            wait_until(lambda: two.health()[0] == 200, 60, all_words(two))
            one.freeze()
            rig.gateway.say(in_flight=3 * SLOTS, arrivals_total=3 * SLOTS)
            wait_until(two.leads, 30, all_words(two))
            wait_until(lambda: rig.bound("inference") == 3, 30, all_words(two))
            since = rig.plane.audit_position()

            one.thaw()
            time.sleep(5)

            by_one = [event for event in rig.plane.audit(since) if "(one_" in event.user_agent]
            writes = [event.uri for event in by_one if event.verb not in ("get", "list", "watch")]
            # An Event that was queued before may still come: it is about what was so.
            assert [uri for uri in writes if "/leases" not in uri and "/events" not in uri] == []
            assert two.leads()
            wait_until(lambda: not one.leads(), 20, all_words(one))
            assert rig.bound("inference") == 3


def test_children_are_made_once_as_the_server_and_restricted_pod_security_want_them(rig: Rig) -> None:
    level = "pod-security.kubernetes.io/enforce"
    rig.admin.patch("namespaces", FLEET, {"metadata": {"labels": {level: "restricted"}}})
    rig.kwok.add_nodes(1)
    gate = {"template": {"spec": {"containers": [{"name": "gate", "image": "gate:1"}], "securityContext": SAFE_POD}}}
    gate["template"]["spec"]["containers"][0]["securityContext"] = SAFE
    rig.admin.create(a_pool())
    rig.admin.create(a_service(namespace=FLEET, minReplicas=0, revisionGate=gate))
    rig.admin.create(a_job(namespace=FLEET, ledger={"claimName": "ledger"}))
    try:
        with rig.operator("one") as one:
            wait_until(lambda: len(rig.admin.list("jobs.batch", FLEET)) == 1, 60, all_words(one))
            wait_until(lambda: len(rig.pods("gateway")) == 1 and len(rig.pods("keeper")) == 1, 60, all_words(one))
            wait_until(lambda: len(rig.pods("gate")) == 1, 60, all_words(one))
            time.sleep(3)
            since = rig.plane.audit_position()
            time.sleep(8)

            asked = [event for event in rig.plane.audit(since) if event.user == ACCOUNT]
            kinds = ("deployments", "services", "jobs", "controllerrevisions")
            assert [event.uri for event in asked if event.resource in kinds and event.verb != "watch"] == []
            assert len(rig.admin.list("services", FLEET)) == 3
            (record,) = rig.admin.list("controllerrevisions.apps", FLEET)
            assert record["data"]["template"]["spec"]["containers"][0]["name"] == "engine"
            service = rig.service()
            assert rig.condition(service, "RevisionGated")["reason"] == "GateRunning"

            rig.admin.delete("inferencedeployments.slackwater.dev", "tts", FLEET)
            rig.admin.wait_gone("deployments.apps", "tts-gateway", FLEET)  # by its owner's end
    finally:
        rig.admin.patch("namespaces", FLEET, {"metadata": {"labels": {level: None}}})


def test_kopf_leaves_no_trace_on_any_object(rig: Rig) -> None:
    rig.add_fleet()
    with rig.operator("one") as one:
        wait_until(lambda: rig.bound("cleaning") == 7, 60, all_words(one))
        wait_until(lambda: one.health()[0] == 200, 30, all_words(one))

        objects = [obj for plural in (*PLURALS, "pods") for obj in rig.admin.list(plural)]

        assert [obj["metadata"]["name"] for obj in objects if obj["metadata"].get("finalizers")] == []
        assert [obj for obj in objects if "kopf" in str(obj["metadata"])] == []
        assert rig.admin.list("events", FLEET, fields="reportingComponent=kopf") == []


def test_sigterm_ends_in_order_and_releases_the_lease(rig: Rig) -> None:
    rig.add_fleet()
    with rig.operator("one") as one:
        wait_until(one.leads, 60, all_words(one))
        assert rig.holder().startswith("one_")
        before_s = time.monotonic()

        code = one.stop()

        assert code == 0, one.words()
        assert rig.holder() == ""
        assert time.monotonic() - before_s < 10
        assert "Traceback" not in one.words()


def test_a_resource_that_got_past_the_schema_stops_no_other(rig: Rig) -> None:
    crd = "cleaningjobs.slackwater.dev"
    with_schema = rig.admin.get("customresourcedefinitions.apiextensions.k8s.io", crd)
    loose = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    versions = [{**one, "schema": {"openAPIV3Schema": loose}} for one in with_schema["spec"]["versions"]]
    rig.admin.patch("customresourcedefinitions.apiextensions.k8s.io", crd, {"spec": {"versions": versions}})
    try:
        rig.add_fleet()

        def make_bad() -> bool:
            try:
                return bool(rig.admin.apply(a_job("bad", FLEET, restartPolicy="Never")))
            except ApiError:
                return False  # the server still judges by the old schema

        wait_until(make_bad)
        with rig.operator("one") as one:
            wait_until(lambda: rig.bound("cleaning") == 7, 60, all_words(one))

            wait_until(
                lambda: rig.condition(rig.admin.get(crd, "bad", FLEET), "Accepted")["reason"] == "SpecRefused",
                20,
                all_words(one),
            )
            message = rig.condition(rig.admin.get(crd, "bad", FLEET), "Accepted")["message"]
            assert "restartPolicy" in message
            wait_until(
                lambda: [
                    event
                    for event in rig.admin.list("events.events.k8s.io", FLEET)
                    if event["regarding"]["name"] == "bad" and event["reason"] == "SpecRefused"
                ]
            )
    finally:
        rig.admin.delete(crd, "bad", FLEET)
        rig.admin.apply_file(MANIFESTS / "crd" / "cleaningjobs.yaml")


def test_a_dry_run_is_answered_and_nothing_moves(rig: Rig) -> None:
    rig.add_fleet()
    with rig.operator("one") as one:
        rig.gateway.say(in_flight=SLOTS, arrivals_total=SLOTS)
        wait_until(lambda: rig.bound("cleaning") == 7, 60, all_words(one))
        question = a_reclaim("question", FLEET)
        question["spec"] = {
            "forRef": {"kind": "InferenceDeployment", "name": "tts"},
            "dryRun": True,
            "multiplier": "3",
        }

        rig.admin.create(question)

        answered = rig.admin.wait_for(
            "reclaims.slackwater.dev", "question", lambda one: bool(one.get("status", {}).get("answer")), FLEET
        )
        assert len(answered["status"]["answer"]["workers"]) == 2
        assert answered["status"]["answer"]["unmet"] == 0
        assert rig.bound("cleaning") == 7


def test_survives_an_api_server_that_restarts_and_one_that_says_nothing_for_half_a_minute(rig: Rig) -> None:
    rig.add_fleet(workers=3)
    with rig.operator("one") as one:
        wait_until(lambda: rig.bound("cleaning") == 3, 60, all_words(one))

        rig.plane.restart("kube-apiserver")
        rig.admin.patch("cleaningjobs.slackwater.dev", "podcasts", {"spec": {"maxWorkers": 5}}, FLEET)
        wait_until(lambda: rig.bound("cleaning") == 5, 60, all_words(one))

        rig.plane.pause("kube-apiserver")
        time.sleep(30)
        rig.plane.resume("kube-apiserver")
        wait_until(lambda: rig.plane.is_ready("kube-apiserver"), 30)
        rig.admin.patch("cleaningjobs.slackwater.dev", "podcasts", {"spec": {"maxWorkers": 7}}, FLEET)

        wait_until(lambda: rig.bound("cleaning") == 7, 60, all_words(one))
        assert one.child.poll() is None
        wait_until(lambda: one.health()[0] == 200, 30, all_words(one))
