"""What people read of services, jobs and pools, and when it is written."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from slackwater_operator.cluster.kube.ports import (
    JobProgress,
    JobView,
    PoolView,
    ReplicaView,
    ServiceView,
    UsageView,
)
from slackwater_operator.core import Phase
from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.types import Object
from slackwater_operator.operate.revisions import Choice, Gate, revision_of
from slackwater_operator.operate.statuses import jobs, pools, services
from slackwater_operator.operate.statuses.conditions import conditions
from slackwater_operator.operate.statuses.writer import PACE_S, SLOW_S, StatusWriter
from slackwater_operator.operate.watches import resource_of
from slackwater_operator.resources import CapacityPool, CleaningJob, GPUFlavor, InferenceDeployment, parse
from slackwater_operator.resources.names import CLEANING_JOB, INFERENCE_DEPLOYMENT
from slackwater_operator.testing import cases
from slackwater_operator.testing.kube import FakeKube
from slackwater_operator.testing.resources import a_flavor, a_job, a_pool, a_service

NOW = "2026-11-30T10:00:00Z"
JOBS = resource_of(CLEANING_JOB)


class Events(list[tuple[str, str]]):
    """(type, reason) of everything that was emitted."""

    def __call__(self, obj: Object, type_: str, reason: str, message: str, action: str) -> None:
        self.append((type_, reason))


def reasons(status: Object) -> dict[str, str]:
    return {one["type"]: one["reason"] for one in status["conditions"]}


def replica(uid: str = "ns/r", *, ready: bool = True) -> ReplicaView:
    return ReplicaView(uid, "east/h200", "n", Phase.RUNNING if ready else Phase.STARTING, "r", ready, "traffic")


SEEN = services.Seen(
    view=ServiceView("default/tts", (replica(),), 2.5),
    load=cases.load(4.0),
    desired=1,
    choice=None,
    missing=(),
    missing_flavors=(),
    has_gateway=True,
    late="",
    releasing=False,
)


def service_status(seen: services.Seen, events: Events | None = None, **spec: Any) -> Object:
    obj = a_service(**spec)
    obj["metadata"]["generation"] = 3
    service = parse(InferenceDeployment, obj)
    return services.service_status(obj, service, "", seen, NOW, events if events is not None else Events())


def test_a_service_that_serves_is_ready_in_every_respect() -> None:
    status = service_status(SEEN)

    assert reasons(status) == {
        "Ready": "Serving",
        "Accepted": "Accepted",
        "SignalsFresh": "SignalsFresh",
        "NeedMet": "NeedMet",
        "RevisionGated": "NoGate",
        "ReclaimsInTime": "ReclaimsInTime",
    }
    assert (status["replicas"], status["readyReplicas"], status["desiredReplicas"]) == (1, 1, 1)
    assert (status["mode"], status["leadTime"], status["observedGeneration"]) == ("Stable", "2.5s", 3)
    assert parse(InferenceDeployment, a_service() | {"status": status}).status.lead_time == "2.5s"


@pytest.mark.parametrize(
    ("change", "type_", "reason"),
    [
        pytest.param({"view": ServiceView("default/tts", (), None)}, "Ready", "NoReplicas", id="nobody serves"),
        pytest.param(
            {"view": ServiceView("default/tts", (replica(ready=False),), None)}, "Ready", "ReplicasStarting", id="start"
        ),
        pytest.param({"missing": ["east"]}, "Accepted", "PoolMissing", id="no pool"),
        pytest.param(
            {"view": ServiceView("default/tts", (), None, refused="spec.containers: no")},
            "Accepted",
            "TemplateRefused",
            id="the API server takes no such pod",
        ),
        pytest.param({"load": cases.load(4.0, stale=True)}, "SignalsFresh", "SignalsStale", id="a silent gateway"),
        pytest.param({"load": None, "has_gateway": False}, "SignalsFresh", "GatewayStarting", id="no gateway yet"),
        pytest.param({"desired": 3}, "NeedMet", "UnmetNeed", id="no GPUs"),
        pytest.param({"desired": 3, "releasing": True}, "NeedMet", "ReclaimUnderWay", id="GPUs on their way"),
        pytest.param({"late": "tts-1: 20 s"}, "ReclaimsInTime", "ReclaimDeadlineExceeded", id="a late reclaim"),
    ],
)
def test_what_is_wrong_with_a_service_is_one_condition(change: dict[str, Any], type_: str, reason: str) -> None:
    assert reasons(service_status(replace(SEEN, **change)))[type_] == reason


@pytest.mark.parametrize(
    ("first_audio_s", "reason"),
    [(0.1, "ServingWithinObjective"), (0.4, "ObjectiveMissed"), (None, "ServingWithinObjective")],
)
def test_the_objective_is_the_measure_when_there_is_one(first_audio_s: float | None, reason: str) -> None:
    load = replace(cases.load(4.0), first_audio_p95_s=first_audio_s)

    status = service_status(replace(SEEN, load=load), autoscaling={"objective": {"ttfaP95": "250ms"}})

    assert reasons(status)["Ready"] == reason


@pytest.mark.parametrize(
    ("gate", "reason"),
    [(Gate.NONE, "NoGate"), (Gate.WAITING, "GateRunning"), (Gate.PASSED, "GatePassed"), (Gate.FAILED, "GateFailed")],
)
def test_the_gate_of_a_revision_is_told(gate: Gate, reason: str) -> None:
    current = revision_of(parse(InferenceDeployment, a_service()))

    status = service_status(replace(SEEN, choice=Choice(current, None, gate, "Job has failed")))

    assert reasons(status)["RevisionGated"] == reason


def test_a_burst_is_panic_and_silence_is_hold() -> None:
    assert services.mode(replace(cases.load(4.0), panic_slots=20.0)) == "Panic"
    assert services.mode(cases.load(4.0, stale=True)) == "Hold"


def test_a_refused_service_says_why() -> None:
    events = Events()

    status = services.service_status(a_service(), None, "maxReplicas: is required", SEEN, NOW, events)

    assert reasons(status)["Accepted"] == "SpecRefused"
    assert reasons(status)["SignalsFresh"] == "NotSeen"
    assert events == [("Warning", "SpecRefused")]


def test_stale_signals_are_an_event_once_and_only_after_they_were_fresh() -> None:
    events, obj = Events(), a_service()
    stale = replace(SEEN, load=cases.load(4.0, stale=True))
    service = parse(InferenceDeployment, obj)

    for seen in (stale, SEEN, stale, stale):
        obj["status"] = services.service_status(obj, service, "", seen, NOW, events)

    assert events == [("Normal", "SignalsFresh"), ("Warning", "SignalsStale")]


def test_a_conditions_time_moves_only_with_its_status() -> None:
    obj = a_service()
    obj["status"] = {"conditions": conditions(INFERENCE_DEPLOYMENT, obj, {"NeedMet": ("UnmetNeed", "")}, NOW, Events())}

    later = conditions(INFERENCE_DEPLOYMENT, obj, {"NeedMet": ("ReclaimUnderWay", "")}, "later", Events())
    met = conditions(INFERENCE_DEPLOYMENT, obj, {"NeedMet": ("NeedMet", "")}, "later", Events())

    times = [{one["type"]: one["lastTransitionTime"] for one in made}["NeedMet"] for made in (later, met)]
    assert times == [NOW, "later"]


JOB_SEEN = jobs.Seen(
    view=JobView("default/podcasts", 3, 1, 1, 0, 120.4, 1_800_000_000.0),
    progress=JobProgress(10.0, 100, 40, 2, 58, 5, 60.0),
    missing_pools=(),
    missing_flavors=(),
    queues=(),
    has_keeper=True,
    now_s=11.0,
)


def job_status(seen: jobs.Seen, **spec: Any) -> Object:
    obj = a_job(**spec)
    return jobs.job_status(obj, parse(CleaningJob, obj), "", seen, NOW, Events())


def test_a_job_that_runs_shows_its_workers_and_its_items() -> None:
    status = job_status(JOB_SEEN)

    assert status["workers"] == {"running": 3, "starting": 1, "leaving": 1, "pending": 4}
    assert status["items"] == {"total": 100, "done": 40, "quarantined": 2, "open": 58}
    assert status["gpuSeconds"] == 120.0
    assert reasons(status) == {
        "Progressing": "WorkersRunning",
        "Accepted": "Accepted",
        "Complete": "ItemsOpen",
        "Failed": "NotFailed",
        "LedgerReadable": "LedgerReadable",
        "WorkDurable": "AllVerified",
    }


@pytest.mark.parametrize(
    ("view", "change", "type_", "reason"),
    [
        pytest.param({"is_complete": True}, {}, "Complete", "LedgerComplete", id="every item is settled"),
        pytest.param({"failure": "input: no such folder"}, {}, "Failed", "BadConfiguration", id="bad configuration"),
        pytest.param({"lost": 1}, {}, "WorkDurable", "WorkLost", id="lost work"),
        pytest.param({"running": 0, "starting": 0}, {}, "Progressing", "NoIdleGPUs", id="nothing idle"),
        pytest.param(
            {"running": 0, "starting": 0, "refusal": "backing off"}, {}, "Progressing", "BackingOff", id="it fails"
        ),
        pytest.param({}, {"now_s": 99.0}, "LedgerReadable", "KeeperUnreachable", id="a silent keeper"),
        pytest.param({}, {"progress": None, "has_keeper": False}, "LedgerReadable", "KeeperStarting", id="no keeper"),
        pytest.param({}, {"missing_flavors": ["h200"]}, "Accepted", "FlavorMissing", id="no such GPUs"),
    ],
)
def test_what_is_wrong_with_a_job_is_one_condition(
    view: dict[str, Any], change: dict[str, Any], type_: str, reason: str
) -> None:
    assert JOB_SEEN.view is not None
    seen = replace(JOB_SEEN, view=replace(JOB_SEEN.view, **view), **change)

    assert reasons(job_status(seen))[type_] == reason


def test_a_job_without_a_ledger_verifies_nothing_and_says_so() -> None:
    status = job_status(replace(JOB_SEEN, progress=None), ledger=None, checkpoint={"verify": "None"})

    assert reasons(status)["LedgerReadable"] == "NoLedger"
    assert reasons(status)["WorkDurable"] == "NotVerified"


def test_workers_on_slurm_count_as_workers() -> None:
    obj = a_job()
    obj["status"] = {"slurm": {"cluster": "east", "running": 2}}
    assert JOB_SEEN.view is not None
    seen = replace(JOB_SEEN, view=replace(JOB_SEEN.view, running=0, starting=0))

    status = jobs.job_status(obj, parse(CleaningJob, a_job()), "", seen, NOW, Events())

    assert reasons(status)["Progressing"] == "WorkersRunning"
    assert status["workers"]["pending"] == 6
    assert "slurm" not in status  # another writer's


@pytest.mark.parametrize(
    ("pools_", "flavors", "said"),
    [
        pytest.param((), (), "", id="nothing"),
        pytest.param(
            ("west",), (), "without CapacityPool west, which is not there or has none of its flavors", id="a pool"
        ),
        pytest.param((), ("b300",), "without flavor b300, which none of its pools has", id="a GPU type"),
    ],
)
def test_what_a_service_or_a_job_has_to_do_without_is_named(
    pools_: tuple[str, ...], flavors: tuple[str, ...], said: str
) -> None:
    job = job_status(
        replace(JOB_SEEN, missing_pools=pools_, missing_flavors=flavors),
        pools=["east", "west"],
        flavors=["h200", "b300"],
    )
    service = service_status(replace(SEEN, missing=pools_, missing_flavors=flavors), pools=["east", "west"])

    for status in (job, service):
        [accepted] = [one for one in status["conditions"] if one["type"] == "Accepted"]
        assert (accepted["status"], accepted["reason"], accepted["message"]) == ("True", "Accepted", said)


def test_a_queue_that_no_pool_has_is_named() -> None:
    status = job_status(JOB_SEEN, queue="asr")

    assert reasons(status)["Accepted"] == "QueueMissing"


def test_a_pool_shows_its_usage_its_sums_and_what_is_wrong() -> None:
    obj = a_pool(flavors=[{"name": "h200", "count": 16}])
    usage = UsageView("h200", 8, 2, 1, 3, 0, 1, 1)
    view = PoolView("east", (usage,), disputed=("n-1", "n-2"))

    status = pools.pool_status(obj, parse(CapacityPool, obj), "", view, NOW, Events())

    assert (status["total"], status["inference"], status["idle"]) == (8, 2, 1)
    assert status["usage"][0]["broken"] == 1
    assert reasons(status) == {
        "Ready": "GPUsFound",
        "NodesExclusive": "NodesShared",
        "CapacityComplete": "GPUsBroken",
        "SlurmReachable": "NoSlurm",
    }


@pytest.mark.parametrize(
    ("heard", "reason"),
    [
        pytest.param({"hpc"}, "SlurmReachable", id="its controller wrote into a status"),
        pytest.param({"other"}, "NotSeen", id="only another cluster's did"),
    ],
)
def test_a_pool_says_whether_its_slurm_has_been_heard_of(heard: set[str], reason: str) -> None:
    obj = a_pool(slurm={"cluster": "hpc"})

    status = pools.pool_status(obj, parse(CapacityPool, obj), "", None, NOW, Events(), heard)

    assert reasons(status)["SlurmReachable"] == reason


@pytest.mark.parametrize(
    ("word", "reason", "said"),
    [
        pytest.param("", "SlurmReachable", [], id="it works"),
        pytest.param("squeue: no answer", "SlurmUnreachable", [("Warning", "SlurmUnreachable")], id="it cannot"),
        pytest.param(None, "NotSeen", [], id="it has said nothing yet"),
    ],
)
def test_a_pools_own_slurm_side_says_how_its_slurm_is(word: str | None, reason: str, said: list[Any]) -> None:
    obj, events = a_pool(slurm={"cluster": "hpc"}), Events()

    status = pools.pool_status(obj, parse(CapacityPool, obj), "", None, NOW, events, (), word)

    assert reasons(status)["SlurmReachable"] == reason
    assert events == said


def test_a_flavor_counts_the_nodes_that_it_selects() -> None:
    obj = a_flavor()
    node = {
        "metadata": {"labels": {"nvidia.com/gpu.product": "h200"}},
        "status": {"allocatable": {"nvidia.com/gpu": "8"}},
    }
    other = {"metadata": {"labels": {}}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}

    status = pools.flavor_status(obj, parse(GPUFlavor, obj), "", [node, other, node], NOW, Events())

    assert (status["nodes"], status["gpus"]) == (2, 16)
    assert reasons(status) == {"Ready": "NodesFound"}


EVENTS = Events()


class Clock:
    """A clock that a test moves."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def writing() -> AsyncIterator[tuple[FakeKube, Cache, StatusWriter, Clock]]:
    async with FakeKube() as fake, fake.kube() as kube:
        fake.put(JOBS, a_job())
        cache, clock = Cache(kube, JOBS), Clock()
        task = asyncio.create_task(cache.run())
        EVENTS.clear()
        await cache.synced.wait()
        try:
            yield fake, cache, StatusWriter(kube, clock, EVENTS), clock
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def write(writer: StatusWriter, cache: Cache, status: Object, slow: tuple[str, ...] = ()) -> None:
    (obj,) = cache.values()
    writer.want(cache, obj, status, slow, [(obj, "Normal", f"Lost{status['lost']}", "", "")])
    await writer.flush()


