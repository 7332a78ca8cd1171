"""Gateways, keepers, gates and kept templates: made, mended, removed; and where they are found."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from slackwater_operator.kube.types import DEPLOYMENTS, JOBS, PODS, SERVICES, Object
from slackwater_operator.operate.catalog import Catalog
from slackwater_operator.operate.children import Children, Images, covers
from slackwater_operator.operate.containers import labels
from slackwater_operator.operate.endpoints import Endpoints
from slackwater_operator.operate.revisions import CONTROLLER_REVISIONS, Ledger, gate_job_name
from slackwater_operator.operate.statuses.round import owner_name
from slackwater_operator.operate.watches import Watches, resource_of
from slackwater_operator.resources import names
from slackwater_operator.testing.kube import FakeKube
from slackwater_operator.testing.resources import a_job, a_service

INFD, CLJ = resource_of(names.INFERENCE_DEPLOYMENT), resource_of(names.CLEANING_JOB)
GATED = {"revisionGate": {"template": {"spec": {"containers": [{"name": "gate", "image": "gate:1"}]}}}}


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not what():
            await asyncio.sleep(0.01)


@dataclass
class Rig:
    """The children of whatever a test puts into the cluster."""

    fake: FakeKube
    watches: Watches
    catalog: Catalog
    ledger: Ledger
    children: Children
    now_s: float = 0.0

    def put(self, obj: Object, generation: int = 1) -> None:
        obj["metadata"]["generation"] = generation
        self.fake.put(INFD if obj["kind"] == INFD.kind else CLJ, obj)

    async def reconcile(self) -> None:
        await asyncio.sleep(0.1)  # the watches bring what was put
        self.catalog.look()
        services = [*self.catalog.services.valid.values()]
        self.ledger.look(services)
        await self.children.reconcile(services, [*self.catalog.jobs.valid.values()], self.ledger.choices)

    def made(self) -> set[str]:
        return {
            f"{resource.kind} {obj['metadata']['name']}"
            for resource in (DEPLOYMENTS, SERVICES, JOBS, CONTROLLER_REVISIONS)
            for obj in self.fake.objects(resource)
        }

    def writes(self) -> int:
        return sum(seen.verb in ("apply", "delete") for seen in self.fake.requests)


@asynccontextmanager
async def a_rig(gateway_image: str = "") -> AsyncIterator[Rig]:
    async with FakeKube() as fake, fake.kube() as kube:
        watches = Watches(kube)
        running = asyncio.create_task(watches.run())
        await watches.synced()
        rig: Rig

        def status_of(key: tuple[str, str]) -> Object:
            return (watches.services.get(*key) or {}).get("status") or {}

        ledger = Ledger(watches.children["jobs"].get, watches.children["controllerrevisions"].get, status_of)
        children = Children(kube, watches.children, Images(gateway_image), lambda: rig.now_s)
        rig = Rig(fake, watches, Catalog.of(watches), ledger, children)
        try:
            yield rig
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_a_service_gets_a_gateway_and_a_job_with_a_ledger_a_keeper_once() -> None:
    async with a_rig() as rig:
        rig.put(a_service())
        rig.put(a_job())

        await rig.reconcile()

        kinds = {name.rpartition("-")[0] if "Revision" in name else name for name in rig.made()}
        assert kinds == {
            "Deployment tts-gateway",
            "Service tts-gateway",
            "Service tts-gateway-control",
            "ControllerRevision tts",
            "Deployment podcasts-keeper",
            "Service podcasts-keeper",
        }
        owner = rig.fake.get(DEPLOYMENTS, "tts-gateway", "default")["metadata"]["ownerReferences"][0]
        assert owner["uid"] == rig.fake.get(INFD, "tts", "default")["metadata"]["uid"]
        assert owner["controller"] is True
        before = rig.writes()
        await rig.reconcile()
        assert rig.writes() == before


async def test_somebody_elses_gateway_and_keeper_are_left_to_them() -> None:
    async with a_rig() as rig:
        rig.put(a_service(gateway={"controlURL": "http://gateway:9090"}))
        rig.put(a_job(keeper={"url": "http://keeper:9090"}))
        rig.put(a_job("plain", ledger=None, checkpoint={"verify": "None"}))

        await rig.reconcile()

        assert [name for name in rig.made() if "Revision" not in name] == []


async def test_what_a_person_changed_or_removed_is_put_right() -> None:
    async with a_rig() as rig:
        rig.put(a_service())
        await rig.reconcile()

        rig.fake.update(DEPLOYMENTS, "tts-gateway", {"spec": {"replicas": 7}}, "default")
        rig.fake.remove(SERVICES, "tts-gateway", "default")
        await rig.reconcile()

        assert rig.fake.get(DEPLOYMENTS, "tts-gateway", "default")["spec"]["replicas"] == 1
        assert "Service tts-gateway" in rig.made()


async def test_a_gateway_that_is_not_wanted_any_more_goes() -> None:
    async with a_rig() as rig:
        rig.put(a_service())
        await rig.reconcile()

        rig.put(a_service(gateway={"controlURL": "http://gateway:9090"}), generation=2)
        await rig.reconcile()

        assert [name for name in rig.made() if "gateway" in name] == []


async def test_a_gate_runs_once_for_each_revision_and_old_templates_are_dropped_when_none_serves_with_them() -> None:
    async with a_rig() as rig:
        rig.put(a_service(**GATED))
        await rig.reconcile()
        first = rig.ledger.choices["default/tts"].current
        job = rig.fake.get(JOBS, gate_job_name("tts", first.name), "default")
        assert job["spec"]["template"]["spec"]["containers"][0]["env"] == [
            {"name": "SLACKWATER_REVISION", "value": first.name}
        ]
        assert rig.ledger.serving("default/tts") is None

        passed = {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
        rig.fake.update(JOBS, job["metadata"]["name"], passed, "default")
        await rig.reconcile()
        assert rig.ledger.serving("default/tts") == first

        template = {"spec": {"containers": [{"name": "engine", "image": "engine:2"}]}}
        rig.put(a_service(**GATED, template=template), generation=2)
        await rig.reconcile()
        second = rig.ledger.choices["default/tts"].current
        assert rig.ledger.serving("default/tts") == first
        assert len(rig.fake.objects(CONTROLLER_REVISIONS)) == 2

        rig.fake.update(JOBS, gate_job_name("tts", second.name), passed, "default")
        await rig.reconcile()
        await rig.reconcile()
        assert rig.ledger.serving("default/tts") == second
        assert [obj["metadata"]["name"] for obj in rig.fake.objects(CONTROLLER_REVISIONS)] == [f"tts-{second.name}"]
        assert [obj["metadata"]["name"] for obj in rig.fake.objects(JOBS)] == [gate_job_name("tts", second.name)]


async def test_a_namespace_without_rights_is_named_once_and_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async with a_rig() as rig:
        rig.put(a_job("podcasts"))
        rig.put(a_job("books"))
        rig.fake.fail("apply", "deployments", name="podcasts-keeper", code=403, reason="Forbidden", message="no rights")

        await rig.reconcile()

        assert "Deployment books-keeper" in rig.made()
        ((where, said),) = rig.children.problems.items()
        assert where == ("deployments", ("default", "podcasts-keeper"))
        assert "no rights" in said
        rig.now_s += 100.0
        await rig.reconcile()
        assert "Deployment podcasts-keeper" in rig.made()
        assert rig.children.problems == {}
        assert caplog.text.count("no rights") == 1


async def test_gateways_run_in_the_image_that_is_named_and_as_their_services_pods_do() -> None:
    async with a_rig("operator:1") as rig:
        container = {"name": "engine", "image": "engine:1", "imagePullPolicy": "Never"}
        rig.put(a_service(template={"spec": {"containers": [container], "imagePullSecrets": [{"name": "key"}]}}))

        await rig.reconcile()

        pod = rig.fake.get(DEPLOYMENTS, "tts-gateway", "default")["spec"]["template"]["spec"]
        (gateway,) = pod["containers"]
        assert (gateway["image"], gateway["imagePullPolicy"]) == ("operator:1", "Never")
        assert "command" not in gateway
        assert pod["imagePullSecrets"] == [{"name": "key"}]
        assert gateway["securityContext"]["readOnlyRootFilesystem"] is True


async def test_gateways_and_keepers_leave_a_lost_node_in_seconds() -> None:
    async with a_rig() as rig:
        rig.put(a_service())
        rig.put(a_job())

        await rig.reconcile()

        for name in ("tts-gateway", "podcasts-keeper"):
            pod = rig.fake.get(DEPLOYMENTS, name, "default")["spec"]["template"]["spec"]
            stays_s = {one["key"]: one["tolerationSeconds"] for one in pod["tolerations"]}
            assert stays_s == {"node.kubernetes.io/not-ready": 10, "node.kubernetes.io/unreachable": 10}
            assert {(one["operator"], one["effect"]) for one in pod["tolerations"]} == {("Exists", "NoExecute")}


def pod(name: str, kind: str, owner: str, ip: str = "10.0.0.1", **metadata: Any) -> Object:
    return {
        "metadata": {"name": name, "namespace": "default", "labels": labels(kind, owner), **metadata},
        "spec": {"containers": [{"name": kind}]},
        "status": {"phase": "Running", "podIP": ip},
    }


async def test_gateways_and_keepers_are_found_by_their_pods_and_one_that_leaves_is_not_required() -> None:
    async with a_rig() as rig:
        endpoints = Endpoints(rig.watches.pods)
        rig.put(a_service())
        rig.put(a_job())
        await rig.reconcile()
        services, jobs = [*rig.catalog.services.valid.values()], [*rig.catalog.jobs.valid.values()]
        assert endpoints.gateways(services) == {"default/tts": []}
        assert endpoints.keepers(jobs) == {}

        rig.fake.put(PODS, pod("g-1", "gateway", "tts"))
        rig.fake.put(PODS, pod("g-2", "gateway", "tts", "fd00::2", deletionTimestamp="2026-11-30T10:00:00Z"))
        (marks,) = {one.metadata.uid: keeps(rig) for one in jobs}.values()
        rig.fake.put(PODS, pod("k-1", "keeper", "podcasts", "10.0.0.3", annotations=marks))
        await until(lambda: endpoints.keepers(jobs))

        assert sorted(endpoints.gateways(services)["default/tts"]) == [
            ("http://10.0.0.1:9090", True),
            ("http://[fd00::2]:9090", False),
        ]
        assert {uid: place.url for uid, place in endpoints.keepers(jobs).items()} == {
            "default/podcasts": "http://10.0.0.3:9090"
        }
        rig.fake.remove(PODS, "g-1", "default")
        await until(lambda: len(endpoints.gateways(services)["default/tts"]) == 1)


def keeps(rig: Rig) -> dict[str, str]:
    """What the pods of the job's keeper are marked with."""
    made = rig.fake.get(DEPLOYMENTS, "podcasts-keeper", "default")
    marks: dict[str, str] = made["spec"]["template"]["metadata"]["annotations"]
    return marks


