"""How a service moves to another revision, and which revision that is."""

from typing import Any

import pytest

from slackwater_operator.cluster.kube.ports import ReplicaView, ServiceView
from slackwater_operator.core import Phase
from slackwater_operator.loop import ServiceSpec
from slackwater_operator.operate.revisions import Gate, Ledger, gate_of, record_name, revision_of
from slackwater_operator.operate.rollout import SURGE_PATIENCE_S, Rollout, Step
from slackwater_operator.resources import InferenceDeployment, parse
from slackwater_operator.testing.resources import a_service

SPEC = ServiceSpec("ns/tts", 1, 4, (), 0, 1)


def replica(uid: str, revision: str, phase: Phase = Phase.RUNNING) -> ReplicaView:
    return ReplicaView(uid, "east/h200", "n", phase, revision, phase is Phase.RUNNING, "traffic")


def view(*replicas: ReplicaView) -> ServiceView:
    return ServiceView("ns/tts", replicas, None)


def test_nothing_moves_while_all_replicas_are_of_the_revision_that_serves() -> None:
    assert Rollout().step(SPEC, view(replica("a", "new")), "new", 0.0) == Step()


def test_nothing_moves_while_no_revision_may_serve() -> None:
    assert Rollout().step(SPEC, view(replica("a", "old")), None, 0.0) == Step()


def test_starts_one_more_then_drains_an_old_one_and_so_on_until_none_is_left() -> None:
    rollout = Rollout()
    old_a, old_b = replica("a", "old"), replica("b", "old")

    steps = [
        rollout.step(SPEC, view(old_a, old_b), "new", 0.0),
        rollout.step(SPEC, view(old_a, old_b, replica("c", "new", Phase.STARTING)), "new", 1.0),
        rollout.step(SPEC, view(old_a, old_b, replica("c", "new")), "new", 2.0),
        rollout.step(SPEC, view(replica("a", "old", Phase.LEAVING), old_b, replica("c", "new")), "new", 3.0),
        rollout.step(SPEC, view(old_b, replica("c", "new")), "new", 4.0),
        rollout.step(SPEC, view(old_b, replica("c", "new"), replica("d", "new")), "new", 5.0),
        rollout.step(SPEC, view(replica("c", "new"), replica("d", "new")), "new", 6.0),
    ]

    assert steps == [
        Step((3, 4)),  # one more
        Step((3, 4)),  # it loads
        Step((3, 4), "a"),
        Step((2, 4)),  # the one that leaves holds the one GPU more
        Step((3, 4)),
        Step((3, 4), "b"),
        Step(),
    ]


def test_one_more_is_allowed_above_the_services_maximum() -> None:
    spec = ServiceSpec("ns/tts", 1, 1, (), 0, 1)

    assert Rollout().step(spec, view(replica("a", "old")), "new", 0.0) == Step((2, 2))


def test_an_old_one_that_serves_nobody_goes_at_once() -> None:
    step = Rollout().step(SPEC, view(replica("a", "old", Phase.STARTING)), "new", 0.0)

    assert step == Step((1, 4), "a")


def test_when_no_gpu_comes_for_one_more_an_old_one_goes_first_but_never_the_only_one() -> None:
    rollout, both = Rollout(), view(replica("a", "old"), replica("b", "old"))
    rollout.step(SPEC, both, "new", 0.0)
    assert rollout.step(SPEC, both, "new", SURGE_PATIENCE_S).drain is None
    assert rollout.step(SPEC, both, "new", SURGE_PATIENCE_S + 1.0).drain == "a"

    alone, one = Rollout(), view(replica("a", "old"))
    alone.step(SPEC, one, "new", 0.0)
    assert alone.step(SPEC, one, "new", 10 * SURGE_PATIENCE_S).drain is None


def service(**spec: Any) -> InferenceDeployment:
    made = a_service(**spec)
    made["metadata"]["generation"] = 1
    return parse(InferenceDeployment, made)


