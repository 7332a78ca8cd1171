"""Our kinds on a real API server: it refuses what the models refuse, by the same field, and has the same defaults."""

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slackwater_controlplane.build import Programs
from slackwater_controlplane.client import Admin, ApiError
from slackwater_controlplane.cluster import ControlPlane
from slackwater_operator.resources import KINDS, names, parse
from slackwater_operator.resources.conditions import complete
from slackwater_operator.resources.reclaim import MAX_VICTIMS
from slackwater_operator.testing.admission import Admission
from slackwater_operator.testing.odd import FULL, odd_objects
from slackwater_operator.testing.resources import (
    BAD,
    GOOD,
    Case,
    a_flavor,
    a_job,
    a_pool,
    a_question,
    a_reclaim,
    a_service,
    edited,
)

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "manifests/crd" / f"{kind.plural}.yaml" for kind in names.KINDS]
SAMPLES = ROOT / "manifests/samples"
MODELS = {model.names.kind: model for model in KINDS}
SEED = 7
NUM_CHANGES = 100  # of each object

pytestmark = pytest.mark.controlplane


@pytest.fixture(scope="module")
def admin(control_plane: ControlPlane) -> Admin:
    """The shared control plane with our kinds."""
    control_plane.admin.apply_file(*FILES)
    control_plane.admin.wait_established(*(kind.crd for kind in names.KINDS))
    return control_plane.admin


@pytest.fixture
def place(admin: Admin, namespace: str) -> Iterator[str]:
    """A namespace that is empty of our kinds again at the end."""
    yield namespace
    for kind in names.KINDS:
        if kind.namespaced:
            admin.delete_all(resource(kind), namespace)


def resource(kind: names.KindNames) -> str:
    return f"{kind.plural}.{names.GROUP}"


def by_id(case: Case) -> str:
    return case.id


def tried(admin: Admin, obj: dict[str, Any], validation: str = "Strict") -> Any:
    """The server's answer to a create that it does not keep."""
    kind = MODELS[obj["kind"]].names
    namespace = f"/namespaces/{obj['metadata']['namespace']}" if kind.namespaced else ""
    path = f"/apis/{names.API_VERSION}{namespace}/{kind.plural}"
    return admin.raw("POST", path, obj, params={"dryRun": "All", "fieldValidation": validation})


def in_place(obj: dict[str, Any], namespace: str) -> dict[str, Any]:
    return edited(obj, {"metadata/namespace": namespace}) if MODELS[obj["kind"]].names.namespaced else obj


@pytest.mark.parametrize("kind", names.KINDS, ids=lambda kind: kind.kind)
def test_a_kind_is_structural_and_its_rules_are_within_the_servers_budget(admin: Admin, kind: names.KindNames) -> None:
    conditions = {
        one["type"]: one
        for one in admin.get("customresourcedefinitions.apiextensions.k8s.io", kind.crd)["status"]["conditions"]
    }

    assert conditions["Established"]["status"] == "True"
    assert conditions["NamesAccepted"]["status"] == "True"
    assert "NonStructuralSchema" not in conditions


@pytest.mark.parametrize("case", BAD, ids=by_id)
def test_a_bad_object_is_refused_with_the_name_of_its_field(admin: Admin, case: Case) -> None:
    with pytest.raises(ApiError) as refused:
        tried(admin, case.obj)

    assert refused.value.code in (400, 422)
    _, _, said = str(refused.value).partition("is invalid:" if refused.value.code == 422 else "400")
    assert case.names in said


@pytest.mark.parametrize("case", GOOD, ids=by_id)
def test_a_good_object_is_stored_with_the_defaults_of_the_models(admin: Admin, case: Case) -> None:
    kind = case.obj["kind"]

    stored = tried(admin, case.obj).json()

    ours, theirs = parse(MODELS[kind], case.obj), parse(MODELS[kind], stored)
    assert ours.spec == theirs.spec  # type: ignore[attr-defined]
    definition = yaml.safe_load((ROOT / f"manifests/crd/{MODELS[kind].names.plural}.yaml").read_text())
    assert stored["spec"] == Admission(definition).admitted(case.obj)["spec"]


@pytest.mark.parametrize("name", FULL)
def test_the_server_and_our_offline_judge_agree_on_every_field(admin: Admin, name: str) -> None:
    obj = FULL[name]
    door = Admission(yaml.safe_load((ROOT / f"manifests/crd/{MODELS[obj['kind']].names.plural}.yaml").read_text()))

    for change, odd in odd_objects(obj, NUM_CHANGES, SEED):
        try:
            tried(admin, odd)
            said = ""
        except ApiError as error:
            said = str(error)
        ours = door.refusals(odd)
        assert bool(said) == bool(ours), f"{change}: the server {said or 'takes it'}; we {ours or 'take it'}"