@pytest.mark.parametrize(
    ("ledger", "is_again"),
    [
        pytest.param({"claimName": "ledger"}, True, id="the job was made again"),
        pytest.param({"claimName": "another"}, False, id="the job has another ledger"),
    ],
)
async def test_a_keeper_that_still_reads_the_old_ledger_is_not_asked(ledger: Object, is_again: bool) -> None:
    async with a_rig() as rig:
        endpoints = Endpoints(rig.watches.pods)
        rig.put(a_job())
        await rig.reconcile()
        rig.fake.put(PODS, pod("k-1", "keeper", "podcasts", annotations=keeps(rig)))
        await until(lambda: endpoints.keepers(rig.catalog.jobs.valid.values()))

        if is_again:
            rig.fake.remove(CLJ, "podcasts", "default")
        rig.put(a_job(ledger=ledger), generation=2)
        await rig.reconcile()

        [job] = rig.catalog.jobs.valid.values()
        assert endpoints.keepers([job]) == {}
        owners = rig.fake.get(DEPLOYMENTS, "podcasts-keeper", "default")["metadata"]["ownerReferences"]
        assert [one["uid"] for one in owners] == [job.metadata.uid]  # so the old one's end does not take it
        rig.fake.put(PODS, pod("k-2", "keeper", "podcasts", "10.0.0.2", annotations=keeps(rig)))
        await until(lambda: endpoints.keepers([job]))
        assert endpoints.keepers([job])["default/podcasts"].url == "http://10.0.0.2:9090"


