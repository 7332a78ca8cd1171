"""Why a job gets no GPU or no more of them, in words; and the texts of Events of conditions."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from slackwater_operator.cluster.kube.endings import HELD, STOPPED
from slackwater_operator.cluster.kube.ports import JobProgress, JobView, ReplicaView, ServiceView
from slackwater_operator.core import Node, Phase, Snapshot, Variant
from slackwater_operator.kube.types import Object
from slackwater_operator.operate.statuses import jobs, services
from slackwater_operator.operate.statuses.obstacles import Obstacle
from slackwater_operator.operate.statuses.room import Room, room, shortage, stocks
from slackwater_operator.operate.statuses.round import unheard
from slackwater_operator.resources import CleaningJob, InferenceDeployment, parse
from slackwater_operator.testing import cases
from slackwater_operator.testing.resources import a_job, a_service

EAST = "east/h200"
JOB = parse(CleaningJob, a_job())
HUNGRY = cases.job("default/podcasts", flavors=(EAST,))
VARIANTS = (Variant("default/tts/east/h200", EAST, 4, 2.0),)
IDLE = cases.node(4, 4, flavor=EAST)


class Events(list[tuple[str, str]]):
    """(reason, message) of everything that was emitted."""

    def __call__(self, obj: Object, type_: str, reason: str, message: str, action: str) -> None:
        self.append((str(reason), message))


def seen(*nodes: Node, refused: str = "") -> Room:
    return room(HUNGRY, stocks(cases.snapshot(nodes)), (), {}, refused)


@pytest.mark.parametrize(
    ("nodes", "reason", "words"),
    [
        pytest.param([cases.node(4, 0, flavor=EAST)], "NoIdleGPUs", "has been idle for 2 s", id="all are held"),
        pytest.param([cases.node(4, 4, flavor=EAST, idle_s=1.0)], "NoIdleGPUs", "has been idle for 2 s", id="too soon"),
        pytest.param([replace(IDLE, schedulable=False)], "NoIdleGPUs", "cordoned or not ready", id="only cordoned"),
        pytest.param([cases.node(4, 4, flavor=EAST, idle_s=float("-inf"))], "GPUsReserved", "not lent", id="kept"),
        pytest.param([IDLE], "NoIdleGPUs", "kept for a rise of traffic", id="the policy keeps them"),
        pytest.param([], "NoGPUs", "there is no GPU of h200 in east: kubectl describe cpool east", id="none"),
    ],
)
def test_what_is_in_the_way_is_told_by_the_gpus_that_there_are(nodes: list[Node], reason: str, words: str) -> None:
    found, message = shortage(JOB, seen(*nodes), 0)

    assert (found, words in message) == (reason, True), message


def test_a_kubelets_refusal_is_told_before_the_guess_at_the_policy() -> None:
    said = "node n-0 did not take podcasts-1: OutOfcpu"

    reason, message = shortage(JOB, seen(IDLE, refused=said), 0)

    assert (reason, message.startswith(said)) == ("NoRoom", True)


def a_snapshot(age_s: float, replicas: Iterable[str]) -> Snapshot:
    silent = replace(cases.load(stale=True), age_s=age_s)
    workloads = [cases.replica(uid, owner="default/tts", flavor=EAST) for uid in replicas]
    return cases.snapshot([IDLE], workloads, [cases.service(silent, name="default/tts", variants=VARIANTS)])


@pytest.mark.parametrize(
    ("age_s", "replicas", "holds"),
    [
        pytest.param(99.0, [], True, id="it was heard once"),
        pytest.param(float("inf"), ["r"], True, id="it has a replica"),
        pytest.param(float("inf"), [], False, id="it was never heard and has none"),
    ],
)
def test_a_silent_service_is_named_where_it_keeps_gpus_from_being_lent(
    age_s: float, replicas: list[str], holds: bool
) -> None:
    snapshot = a_snapshot(age_s, replicas)

    _, message = shortage(JOB, room(HUNGRY, stocks(snapshot), (), unheard(snapshot), ""), 0)

    assert ("none is lent where default/tts may run, whose gateway is not heard" in message) is holds


VIEW = JobView("default/podcasts", 3, 0, 0, 0, 120.4, 1_800_000_000.0)
JOB_SEEN = jobs.Seen(VIEW, JobProgress(10.0, 100, 98, 2, 0, 0), (), (), (), True, 11.0)


def a_status(view: JobView, events: Events, **spec: object) -> dict[str, tuple[str, str]]:
    obj = a_job(**spec)
    status = jobs.job_status(obj, parse(CleaningJob, obj), "", replace(JOB_SEEN, view=view), "now", events)
    return {one["type"]: (one["reason"], one["message"]) for one in status["conditions"]}


@pytest.mark.parametrize(
    ("failure", "spec", "failed", "going"),
    [
        pytest.param(HELD, {}, "Held", "Held", id="on hold"),
        pytest.param(HELD, {"suspend": True}, "NotFailed", "Suspended", id="a person suspended it"),
        pytest.param(STOPPED, {}, "Stopped", "Ended", id="stopped"),
        pytest.param("no such folder", {}, "BadConfiguration", "Ended", id="bad configuration"),
    ],
)
@pytest.mark.parametrize("running", [0, 3])
def test_no_job_has_ended_while_workers_run(
    failure: str, spec: dict[str, object], failed: str, going: str, running: int
) -> None:
    found = a_status(replace(VIEW, failure=failure, running=running), Events(), **spec)

    assert found["Failed"][0] == failed
    assert found["Progressing"][0] == ("WorkersRunning" if running and going != "Suspended" else going)
    assert "worker" not in found["Progressing"][1] or failure in found["Progressing"][1]


@pytest.mark.parametrize(
    ("lost", "unverified", "reason", "words"),
    [
        (1, 3, "WorkLost", "the ledger does not hold the newest durable record of a worker"),
        (0, 3, "NotVerified", "nobody could look for the newest durable record of 3 workers"),
        (0, 0, "AllVerified", ""),
    ],
)
def test_work_that_nobody_could_look_for_is_not_lost(lost: int, unverified: int, reason: str, words: str) -> None:
    found = a_status(replace(VIEW, lost=lost, unverified=unverified), Events())

    assert found["WorkDurable"] == (reason, words)


def test_the_event_of_a_complete_job_says_what_is_settled() -> None:
    events = Events()

    a_status(replace(VIEW, is_complete=True, running=0), events)

    assert events == [("LedgerComplete", "every item is settled, 2 of them quarantined")]


def test_the_event_of_signals_that_came_back_says_so_in_words() -> None:
    events, obj = Events(), a_service()
    obj["status"] = {"conditions": [{"type": "SignalsFresh", "status": "False", "lastTransitionTime": "then"}]}
    serving = services.Seen(ServiceView("default/tts", (), None), cases.load(4.0), 0, None, (), (), True, "", False)

    services.service_status(obj, parse(InferenceDeployment, a_service()), "", serving, "now", events)

    assert events == [("SignalsFresh", "the gateway says what is asked for")]


def test_a_rollout_that_cannot_start_is_told_while_the_old_one_serves() -> None:
    obj, events = a_service(), Events()
    old = ReplicaView("default/tts-1", EAST, "n", Phase.RUNNING, "a", True, "traffic")
    new = replace(old, uid="default/tts-2", phase=Phase.STARTING, is_ready=False)
    stuck = Obstacle(1, "tts-2: ErrImageNeverPull: no engine:9", is_sure=True)
    view = ServiceView("default/tts", (old, new), None)
    rolling = services.Seen(view, cases.load(4.0), 2, None, (), (), True, "", False, stuck=stuck)

    status = services.service_status(obj, parse(InferenceDeployment, obj), "", rolling, "now", events)

    found = {one["type"]: (one["reason"], one["message"]) for one in status["conditions"]}
    said = "1 cannot start: tts-2: ErrImageNeverPull: no engine:9"
    assert found["Ready"] == ("Serving", f"1 of 2 replicas serves; {said}")
    assert found["NeedMet"] == ("UnmetNeed", f"2 replicas are wanted, 2 are there: {said}")