@pytest.mark.parametrize(("folder", "count"), [("kubernetes", 9), ("cluster-up", 5)])
def test_the_samples_are_taken(admin: Admin, place: str, folder: str, count: int) -> None:
    files = (SAMPLES / folder).glob("[!k]*.yaml")
    objects = [obj for file in files for obj in yaml.safe_load_all(file.read_text()) if obj["kind"] in MODELS]

    answers = [tried(admin, in_place(obj, place)) for obj in objects]

    assert len(answers) == count
    assert not [answer.headers.get("Warning") for answer in answers if "Warning" in answer.headers]


def test_an_unknown_field_is_warned_of_where_it_is_not_refused(admin: Admin) -> None:
    obj = edited(a_service(), {"spec/maxReplica": 9})

    answer = tried(admin, obj, "Warn")

    assert answer.headers["Warning"] == r'299 - "unknown field \"spec.maxReplica\""'
    assert "maxReplica" not in answer.json()["spec"]


def test_a_pod_template_keeps_every_field(admin: Admin) -> None:
    spec = {
        "volumes": [{"name": "a", "emptyDir": {"medium": "Memory"}}],
        "hostname": "x",
        "shareProcessNamespace": True,
    }
    obj = edited(a_job(), {f"spec/template/spec/{name}": value for name, value in spec.items()})

    stored = tried(admin, obj).json()["spec"]["template"]["spec"]

    assert {name: stored[name] for name in spec} == spec


def test_scale_moves_the_floor_of_a_service(admin: Admin, place: str) -> None:
    admin.create(in_place(a_service(), place))
    status = {"replicas": 3, "selector": "slackwater.dev/owner=tts"}
    admin.patch("inferencedeployments.slackwater.dev", "tts", {"status": status}, place, subresource="status")

    admin.patch("inferencedeployments.slackwater.dev", "tts", {"spec": {"replicas": 2}}, place, subresource="scale")

    scale = admin.get("inferencedeployments.slackwater.dev", "tts", place, subresource="scale")
    assert scale["status"] == status
    assert admin.get("inferencedeployments.slackwater.dev", "tts", place)["spec"]["minReplicas"] == 2


def test_scale_moves_the_ceiling_of_a_job_also_to_nothing(admin: Admin, place: str) -> None:
    admin.create(in_place(a_job(), place))

    admin.patch("cleaningjobs.slackwater.dev", "podcasts", {"spec": {"replicas": 0}}, place, subresource="scale")

    assert admin.get("cleaningjobs.slackwater.dev", "podcasts", place)["spec"]["maxWorkers"] == 0


def test_a_service_is_not_scaled_above_its_maximum(admin: Admin, place: str) -> None:
    admin.create(in_place(a_service(), place))

    with pytest.raises(ApiError, match="maxReplicas must be at least minReplicas"):
        admin.patch("inferencedeployments.slackwater.dev", "tts", {"spec": {"replicas": 5}}, place, subresource="scale")


def test_the_spec_of_a_reclaim_stays_and_its_status_moves(admin: Admin, place: str) -> None:
    admin.create(in_place(a_reclaim(), place))

    with pytest.raises(ApiError, match="spec is immutable"):
        admin.patch("reclaims.slackwater.dev", "tts-1", {"spec": {"gpus": 2}}, place)
    with pytest.raises(ApiError, match="spec is immutable"):
        admin.patch("reclaims.slackwater.dev", "tts-1", {"spec": {"victims": None, "dryRun": True}}, place)
    admin.patch("reclaims.slackwater.dev", "tts-1", {"status": {"phase": "Freed"}}, place, subresource="status")

    seen = admin.get("reclaims.slackwater.dev", "tts-1", place)
    assert (seen["spec"]["gpus"], seen["status"]) == (1, {"phase": "Freed"})


def test_a_job_keeps_its_ledger(admin: Admin, place: str) -> None:
    admin.create(in_place(a_job(), place))

    with pytest.raises(ApiError, match=r"spec\.ledger: .* ledger is immutable"):
        admin.patch("cleaningjobs.slackwater.dev", "podcasts", {"spec": {"ledger": {"claimName": "other"}}}, place)


def test_a_large_reclaim_is_within_what_rules_may_cost_and_an_object_may_weigh(admin: Admin, place: str) -> None:
    victims = [
        {
            "pod": f"slackwater-workers/podcasts-{number:05}-abcdefgh",
            "job": "slackwater-workers/podcasts",
            "node": f"gpu-node-{number:05}.dc-east.example.org",
            "uid": f"00000000-0000-0000-0000-{number:012}",
            "gpus": 1,
            "estimatedLostSeconds": 12.25,
        }
        for number in range(MAX_VICTIMS)
    ]

    written = admin.create(in_place(a_reclaim(victims=victims, gpus=MAX_VICTIMS), place))

    assert len(written["spec"]["victims"]) == MAX_VICTIMS
    outcomes = [{"pod": one["pod"], "outcome": "Checkpointed", "verified": True, "digest": "0" * 64} for one in victims]
    status = {"phase": "Serving", "victims": outcomes, "timings": {"freedAt": "2026-11-30T10:00:02.125000Z"}}
    admin.patch("reclaims.slackwater.dev", "tts-1", {"status": status}, place, subresource="status")


