"""The leader's work and the whole process, against a pretended API server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from slackwater_operator.accounts import Accounts
from slackwater_operator.core import Action, PermanentError, Reason, Snapshot, Verb
from slackwater_operator.kube.types import EVENTS, LEASES, PODS, Object
from slackwater_operator.operate import lead
from slackwater_operator.operate.catalog import Catalog
from slackwater_operator.operate.children import Images
from slackwater_operator.operate.endpoints import Endpoints
from slackwater_operator.operate.lead import FAILURES, Leader, Means, within
from slackwater_operator.operate.metrics import Books, Metrics, child_state, gpus_by_state
from slackwater_operator.operate.process import Operator
from slackwater_operator.operate.services import limits, missing_flavors, missing_pools, service_spec
from slackwater_operator.operate.settings import Settings
from slackwater_operator.operate.statuses import answers
from slackwater_operator.operate.watches import Watches, resource_of
from slackwater_operator.resources import CapacityPool, InferenceDeployment, names, parse
from slackwater_operator.testing import cases
from slackwater_operator.testing.kube import FakeKube
from slackwater_operator.testing.processes import free_port
from slackwater_operator.testing.remotes import StandInGateway, StandInKeeper
from slackwater_operator.testing.resources import a_flavor, a_job, a_pool, a_question, a_service

RESOURCES = {kind.kind: resource_of(kind) for kind in names.KINDS}


async def until(what: Callable[[], object], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not what():
            await asyncio.sleep(0.01)


def put(fake: FakeKube, obj: Object) -> None:
    obj["metadata"]["generation"] = 1
    fake.put(RESOURCES[obj["kind"]], obj)


def pods(fake: FakeKube, kind: str) -> list[Object]:
    return [pod for pod in fake.objects(PODS) if pod["metadata"]["labels"][names.LABEL_KIND] == kind]


@dataclass
class Rig:
    """A leader over a pretended cluster."""

    fake: FakeKube
    leader: Leader
    metrics: Metrics
    events: list[tuple[str, str]]
    task: "asyncio.Task[None]"


@asynccontextmanager
async def leading(*objects: Object, nodes: int = 1, **settings: Any) -> AsyncIterator[Rig]:
    async with FakeKube() as fake, fake.kube() as kube:
        for obj in (a_flavor(), *objects):
            put(fake, obj)
        for index in range(nodes):
            fake.add_node(f"n-{index}", 4, {"nvidia.com/gpu.product": "h200"})
        watches = Watches(kube)
        running = asyncio.create_task(watches.run())
        await watches.synced()
        events: list[tuple[str, str]] = []
        told = Settings(identity="me", **settings)

        def emit(obj: Object, type_: str, reason: str, message: str, action: str) -> None:
            events.append((obj["metadata"]["name"], reason))

        metrics = Metrics()
        means = Means(kube, watches, Catalog.of(watches), Endpoints(watches.pods), told, metrics, emit)
        leader = Leader(means, Images(), asyncio.Event())
        rig = Rig(fake, leader, metrics, events, asyncio.create_task(leader.run()))
        try:
            yield rig
        finally:
            rig.task.cancel()
            running.cancel()
            await asyncio.gather(rig.task, running, return_exceptions=True)


async def test_a_backlog_is_answered_though_no_tick_is_due() -> None:
    async with StandInGateway() as gateway:
        service = a_service(gateway={"controlURL": gateway.url}, minReplicas=0)
        async with leading(a_pool(), service, tick_s=600.0) as rig:
            await until(lambda: gateway.polls >= 2 and rig.leader.loop.snapshot)

            gateway.say(in_flight=1, queued=10, arrivals_total=11)

            await until(lambda: pods(rig.fake, names.POD_INFERENCE))
            await until(lambda: ("tts", "ReplicaStarted") in rig.events)


async def test_a_tick_that_fails_does_not_end_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async with leading(a_pool(), a_service()) as rig:
        await until(lambda: rig.leader.loop.snapshot)
        real, failures = rig.leader.loop.decide, []

        def fail(now_s: float) -> Any:
            failures.append(now_s)
            raise KeyError("an object that nobody thought of")

        monkeypatch.setattr(rig.leader.loop, "decide", fail)
        await until(lambda: failures)
        monkeypatch.setattr(rig.leader.loop, "decide", real)
        before: Snapshot | None = rig.leader.loop.snapshot

        await until(lambda: rig.leader.loop.snapshot is not before)
        errors = rig.metrics.registry.get_sample_value("fleet_reconcile_errors_total", {"kind": "tick"})
        assert errors == len(failures)
        assert len(failures) < FAILURES
        assert not rig.task.done()


async def test_ticks_go_on_while_writes_are_not_answered_and_lend_no_gpu_twice() -> None:
    job = a_job(ledger=None, checkpoint={"verify": "None"}, minWorkers=4)
    async with leading(a_pool(), nodes=1) as rig:
        rig.fake.hang("create", "pods", times=100)
        put(rig.fake, job)
        await until(lambda: rig.leader.cluster.num_begun == 4)
        before = rig.leader.loop.snapshot

        await until(lambda: rig.leader.loop.snapshot is not before)
        assert (rig.leader.cluster.num_begun, pods(rig.fake, names.POD_CLEANING)) == (4, [])

        rig.fake.release()
        await until(lambda: len(pods(rig.fake, names.POD_CLEANING)) == 4)
        assert rig.leader.cluster.num_begun == 0


async def test_what_cannot_be_written_for_long_ends_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lead, "FAILURES", 3)
    async with leading(a_pool(), tick_s=0.1) as rig:

        async def fail(_actions: Any, _now_s: float) -> Any:
            raise KeyError("an object that nobody thought of")

        monkeypatch.setattr(rig.leader.cluster, "apply", fail)
        put(rig.fake, a_job(ledger=None, checkpoint={"verify": "None"}, minWorkers=1))

        await until(rig.task.done)
        assert rig.metrics.registry.get_sample_value("fleet_reconcile_errors_total", {"kind": "write"}) == 3


def test_of_a_plan_only_so_much_is_lent_at_once() -> None:
    serving = Action(Verb.START, "ns/tts/east/h200", 9, Reason.TRAFFIC)
    lent = [Action(Verb.START, f"ns/{name}", 3, Reason.IDLE) for name in "abc"]
    evicted = Action(Verb.EVICT, "ns/a-1", 1, Reason.TRAFFIC)

    assert [*within((serving, *lent, evicted), 4)] == [serving, lent[0], replace(lent[1], count=1), evicted]


async def test_statuses_are_written_and_then_nothing_is_written_any_more() -> None:
    async with leading(a_pool(), a_job(ledger=None, checkpoint={"verify": "None"}, maxWorkers=2), look_s=0.05) as rig:
        await until(lambda: (rig.fake.get(RESOURCES["CapacityPool"], "east") or {}).get("status", {}).get("total") == 4)
        await until(lambda: "conditions" in rig.fake.objects(RESOURCES["CleaningJob"])[0].get("status", {}))
        await asyncio.sleep(1.5)
        before = len(rig.fake.requests)

        await asyncio.sleep(2.0)

        assert [
            f"{one.verb} {one.plural}" for one in rig.fake.requests[before:] if one.verb not in ("get", "watch")
        ] == []


async def test_a_job_made_again_over_an_empty_ledger_is_begun_and_not_complete() -> None:
    async with StandInKeeper() as keeper:
        keeper.progress |= {"items_total": 3, "items_done": 3, "items_open": 0, "shards_open": 0}
        job = partial(a_job, ledger=None, keeper={"url": keeper.url}, checkpoint={"verify": "None"}, maxWorkers=2)
        async with leading(a_pool(), job(), look_s=0.05) as rig:
            kind = RESOURCES["CleaningJob"]

            def complete() -> str:
                [found] = rig.fake.objects(kind)
                said = (found.get("status") or {}).get("conditions") or ()
                return next((one["status"] for one in said if one["type"] == "Complete"), "")

            await until(lambda: complete() == "True")
            before = pods(rig.fake, names.POD_CLEANING)
            rig.fake.remove(kind, "podcasts", "default")
            keeper.progress |= dict.fromkeys(("items_total", "items_done", "items_open", "shards_open"))
            put(rig.fake, job())

            await until(lambda: complete() == "False")
            await until(lambda: len(pods(rig.fake, names.POD_CLEANING)) > len(before))


async def test_a_service_made_again_under_its_name_is_started() -> None:
    async with StandInGateway() as gateway:
        service = partial(a_service, gateway={"controlURL": gateway.url}, minReplicas=1)
        async with leading(a_pool(), service(), look_s=0.05) as rig:
            kind = RESOURCES["InferenceDeployment"]

            def is_broken() -> bool:
                return any("--bogus" in one.refusal for one in rig.leader.cluster.services())

            await until(lambda: pods(rig.fake, names.POD_INFERENCE))
            [first] = pods(rig.fake, names.POD_INFERENCE)
            name = first["metadata"]["name"]
            rig.fake.run_pod("default", name)
            rig.fake.finish_pod("default", name, 2, "No such option: --bogus")
            await until(is_broken)

            rig.fake.remove(kind, "tts", "default")
            put(rig.fake, service())

            # The ended pod of the old one is still listed for a moment.
            await until(lambda: {pod["metadata"]["name"] for pod in pods(rig.fake, names.POD_INFERENCE)} - {name})
            assert not is_broken()


async def test_a_dry_run_waits_for_the_traffic_that_it_is_about_and_is_answered_once() -> None:
    async with StandInGateway() as gateway:
        service = a_service(gateway={"controlURL": gateway.url})
        async with leading(a_pool(), a_question(), look_s=0.05) as rig:

            def status() -> Object:
                found: Object = rig.fake.objects(RESOURCES["Reclaim"])[0].get("status", {})
                return found

            await until(lambda: "there is no service default/tts yet" in str(status().get("conditions")))
            put(rig.fake, service)
            await until(lambda: status().get("phase") == "Answered")
            await asyncio.sleep(1.5)

            assert sum(seen.plural == "reclaims" and seen.verb == "apply" for seen in rig.fake.requests) <= 3
            assert "taken for full" not in str(status()["conditions"])


async def test_a_dry_run_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "WAIT_S", 0.0)
    async with leading(a_pool(), a_service(), a_question(), look_s=0.05) as rig:
        await until(lambda: rig.fake.objects(RESOURCES["Reclaim"])[0].get("status", {}).get("phase") == "Answered")

        status = rig.fake.objects(RESOURCES["Reclaim"])[0]["status"]
        assert "every replica was taken for full" in str(status["conditions"])


async def test_a_dry_run_for_nobody_fails_with_the_names_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "WAIT_S", 0.0)
    question = a_question(forRef={"kind": "InferenceDeployment", "name": "other"})
    async with leading(a_pool(), a_service(), question, look_s=0.05) as rig:
        await until(lambda: rig.fake.objects(RESOURCES["Reclaim"])[0].get("status", {}).get("phase") == "Failed")

        said = str(rig.fake.objects(RESOURCES["Reclaim"])[0]["status"]["conditions"])
        assert "there is no service default/other; there are: default/tts" in said


async def test_the_process_leads_serves_its_numbers_and_hands_over_at_its_end() -> None:
    async with FakeKube() as fake:
        put(fake, a_flavor())
        put(fake, a_pool())
        settings = Settings(identity="me_1", host="127.0.0.1", metrics_port=0, probes_port=free_port())
        operator = Operator(fake.connection(), settings)
        running = asyncio.create_task(operator.run(lambda _: None))
        async with httpx.AsyncClient(trust_env=False) as http:
            await until(lambda: operator.metrics_port)

            async def numbers() -> str:
                return (await http.get(f"http://127.0.0.1:{operator.metrics_port}/metrics")).text

            async with asyncio.timeout(20):
                while "fleet_leader 1.0" not in await numbers():
                    await asyncio.sleep(0.05)
        lease = fake.objects(LEASES)[0]
        assert (lease["metadata"]["name"], lease["spec"]["holderIdentity"]) == (names.LEASE, "me_1")

        operator.stop()
        await running

        assert fake.objects(LEASES)[0]["spec"]["holderIdentity"] == ""
        assert fake.objects(EVENTS) == []


@pytest.mark.parametrize(("stalled_after_s", "status"), [(90.0, 200), (0.5, 500)])
async def test_the_probe_fails_when_a_watch_has_died(
    stalled_after_s: float, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeKube() as fake:
        put(fake, a_flavor())
        settings = Settings(
            identity="me_1",
            host="127.0.0.1",
            metrics_port=0,
            probes_port=free_port(),
            stalled_after_s=stalled_after_s,
        )
        operator = Operator(fake.connection(), settings)
        running = asyncio.create_task(operator.run(lambda _: None))
        async with httpx.AsyncClient(trust_env=False, timeout=15.0) as http, asyncio.timeout(40):
            found = 0
            while found != status:
                await asyncio.sleep(0.1)
                with contextlib.suppress(httpx.HTTPError):
                    found = (await http.get(f"http://127.0.0.1:{settings.probes_port}/healthz")).status_code
        operator.stop()
        await running
    assert ("no event or bookmark of" in caplog.text) is (status == 500)


async def test_a_port_that_is_taken_is_named() -> None:
    async with StandInGateway() as other, FakeKube() as fake:
        port = int(other.url.rpartition(":")[2])

        with pytest.raises(PermanentError, match=f"metrics port {port} cannot be used"):
            await Operator(fake.connection(), Settings(identity="me", host="127.0.0.1", metrics_port=port)).run(print)


async def test_a_watch_that_says_nothing_is_named_and_a_bookmark_is_enough() -> None:
    class Clock:
        now_s = 0.0

        def __call__(self) -> float:
            return self.now_s

    clock = Clock()
    async with FakeKube() as fake, fake.kube() as kube:
        watches = Watches(kube, clock)
        running = asyncio.create_task(watches.run())
        await watches.synced()
        await until(lambda: len(fake.watching) == len(watches.all))
        clock.now_s = 95.0
        assert "no event or bookmark of pods for 95 s" in watches.dead(90.0)

        fake.bookmark()

        await until(lambda: not watches.dead(90.0))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_a_service_runs_on_every_gpu_type_that_one_of_its_pools_has_the_type_first_then_the_pool() -> None:
    variants = [{"flavor": "h200", "slotsPerReplica": 64, "preference": 1}, {"flavor": "l4", "slotsPerReplica": 8}]
    service = parse(InferenceDeployment, a_service(pools=["east", "west", "north"], variants=variants))
    listed = {
        "east": a_pool("east", flavors=[{"name": "h200"}, {"name": "l4"}], reclaim={"maxParallel": 8}),
        "west": a_pool("west", reclaim={"maxParallel": 4}),
    }
    pools = {("", name): parse(CapacityPool, obj) for name, obj in listed.items()}

    spec = service_spec(service, pools)

    order = [variant.uid for variant in sorted(spec.variants, key=lambda one: -one.preference)]
    assert order == ["default/tts/east/h200", "default/tts/west/h200", "default/tts/east/l4"]
    assert missing_pools(service, pools) == ["north"]
    assert (missing_flavors(service, pools), missing_flavors(service, {})) == ([], ["h200", "l4"])
    assert limits(pools.values()).max_parallel == 12


def test_times_that_cannot_work_together_are_refused() -> None:
    with pytest.raises(ValueError, match="retry_s < renew_s < lease_s"):
        Settings(identity="me", lease_s=3.0)
    with pytest.raises(ValueError, match="shortest_tick_s"):
        Settings(identity="me", tick_s=0.01)


def test_each_gpu_is_in_one_state_and_seconds_are_those_of_the_states() -> None:
    seen = cases.snapshot(
        [cases.node(6, 2, broken_gpus=1)],
        [cases.replica("r", running=1), cases.worker("w"), cases.training("t")],
        [cases.service(cases.load(1.0), slots=4)],
    )
    metrics = Metrics()
    books = Books(metrics)

    states = gpus_by_state(seen)
    books.look(seen, cases.plan(seen), Accounts(), 100.0)
    books.look(seen, cases.plan(seen), Accounts(), 110.0)

    assert sum(states.values()) == 6
    assert (states["h200", "serving"], states["h200", "background"], states["h200", "training"]) == (0.25, 1.0, 1.0)
    labels = {"pool": "h200", "flavor": "", "state": "background"}
    assert metrics.registry.get_sample_value("fleet_gpu_seconds_total", labels) == 10.0


def test_labels_are_closed_and_no_uid_is_among_them() -> None:
    known = {"pool", "flavor", "state", "service", "reason", "outcome", "phase", "kind", "verb", "resource"}
    known |= {"version", "python", "le"}

    families = [*text_string_to_metric_families(generate_latest(Metrics().registry).decode())]

    assert {label for family in families for sample in family.samples for label in sample.labels} <= known
    assert all(family.name.startswith("fleet_") for family in families)


@pytest.mark.parametrize(
    ("obj", "state"),
    [
        ({"spec": {"replicas": 2}, "status": {"readyReplicas": 2}}, "ready"),
        ({"spec": {"replicas": 2}, "status": {}}, "waiting"),
        ({"spec": {"backoffLimit": 2}, "status": {"conditions": [{"type": "Failed", "status": "True"}]}}, "failed"),
        ({"spec": {"selector": {}}}, ""),
    ],
)
def test_a_child_is_ready_waiting_or_failed(obj: Object, state: str) -> None:
    assert child_state(obj) == state
