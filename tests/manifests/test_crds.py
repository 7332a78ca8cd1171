"""The CustomResourceDefinitions in the checkout: made from the models, structural, small, as strict as the models."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slackwater_operator.resources import KINDS, parse
from slackwater_operator.resources.names import CATEGORY
from slackwater_operator.schemas import CRD_FOLDER, crds
from slackwater_operator.testing.admission import Admission, broken
from slackwater_operator.testing.resources import BAD, GOOD, REMOVED, Case, a_job, a_question, a_reclaim, edited

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "manifests/samples/kubernetes"
MODELS = {model.names.kind: model for model in KINDS}
MAX_BYTES = 64 * 1024  # `kubectl apply` keeps a copy in an annotation, and all of those together hold 256 KiB


def definitions() -> dict[str, dict[str, Any]]:
    files = [ROOT / CRD_FOLDER / f"{model.names.plural}.yaml" for model in KINDS]
    return {one["spec"]["names"]["kind"]: one for one in map(yaml.safe_load, map(Path.read_text, files))}


DEFINITIONS = definitions()
DOORS = {kind: Admission(definition) for kind, definition in DEFINITIONS.items()}


def samples() -> list[dict[str, Any]]:
    listed = yaml.safe_load((SAMPLES / "kustomization.yaml").read_text())["resources"]
    assert {path.name for path in SAMPLES.glob("*.yaml")} == {*listed, "kustomization.yaml"}
    return [obj for name in listed for obj in yaml.safe_load_all((SAMPLES / name).read_text())]


def version_of(kind: str) -> dict[str, Any]:
    [version] = DEFINITIONS[kind]["spec"]["versions"]
    return version


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, one in schema.get("properties", {}).items():
        yield from nodes(one, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


EVERY_NODE = [
    (kind, path, schema)
    for kind in DEFINITIONS
    for path, schema in nodes(version_of(kind)["schema"]["openAPIV3Schema"])
]


def by_id(case: Case) -> str:
    return case.id


def without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: without_empty(one) for key, one in value.items()}
        return {key: one for key, one in kept.items() if one not in ({}, [])}
    return [without_empty(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", crds())
def test_the_file_is_what_the_models_say(name: str) -> None:
    assert (ROOT / CRD_FOLDER / name).read_text() == crds()[name], "run make crds"


def test_no_file_is_left_over() -> None:
    assert {path.name for path in (ROOT / CRD_FOLDER).iterdir()} == crds().keys()


@pytest.mark.parametrize("case", BAD, ids=by_id)
def test_a_bad_object_is_refused_with_the_name_of_its_field(case: Case) -> None:
    refusals = DOORS[case.obj["kind"]].refusals(case.obj)

    assert refusals
    assert case.names in " ".join(refusals)


@pytest.mark.parametrize("case", GOOD, ids=by_id)
def test_a_good_object_is_taken(case: Case) -> None:
    assert DOORS[case.obj["kind"]].refusals(case.obj) == []


@pytest.mark.parametrize("case", GOOD, ids=by_id)
def test_the_server_fills_in_the_defaults_that_the_models_have(case: Case) -> None:
    kind = case.obj["kind"]

    stored = DOORS[kind].admitted(case.obj)

    model = MODELS[kind]
    ours: Any = parse(model, case.obj)
    assert parse(model, stored) == ours
    assert without_empty(stored["spec"]) == without_empty(ours.spec.dump())


@pytest.mark.parametrize("obj", samples(), ids=lambda obj: f"{obj['kind']} {obj['metadata']['name']}")
def test_a_sample_is_taken_by_the_models_and_at_the_door(obj: dict[str, Any]) -> None:
    parse(MODELS[obj["kind"]], obj)

    assert DOORS[obj["kind"]].refusals(obj) == []


def test_the_samples_are_a_mixed_fleet_in_two_data_centres() -> None:
    objects = samples()
    pools = {obj["metadata"]["name"]: obj["spec"] for obj in objects if obj["kind"] == "CapacityPool"}
    flavors = {obj["metadata"]["name"] for obj in objects if obj["kind"] == "GPUFlavor"}
    queues = {queue["name"] for pool in pools.values() for queue in pool["queues"]}

    assert {obj["kind"] for obj in objects} == MODELS.keys()
    assert len(pools) == 2
    assert {flavor["name"] for pool in pools.values() for flavor in pool["flavors"]} == flavors
    for obj in objects:
        assert set(obj["spec"].get("pools", ())) <= pools.keys()
        if obj["kind"] == "CleaningJob":
            assert set(obj["spec"]["flavors"]) <= flavors
            assert obj["spec"]["queue"] in queues


@pytest.mark.parametrize(
    ("place", "value"), [("spec/gpus", 2), ("spec/victims/0/node", "n2"), ("spec/deadline", "16s")]
)
def test_a_written_reclaim_is_never_changed(place: str, value: Any) -> None:
    [refusal] = DOORS["Reclaim"].refusals(edited(a_reclaim(), {place: value}), old=a_reclaim())

    assert refusal == "spec: spec is immutable"


@pytest.mark.parametrize(("place", "value"), [("spec/ledger", REMOVED), ("spec/ledger/claimName", "other")])
def test_a_job_keeps_its_ledger(place: str, value: Any) -> None:
    [refusal] = DOORS["CleaningJob"].refusals(edited(a_job(keeper={"url": "http://k"}), {place: value}), old=a_job())

    assert refusal == "spec.ledger: ledger is immutable: it holds the job's progress"
    assert DOORS["CleaningJob"].refusals(a_job(maxWorkers=3), old=a_job()) == []


def test_the_status_of_a_reclaim_may_change() -> None:
    seen = a_question() | {"status": {"phase": "Serving", "timings": {"freedAt": "2026-11-30T10:00:02.125Z"}}}

    assert DOORS["Reclaim"].refusals(seen, old=a_question()) == []


def test_every_schema_is_structural() -> None:
    forbidden = {"$ref", "anyOf", "oneOf", "allOf", "not", "title", "const", "exclusiveMinimum", "exclusiveMaximum"}
    for kind, path, schema in EVERY_NODE:
        assert not schema.keys() & forbidden, f"{kind}{path}"
        assert "type" in schema or schema.get("x-kubernetes-int-or-string"), f"{kind}{path}"
        assert not {"properties", "additionalProperties"} <= schema.keys(), f"{kind}{path}"


def test_only_pod_templates_keep_fields_that_are_not_named() -> None:
    keeping = {path for _, path, schema in EVERY_NODE if schema.get("x-kubernetes-preserve-unknown-fields")}

    assert keeping
    assert all(".template.spec" in path for path in keeping)


def test_every_list_says_how_it_is_merged() -> None:
    for kind, path, schema in EVERY_NODE:
        if schema.get("type") == "array":
            assert schema.get("x-kubernetes-list-type") in ("map", "set", "atomic"), f"{kind}{path}"


def test_every_list_and_map_of_a_spec_is_bounded() -> None:
    for kind, path, schema in EVERY_NODE:
        if path.startswith(".spec"):
            assert schema.get("type") != "array" or "maxItems" in schema, f"{kind}{path}"
            assert "additionalProperties" not in schema or "maxProperties" in schema, f"{kind}{path}"


def test_kubectl_explain_says_something_about_every_field() -> None:
    for kind, path, schema in EVERY_NODE:
        if path.startswith(".spec") and not path.endswith("[]") and ".template.spec." not in path:
            assert schema.get("description"), f"{kind}{path}"


def test_a_status_is_never_filled_in_by_the_server() -> None:
    assert [path for _, path, schema in EVERY_NODE if path.startswith(".status") and "default" in schema] == []


def test_a_default_keeps_the_rules_before_its_fields_are_filled_in() -> None:
    for kind, path, schema in EVERY_NODE:
        if "default" in schema:
            assert broken(schema, schema["default"], None, path) == [], f"{kind}{path}"


def test_rules_name_a_field_that_exists() -> None:
    for kind, path, schema in EVERY_NODE:
        for rule in schema.get("x-kubernetes-validations", ()):
            at = schema
            for part in rule.get("fieldPath", "").lstrip(".").split("."):
                at = at["properties"][part] if part else at
            assert rule["message"], f"{kind}{path}"


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_a_terminal_shows_four_to_six_columns_with_the_age_last(kind: str) -> None:
    columns = version_of(kind)["additionalPrinterColumns"]
    shown = [column["name"] for column in columns if not column.get("priority")]

    assert 4 <= len(shown) <= 6
    assert columns[-1]["name"] == shown[-1] == "Age"
    schema = version_of(kind)["schema"]["openAPIV3Schema"]
    paths = {path for path, _ in nodes(schema)} | {".metadata.creationTimestamp"}
    assert {column["jsonPath"].partition("[?")[0] for column in columns} <= paths


def test_kinds_have_short_names_and_one_category() -> None:
    short = [name for one in DEFINITIONS.values() for name in one["spec"]["names"]["shortNames"]]

    assert sorted(short) == ["clj", "cpool", "gpf", "infd", "rcl"]
    assert {tuple(one["spec"]["names"]["categories"]) for one in DEFINITIONS.values()} == {(CATEGORY,)}


def test_services_scale_by_their_floor_and_jobs_by_their_ceiling() -> None:
    scales = {kind: version_of(kind)["subresources"].get("scale", {}).get("specReplicasPath") for kind in DEFINITIONS}

    assert {kind: path for kind, path in scales.items() if path} == {
        "InferenceDeployment": ".spec.minReplicas",
        "CleaningJob": ".spec.maxWorkers",
    }
    assert all("status" in version_of(kind)["subresources"] for kind in DEFINITIONS)


@pytest.mark.parametrize("name", crds())
def test_a_file_is_small_enough_for_every_client(name: str) -> None:
    assert len((ROOT / CRD_FOLDER / name).read_bytes()) < MAX_BYTES
