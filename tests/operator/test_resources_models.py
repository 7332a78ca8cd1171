"""The five kinds as typed values: bad objects are refused by name, good ones give what was written or the default."""

import re
from typing import Any

import pytest

from slackwater_operator.core import PermanentError
from slackwater_operator.resources import KINDS, CleaningJob, GPUFlavor, InferenceDeployment, Reclaim, parse
from slackwater_operator.resources.base import duration, field_name, seconds
from slackwater_operator.resources.crd import crd
from slackwater_operator.testing.admission import Admission
from slackwater_operator.testing.resources import (
    BAD,
    GOOD,
    REMOVED,
    Case,
    a_flavor,
    a_job,
    a_reclaim,
    a_service,
    edited,
)

MODELS = {model.names.kind: model for model in KINDS}


def by_id(case: Case) -> str:
    return case.id


@pytest.mark.parametrize("case", BAD, ids=by_id)
def test_a_bad_object_is_refused_with_the_name_of_its_field(case: Case) -> None:
    with pytest.raises(PermanentError) as refused:
        parse(MODELS[case.obj["kind"]], case.obj)

    _, _, said = str(refused.value).partition(case.obj["metadata"]["name"])
    assert case.names in said
    assert "\n" not in said


@pytest.mark.parametrize("case", GOOD, ids=by_id)
def test_a_good_object_is_taken(case: Case) -> None:
    parsed = parse(MODELS[case.obj["kind"]], case.obj)

    assert parsed.metadata.name == case.obj["metadata"]["name"]


def test_there_are_bad_objects_of_every_kind() -> None:
    assert len({case.id for case in BAD}) == len(BAD) >= 40
    assert {case.obj["kind"] for case in BAD} == {case.obj["kind"] for case in GOOD} == MODELS.keys()


def test_a_refusal_says_which_object_what_came_and_how_much_more_is_wrong() -> None:
    bad = edited(a_service("tts", "serving"), {"spec/model": REMOVED, "spec/drain/grace": "soon"})

    with pytest.raises(PermanentError) as refused:
        parse(InferenceDeployment, bad)

    assert str(refused.value) == "InferenceDeployment serving/tts: spec.model: is required (and 1 more)"


@pytest.mark.parametrize(
    ("obj", "field", "said"),
    [
        pytest.param(
            a_job(checkpoint={"flushTimeout": "8"}),
            "spec.checkpoint.flushTimeout",
            "must be a duration such as 8s, 250ms or 1m30s",
            id="a duration without a unit",
        ),
        pytest.param(
            a_service(autoscaling={"panicWindow": "6"}),
            "spec.autoscaling.panicWindow",
            "must be a duration such as 8s, 250ms or 1m30s",
            id="one that is compared with another",
        ),
        pytest.param(
            a_service(minReplicas=99),
            "spec.maxReplicas",
            "maxReplicas must be at least minReplicas: 4 is less than 99",
            id="scaled beyond its bound",
        ),
        pytest.param(
            a_job(minWorkers=9),
            "spec.maxWorkers",
            "maxWorkers must be at least minWorkers: 8 is less than 9",
            id="more workers at least than at most",
        ),
        pytest.param(
            edited(a_job(), {"spec/template/spec/terminationGracePeriodSeconds": 8}),
            "spec.template.spec.terminationGracePeriodSeconds",
            "template.spec.terminationGracePeriodSeconds must be longer than checkpoint.flushTimeout, got 8 s",
            id="no time to flush",
        ),
    ],
)
def test_one_mistake_is_one_message_that_says_how_to_mend_it_at_the_door_and_after(
    obj: dict[str, Any], field: str, said: str
) -> None:
    model = MODELS[obj["kind"]]

    assert Admission(crd(model)).refusals(obj) == [f"{field}: {said}"]
    with pytest.raises(PermanentError, match=re.escape(said)) as refused:
        parse(model, obj)
    assert " more)" not in str(refused.value)


def test_an_object_of_another_kind_or_version_is_refused() -> None:
    with pytest.raises(PermanentError, match="kind: must be GPUFlavor, got 'CleaningJob'"):
        parse(GPUFlavor, a_job())
    with pytest.raises(PermanentError, match=r"apiVersion: must be slackwater\.dev/v1alpha1, got 'slackwater\.dev/v9'"):
        parse(GPUFlavor, a_flavor() | {"apiVersion": "slackwater.dev/v9"})


def test_an_item_of_a_list_comes_without_its_kind() -> None:
    item = {key: value for key, value in a_flavor().items() if key not in ("apiVersion", "kind")}

    assert parse(GPUFlavor, item).metadata.name == "h200"


def test_durations_are_read_as_seconds() -> None:
    service = parse(
        InferenceDeployment,
        edited(a_service(), {"spec/autoscaling/objective/ttfaP95": "250ms", "spec/drain/grace": "1m30s"}),
    )

    assert service.spec.autoscaling.objective.ttfa_p95_s == 0.25
    assert service.spec.drain.grace_s == 90
    assert service.spec.autoscaling.stale_after_s == 5


@pytest.mark.parametrize(("length_s", "written"), [(0, "0s"), (8, "8s"), (0.25, "0.25s"), (1.2345, "1.234s")])
def test_seconds_are_written_as_durations(length_s: float, written: str) -> None:
    assert duration(length_s) == written
    assert seconds(written) == pytest.approx(length_s, abs=0.001)


def test_a_template_keeps_the_fields_that_we_do_not_know() -> None:
    volumes = [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}]
    written = edited(
        a_service(),
        {
            "spec/template/spec/volumes": volumes,
            "spec/template/spec/containers/0/env": [{"name": "A", "value": "1"}],
            "spec/template/spec/containers/0/resources": {"limits": {"cpu": "2"}, "claims": [{"name": "x"}]},
        },
    )

    spec = parse(InferenceDeployment, written).spec.template.pod_spec

    assert spec["volumes"] == volumes
    assert spec["containers"][0]["env"] == [{"name": "A", "value": "1"}]
    assert spec["containers"][0]["resources"] == {"limits": {"cpu": "2"}, "claims": [{"name": "x"}]}
    assert spec["terminationGracePeriodSeconds"] == 30


def test_each_pod_is_made_from_a_dict_of_its_own() -> None:
    template = parse(CleaningJob, a_job()).spec.template

    template.pod_spec["containers"].append({"name": "other"})

    assert len(template.pod_spec["containers"]) == 1


def test_a_status_of_another_version_is_read_as_far_as_it_is_known() -> None:
    seen = a_job() | {"status": {"workers": {"running": 3, "dreaming": 4}, "mood": "calm"}}

    assert parse(CleaningJob, seen).status.workers.running == 3


def test_what_is_written_is_what_was_read() -> None:
    written = a_reclaim()["spec"]

    spec = parse(Reclaim, a_reclaim()).spec.dump()

    assert spec == written | {"dryRun": False, "victims": [written["victims"][0] | {"estimatedLostSeconds": 0.0}]}


@pytest.mark.parametrize(
    ("attribute", "name"),
    [("max_gpus", "maxGPUs"), ("gpus_per_worker", "gpusPerWorker"), ("control_url", "controlURL"), ("gpus", "gpus")],
)
def test_a_field_is_named_as_the_api_names_it(attribute: str, name: str) -> None:
    assert field_name(attribute) == name