GATED = {"revisionGate": {"template": {"spec": {"containers": [{"name": "gate", "image": "gate:1"}]}}}}


def template(image: str) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "engine", "image": image}]}}


def of(service: InferenceDeployment, **child: Any) -> dict[str, Any]:
    return {"metadata": {"ownerReferences": [{"uid": service.metadata.uid}]}, **child}


def job(condition: str) -> dict[str, Any]:
    return {"status": {"conditions": [{"type": condition, "status": "True", "message": "Job has failed"}]}}


def test_equal_templates_have_one_name_and_another_image_or_model_has_another() -> None:
    names = {
        revision_of(one).name for one in (service(), service(template=template("engine:2")), service(model="large"))
    }

    assert len(names) == 3
    assert revision_of(service()).name == revision_of(service(maxReplicas=3)).name


@pytest.mark.parametrize(
    ("found", "gate"),
    [
        pytest.param(None, Gate.WAITING, id="no Job yet"),
        pytest.param({"status": {}}, Gate.WAITING, id="it runs"),
        pytest.param(job("Complete"), Gate.PASSED, id="it ended well"),
        pytest.param(job("Failed"), Gate.FAILED, id="it failed"),
    ],
)
def test_a_gate_is_what_its_job_says(found: dict[str, Any] | None, gate: Gate) -> None:
    assert gate_of(found)[0] is gate


def test_without_a_gate_the_newest_revision_serves_at_once() -> None:
    ledger = Ledger(lambda *_: None, lambda *_: None, lambda _: {"servingRevision": "0123456789"})

    ledger.look([service()])

    assert ledger.serving("default/tts") == revision_of(service())


def test_a_first_revision_waits_for_its_gate() -> None:
    jobs: dict[str, dict[str, Any]] = {}
    ledger = Ledger(lambda _, name: jobs.get(name), lambda *_: None, lambda _: {})
    gated = service(**GATED)
    ledger.look([gated])
    assert ledger.serving("default/tts") is None

    jobs[f"tts-gate-{revision_of(gated).name}"] = of(gated, **job("Complete"))
    ledger.look([gated])

    assert ledger.serving("default/tts") == revision_of(gated)


def test_the_old_revision_serves_while_the_new_one_is_at_its_gate_and_after_it_failed() -> None:
    old, new = service(**GATED), service(**GATED, template=template("engine:2"))
    before, after = revision_of(old), revision_of(new)
    records = {record_name("tts", before.name): of(new, data={"template": before.template})}
    jobs: dict[str, dict[str, Any]] = {}
    ledger = Ledger(
        lambda _, name: jobs.get(name), lambda _, name: records.get(name), lambda _: {"servingRevision": before.name}
    )
    ledger.look([new])
    assert ledger.serving("default/tts") == before
    assert ledger.choices["default/tts"].gate is Gate.WAITING

    jobs[f"tts-gate-{after.name}"] = of(new, **job("Failed"))
    ledger.look([new])
    choice = ledger.choices["default/tts"]

    assert (choice.gate, choice.said, choice.serving) == (Gate.FAILED, "Job has failed", before)


def test_a_service_that_is_made_again_goes_through_its_own_gate() -> None:
    old = service(**GATED)
    new = old.model_copy(update={"metadata": old.metadata.model_copy(update={"uid": "another"})})
    there = of(old, **job("Complete"))
    ledger = Ledger(lambda *_: there, lambda *_: None, lambda _: {})
    ledger.look([old])
    assert ledger.serving("default/tts") == revision_of(old)

    ledger.look([new])

    assert (ledger.serving("default/tts"), ledger.choices["default/tts"].gate) == (None, Gate.WAITING)


def test_a_gate_that_is_added_to_a_service_stops_no_revision_that_serves() -> None:
    gated = service(**GATED)
    ledger = Ledger(lambda *_: None, lambda *_: None, lambda _: {"servingRevision": revision_of(gated).name})

    ledger.look([gated])

    assert ledger.serving("default/tts") == revision_of(gated)