async def test_an_object_that_got_past_the_schema_stands_beside_the_others_with_its_reason() -> None:
    async with a_rig() as rig:
        rig.put(a_job("good"))
        bad = a_job("bad")
        bad["spec"]["maxWorkers"] = -3
        rig.put(bad)

        await rig.reconcile()

        assert [*rig.catalog.jobs.valid] == [("default", "good")]
        assert "maxWorkers" in rig.catalog.jobs.refused["default", "bad"]


async def test_a_status_write_makes_no_new_value_of_a_spec() -> None:
    async with a_rig() as rig:
        rig.put(a_job())
        await rig.reconcile()
        before = rig.catalog.jobs.valid["default", "podcasts"]

        rig.fake.update(CLJ, "podcasts", {"status": {"lost": 1}}, "default")
        await rig.reconcile()

        assert rig.catalog.jobs.valid["default", "podcasts"] is before


@pytest.mark.parametrize(
    ("live", "wanted", "is_covered"),
    [
        pytest.param({"a": 1, "b": 2}, {"a": 1}, True, id="defaults beside it"),
        pytest.param({"a": 1}, {"a": 1, "b": None}, False, id="something missing"),
        pytest.param({"a": [1, 2]}, {"a": [1]}, False, id="an item more"),
        pytest.param({"a": [{"b": 1, "c": 2}]}, {"a": [{"b": 1}]}, True, id="defaults within a list"),
    ],
)
def test_what_the_server_adds_is_no_difference(live: Object, wanted: Object, is_covered: bool) -> None:
    assert covers(live, wanted) is is_covered


@pytest.mark.parametrize(
    ("child", "owner"),
    [
        ("tts-gateway", "tts"),
        ("tts-gateway-control", "tts"),
        ("a-b-keeper", "a-b"),
        ("a-b-gate-0123456789", "a-b"),
        ("a-b-0123456789", "a-b"),
    ],
)
def test_a_childs_name_tells_its_owner(child: str, owner: str) -> None:
    assert owner_name(child) == owner
