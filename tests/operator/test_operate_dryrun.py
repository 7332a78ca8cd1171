"""What would happen if traffic rose, and what the command line prints."""

from typing import Any

import pytest

from slackwater_operator.core import Kind, Variant
from slackwater_operator.operate import show
from slackwater_operator.operate.dryrun import forecast
from slackwater_operator.testing import cases

VARIANT = Variant("ns/tts/east/h200", "east/h200", 4, 2.0)


def fleet(*, demand: float = 4.0, stale: bool = False, free: int = 1, workers: int = 6) -> Any:
    service = cases.service(cases.load(demand, stale=stale), name="ns/tts", variants=(VARIANT,), least=1)
    replica = cases.replica("ns/tts-1", owner="ns/tts", flavor="east/h200", running=4)
    cleaning = [
        cases.worker(f"ns/w-{index}", unsafe_s=float(index), owner="ns/clean", flavor="east/h200")
        for index in range(workers)
    ]
    return cases.snapshot(
        [cases.node(1 + free + workers, free, flavor="east/h200")],
        [replica, *cleaning],
        [service],
        [cases.job("ns/clean", flavors=("east/h200",), checkpoint_s=8.0)],
        max_parallel=1,
    )


def test_three_times_the_traffic_takes_what_is_idle_and_stops_the_cheapest_workers() -> None:
    found = forecast(fleet(), "ns/tts", multiplier=3.0)

    assert (found.have, found.need, found.free, found.unmet) == (1, 3, 1, 0)
    assert [stop.uid for stop in found.stops] == ["ns/w-0"]
    assert found.stops[0].within_s == 8.0


def test_all_of_it_is_told_though_only_one_may_leave_at_once() -> None:
    found = forecast(fleet(free=0), "ns/tts", multiplier=5.0)

    assert [stop.uid for stop in found.stops] == ["ns/w-0", "ns/w-1", "ns/w-2", "ns/w-3"]
    assert found.lost_s == pytest.approx(0 + 1 + 2 + 3)


def test_what_could_not_be_had_is_told() -> None:
    found = forecast(fleet(free=0, workers=2), "ns/tts", multiplier=10.0)

    assert (found.need, len(found.stops), found.unmet) == (10, 2, 7)


def test_without_signals_every_replica_is_taken_for_full() -> None:
    found = forecast(fleet(demand=0.0, stale=True), "ns/tts", multiplier=2.0)

    assert (found.assumed, found.demand_slots, found.need) == (True, 8.0, 2)


def test_so_many_gpus_more_may_be_asked_for_too() -> None:
    found = forecast(fleet(free=0), "ns/tts", gpus=2)

    assert len(found.stops) == 2


def test_a_service_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="there is no service ns/other; there are: ns/tts"):
        forecast(fleet(), "ns/other", multiplier=2.0)


def test_the_answer_fits_the_status_of_a_reclaim() -> None:
    answer = forecast(fleet(), "ns/tts", multiplier=3.0).answer().dump()

    assert answer["workers"] == [
        {"pod": "ns/w-0", "job": "ns/clean", "node": "a", "flavor": "h200", "gpus": 1, "when": "8s", "lostSeconds": 0.0}
    ]


def test_what_if_says_it_in_words() -> None:
    document = show.what_if_document(forecast(fleet(), "ns/tts", multiplier=3.0), 3.0)

    text = show.what_if_text(document)

    assert "needs 3 replicas and has 1: 1 start on idle GPUs, 1 cleaning workers stop" in text
    assert "ns/w-0" in text


def test_get_shows_who_holds_each_gpu() -> None:
    snapshot = fleet(workers=2)
    usage = {"flavor": "h200", "total": 4, "inference": 1, "training": 0, "cleaning": 2, "idle": 1}
    pool = {"metadata": {"name": "east"}, "spec": {}, "status": {"usage": [usage]}}

    document = show.pools_document([pool], snapshot)
    text = show.pools_text(document)

    assert document["nodes"][0]["holders"][0]["kind"] == Kind.INFERENCE
    assert "inference ns/tts-1, cleaning ns/clean x2, 1 idle" in text
    assert text.splitlines()[1].split() == ["east", "h200", "4", "1", "0", "2", "0", "1", "0"]


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ((), "there is no CapacityPool; make one"),
        (("east",), "pool east has no GPUs yet; slackwater explain cpool/east says why"),
        (("east", "west"), "no pool has GPUs yet; slackwater explain cpool/east says why"),
    ],
)
def test_get_says_what_to_do_when_there_is_nothing_to_show(pools: tuple[str, ...], said: str) -> None:
    listed = [{"metadata": {"name": name}, "spec": {}} for name in pools]

    assert show.pools_text(show.pools_document(listed, cases.snapshot([]))).startswith(said)


def test_the_state_of_a_job_is_its_first_condition_that_is_not_as_it_should_be() -> None:
    def condition(type_: str, status: str, reason: str) -> dict[str, str]:
        return {"type": type_, "status": status, "reason": reason}

    good = [
        condition("Failed", "False", "NotFailed"),
        condition("Complete", "False", "ItemsOpen"),
        condition("Progressing", "True", "WorkersRunning"),
    ]
    bad = [condition("Failed", "True", "BadConfiguration"), *good[1:]]
    jobs = [
        {"metadata": {"namespace": "ns", "name": name}, "spec": {}, "status": {"conditions": conditions}}
        for name, conditions in (("good", good), ("bad", bad), ("new", []))
    ]

    jobs[0]["status"] |= {"workers": {"running": 3}, "slurm": {"running": 2}}

    text = show.jobs_text(show.list_document("jobs", jobs))

    assert text.splitlines()[1].split()[1:3] == ["3", "2"]  # one table for both clusters
    assert [line.split()[-1] for line in text.splitlines()] == ["STATE", "WorkersRunning", "BadConfiguration", "?"]


def test_explain_shows_conditions_and_the_newest_decision_last() -> None:
    obj = {
        "kind": "InferenceDeployment",
        "metadata": {"namespace": "ns", "name": "tts"},
        "status": {"conditions": [{"type": "Ready", "status": "True", "reason": "Serving", "message": "2 of 2 serve"}]},
    }
    events = [
        {"eventTime": "2026-11-30T10:00:09.000000Z", "reason": "ReplicaDraining", "note": "quiet", "type": "Normal"},
        {"eventTime": "2026-11-30T10:00:01.000000Z", "reason": "ReplicaStarted", "note": "traffic", "type": "Normal"},
    ]

    text = show.explain_text(show.explain_document(obj, events))

    assert "2 of 2 serve" in text
    assert text.index("ReplicaStarted") < text.index("ReplicaDraining")