def test_two_writers_each_own_their_conditions(admin: Admin, place: str) -> None:
    admin.create(in_place(a_job(), place))
    for manager, type_ in (("slackwater/status", "Complete"), ("somebody/else", "Audited")):
        condition = {
            "type": type_,
            "status": "False",
            "reason": "ItemsOpen",
            "message": "",
            "lastTransitionTime": "2026-11-30T10:00:00Z",
        }
        body = {key: value for key, value in in_place(a_job(), place).items() if key != "spec"}
        admin.apply(body | {"status": {"conditions": [condition]}}, manager=manager, subresource="status")

    seen = admin.get("cleaningjobs.slackwater.dev", "podcasts", place)["status"]

    assert [one["type"] for one in seen["conditions"]] == ["Complete", "Audited"]
    assert seen.keys() == {"conditions"}  # nothing is filled in that nobody saw


@pytest.mark.parametrize("obj", [a_service(), a_job(), a_question()], ids=lambda obj: obj["kind"])
def test_every_condition_of_the_closed_set_is_taken_as_a_status(admin: Admin, place: str, obj: dict[str, Any]) -> None:
    created = admin.create(in_place(obj, place))
    kind = MODELS[obj["kind"]].names
    now = parse(MODELS[obj["kind"]], created).metadata.creation_timestamp
    assert now is not None
    conditions = [one.dump() for one in complete(kind, (), now=now, generation=1)]

    admin.patch(
        resource(kind), obj["metadata"]["name"], {"status": {"conditions": conditions}}, place, subresource="status"
    )

    read = parse(MODELS[obj["kind"]], admin.get(resource(kind), obj["metadata"]["name"], place))
    assert read.status.conditions == complete(kind, (), now=now, generation=1)  # type: ignore[attr-defined]


def kubectl(programs: Programs, admin: Admin, *arguments: str) -> str:
    command = [str(programs.path("kubectl")), "--kubeconfig", str(admin.kubeconfig), *arguments]
    # A cache of its own: kubectl's usual one may know an earlier server at this address, or this one without our kinds.
    with tempfile.TemporaryDirectory() as cache:
        command += ["--cache-dir", cache]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kubectl_lists_explains_and_scales_our_kinds(admin: Admin, place: str, controlplane_programs: Programs) -> None:
    for obj in (a_service(), a_job(), a_question()):
        admin.create(in_place(obj, place))
    usage = {"total": 8, "inference": 2, "training": 0, "cleaning": 5, "idle": 1}
    suffix = place[-8:]
    admin.create(a_pool(f"east-{suffix}"))
    admin.create(a_flavor(f"h200-{suffix}"))
    try:
        admin.patch("capacitypools.slackwater.dev", f"east-{suffix}", {"status": usage}, subresource="status")

        listed = kubectl(controlplane_programs, admin, "get", "gpu", "-n", place)
        pool = kubectl(controlplane_programs, admin, "get", "cpool", f"east-{suffix}").split("\n")
        explained = kubectl(controlplane_programs, admin, "explain", "infd.spec.autoscaling.staleAfter")
        kubectl(controlplane_programs, admin, "scale", "clj/podcasts", "--replicas=3", "-n", place)
    finally:
        admin.delete("capacitypools.slackwater.dev", f"east-{suffix}")
        admin.delete("gpuflavors.slackwater.dev", f"h200-{suffix}")

    found = ("gpuflavor", "capacitypool", "inferencedeployment", "cleaningjob", "reclaim")
    assert all(f"{kind}.slackwater.dev/" in listed for kind in found)
    assert pool[0].split() == ["NAME", "GPUS", "INFERENCE", "TRAINING", "CLEANING", "IDLE", "AGE"]
    assert pool[1].split()[1:6] == ["8", "2", "0", "5", "1"]
    assert "nothing shrinks and nothing is evicted" in " ".join(explained.split())
    assert admin.get("cleaningjobs.slackwater.dev", "podcasts", place)["spec"]["maxWorkers"] == 3


def test_kubectl_applies_the_kinds_also_from_the_clients_side(admin: Admin, controlplane_programs: Programs) -> None:
    """Which keeps a whole copy of each in an annotation."""
    applied = kubectl(controlplane_programs, admin, "apply", "-k", str(FILES[0].parent), "-o", "name").split()

    assert {name.partition("/")[2] for name in applied} == {kind.crd for kind in names.KINDS}
    for kind in names.KINDS:
        annotations = admin.get("customresourcedefinitions.apiextensions.k8s.io", kind.crd)["metadata"]["annotations"]
        assert len(annotations["kubectl.kubernetes.io/last-applied-configuration"]) < 64 * 1024