def writes(fake: FakeKube) -> int:
    return sum(seen.verb == "apply" and seen.part == "status" for seen in fake.requests)


async def test_only_a_change_is_written_and_at_most_once_a_second() -> None:
    async with writing() as (fake, cache, writer, clock):
        await write(writer, cache, {"lost": 0})
        await write(writer, cache, {"lost": 0})
        assert writes(fake) == 1

        await write(writer, cache, {"lost": 1})
        assert writes(fake) == 1
        clock.now_s += PACE_S
        await write(writer, cache, {"lost": 1})
        assert writes(fake) == 2
        assert fake.objects(JOBS)[0]["status"] == {"lost": 1}
        assert EVENTS == [("Normal", "Lost0"), ("Normal", "Lost1")]  # each with the write that it belongs to


async def test_what_always_changes_is_written_seldom_and_with_every_other_change() -> None:
    async with writing() as (fake, cache, writer, clock):
        await write(writer, cache, {"lost": 0, "gpuSeconds": 1.0}, ("gpuSeconds",))
        clock.now_s += 2 * PACE_S
        await write(writer, cache, {"lost": 0, "gpuSeconds": 2.0}, ("gpuSeconds",))
        assert writes(fake) == 1

        clock.now_s += SLOW_S
        await write(writer, cache, {"lost": 0, "gpuSeconds": 3.0}, ("gpuSeconds",))
        assert writes(fake) == 2
        clock.now_s += PACE_S
        await write(writer, cache, {"lost": 1, "gpuSeconds": 4.0}, ("gpuSeconds",))
        assert fake.objects(JOBS)[0]["status"] == {"lost": 1, "gpuSeconds": 4.0}


async def test_a_status_that_is_refused_stops_nothing_and_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async with writing() as (fake, cache, writer, clock):
        for _ in range(2):
            fake.fail("apply", JOBS.plural, code=422, reason="Invalid", message="no")
            await write(writer, cache, {"lost": 1})
            clock.now_s += PACE_S
        assert caplog.text.count("status not written") == 1

        await write(writer, cache, {"lost": 1})
        assert fake.objects(JOBS)[0]["status"] == {"lost": 1}
