"""Where every GPU second goes, and that none goes missing."""

import random

import pytest

from slackwater_operator.accounts import STATES, Accounts
from slackwater_operator.core import Action, Kind, Load, Node, Phase, Reason, Service, Snapshot, Variant, Verb, Workload

LOAD = Load(0, 0, 0, 0, 0, 0, 0, 0, stale=False)
TTS = Service("tts", 0, 9, (Variant("tts/g", "g", 4, 1.0),), LOAD)


def workload(uid, kind=Kind.CLEANING, phase=Phase.RUNNING, **rest) -> Workload:
    values = {"owner": "tts" if kind is Kind.INFERENCE else "x", "flavor": "g", "node": "n", "started_s": 0.0} | rest
    return Workload(uid, kind, phase=phase, **values)


def snapshot(now_s, *workloads, gpus=8, **rest) -> Snapshot:
    return Snapshot(now_s, (Node("n", "g", gpus, **rest),), workloads, (TTS,))


def booked(seen, seconds=10.0) -> dict[str, float]:
    accounts = Accounts()
    accounts.add(seen, seen.now_s + seconds)
    return {state: value for state, value in accounts.seconds.items() if value}


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        pytest.param(
            workload("r", Kind.INFERENCE, running_slots=1), {"serving": 2.5, "serving_headroom": 7.5}, id="replica"
        ),
        pytest.param(workload("r", Kind.INFERENCE, running_slots=9), {"serving": 10.0}, id="no more than its slots"),
        pytest.param(
            workload("r", Kind.INFERENCE, Phase.DRAINING, running_slots=1),
            {"serving": 2.5, "draining": 7.5},
            id="draining",
        ),
        pytest.param(
            workload("r", Kind.INFERENCE, owner="?", running_slots=4), {"serving_headroom": 10.0}, id="unknown size"
        ),
        pytest.param(workload("r", Kind.INFERENCE, Phase.STARTING), {"starting": 10.0}, id="starting replica"),
        pytest.param(workload("w", phase=Phase.STARTING), {"starting": 10.0}, id="starting worker"),
        pytest.param(workload("w"), {"background": 10.0}, id="worker"),
        pytest.param(workload("w", phase=Phase.LEAVING), {"draining": 10.0}, id="leaving worker"),
        pytest.param(workload("t", Kind.TRAINING), {"training": 10.0}, id="training"),
        pytest.param(workload("t", Kind.TRAINING, Phase.PENDING, node=""), {"free": 10.0}, id="pending holds nothing"),
    ],
)
def test_each_gpu_is_in_one_state(there, expected):
    assert booked(snapshot(0.0, there, gpus=1)) == pytest.approx(expected)


def test_broken_and_free_are_what_is_not_held():
    assert booked(snapshot(0.0, workload("w", gpus=2), gpus=8, broken_gpus=1)) == {
        "background": 20.0,
        "broken": 10.0,
        "free": 50.0,
    }


def test_a_gpu_that_broke_under_its_holder_counts_as_held():
    assert booked(snapshot(0.0, workload("w", gpus=8), gpus=8, broken_gpus=1)) == {"background": 80.0}


def test_the_sum_over_the_states_is_gpus_times_wall_time_whatever_happens():
    rng = random.Random(7)
    accounts, now_s = Accounts(), 0.0
    for _ in range(200):
        there = [
            workload(
                f"{rng.randrange(30)}",
                rng.choice(list(Kind)),
                rng.choice(list(Phase)),
                gpus=rng.choice([1, 1, 2, 8]),
                running_slots=rng.randrange(9),
            )
            for _ in range(rng.randrange(12))
        ]
        until_s = now_s + rng.random()
        accounts.add(snapshot(now_s, *there, gpus=8, broken_gpus=rng.randrange(3)), until_s)
        now_s = until_s

    assert accounts.owned_s == pytest.approx(8 * now_s)
    assert set(accounts.seconds) == set(STATES)
    assert 0 <= accounts.useful_ratio_without_filling <= accounts.useful_ratio <= 1


def test_committed_seconds_are_useful_and_held_ones_alone_are_not():
    accounts = Accounts()
    accounts.add(snapshot(0.0, workload("w"), gpus=2), 10.0)
    assert accounts.useful_ratio == 0.0

    accounts.add(snapshot(10.0, workload("w", committed_s=8.0), gpus=2), 10.0)

    assert accounts.useful_ratio == pytest.approx(8 / 20)
    assert accounts.useful_ratio_without_filling == 0.0


def test_what_a_worker_held_beyond_what_it_committed_is_lost_when_it_is_gone():
    accounts = Accounts()
    accounts.add(snapshot(0.0, workload("w")), 10.0)
    accounts.add(snapshot(10.0, workload("w", committed_s=7.0)), 12.0)
    assert accounts.lost_s == 0.0

    accounts.add(snapshot(12.0), 13.0)

    assert accounts.lost_s == pytest.approx(5.0)
    assert accounts.committed_s == pytest.approx(7.0)


def test_the_last_word_of_a_worker_counts_and_its_time_to_leave_is_no_loss():
    accounts = Accounts()
    accounts.add(snapshot(0.0, workload("w")), 10.0)
    accounts.add(snapshot(10.0, workload("w")), 11.0, (Action(Verb.EVICT, "w", 1, Reason.TRAFFIC),))
    accounts.settle("w", 10.0)
    accounts.settle("never seen", 99.0)

    accounts.add(snapshot(11.0), 12.0)

    assert accounts.lost_s == 0.0
    assert accounts.committed_s == pytest.approx(10.0)
    assert accounts.seconds["draining"] == pytest.approx(1.0)


def test_drained_and_started_actions_are_booked_as_the_snapshot_will_show_them():
    accounts = Accounts()
    drain = (Action(Verb.DRAIN, "r", 1, Reason.QUIET), Action(Verb.START, "x", 1, Reason.IDLE))

    accounts.add(snapshot(0.0, workload("r", Kind.INFERENCE, running_slots=1), gpus=2), 4.0, drain)

    assert accounts.seconds["draining"] == pytest.approx(3.0)
    assert accounts.seconds["free"] == pytest.approx(4.0)


def test_work_that_was_committed_before_the_account_began_is_not_counted_again():
    accounts = Accounts()
    accounts.add(snapshot(0.0, workload("w", committed_s=500.0)), 10.0)
    accounts.add(snapshot(10.0, workload("w", committed_s=508.0)), 10.0)

    assert accounts.committed_s == pytest.approx(8.0)


def test_a_worker_cannot_commit_more_than_it_lived():
    accounts = Accounts()
    accounts.add(snapshot(0.0, workload("w", gpus=2)), 10.0)
    accounts.add(snapshot(10.0, workload("w", gpus=2, committed_s=1e9)), 10.0)

    assert accounts.committed_s == pytest.approx(20.0)
    assert accounts.useful_ratio <= 1.0


def test_broken_gpus_are_not_in_the_denominator():
    accounts = Accounts()
    accounts.add(snapshot(0.0, workload("t", Kind.TRAINING, gpus=3), gpus=8, broken_gpus=2), 10.0)

    assert accounts.useful_ratio == pytest.approx(3 / 6)


def test_nothing_owned_is_a_ratio_of_zero_and_plain_json():
    values = Accounts().as_dict()

    assert values["useful_ratio"] == values["useful_ratio_without_filling"] == 0.0
    assert values["seconds"] == dict.fromkeys(STATES, 0.0)


def test_time_does_not_run_backwards():
    with pytest.raises(ValueError, match="until_s"):
        Accounts().add(snapshot(10.0), 9.0)
