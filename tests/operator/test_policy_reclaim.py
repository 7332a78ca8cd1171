"""The policy, case by case: whom it sends away, what it lends, and the budget that no plan may break."""

from dataclasses import replace

import pytest

from slackwater_operator.core import (
    Action,
    BudgetExceeded,
    Condition,
    Flavor,
    Kind,
    Limits,
    Phase,
    Plan,
    Reason,
    Variant,
    Verb,
)
from slackwater_operator.policy import check_budget, plan
from slackwater_operator.testing.cases import (
    NOW_S,
    acts,
    checked,
    job,
    load,
    node,
    replica,
    service,
    snapshot,
    training,
    worker,
)

# --- reclaim -------------------------------------------------------------------------------------


def test_evicts_the_worker_that_loses_least_work_first():
    there = [worker("w1", unsafe_s=9), worker("w2", unsafe_s=1), worker("w3", unsafe_s=5)]

    made = checked(snapshot([node(3)], there, [service(load(8))]))

    assert [action.uid for action in made.actions] == ["w2", "w3"]


def test_each_eviction_names_who_waits_for_its_gpus_and_none_does_for_a_broken_node():
    there = [worker("w1", flavor="old", node="b"), worker("w2"), worker("w3", node="c")]
    variants = (Variant("tts/h200", "h200", 4, 2.0, preference=1), Variant("tts/old", "old", 4, 2.0))
    nodes = [node(1), node(1, name="b", flavor="old"), node(1, name="c", schedulable=False)]
    waiting = training("big", phase=Phase.PENDING, flavor="old")

    made = checked(snapshot(nodes, [*there, waiting], [service(load(4), variants=variants)]))

    assert {action.uid: action.beneficiary for action in made.actions} == {"w2": "tts/h200", "w1": "big", "w3": ""}


def test_a_flavor_with_limits_of_its_own_is_lent_and_retargeted_by_them():
    slow = Flavor("old", Limits(lend_after_s=60.0, retarget_after_s=120.0))
    leaving = worker("w1", flavor="old", node="b", phase=Phase.LEAVING, leaving_since_s=NOW_S - 30)
    nodes = [node(1, free=1, idle_s=10), node(2, free=1, name="b", flavor="old", idle_s=10)]
    seen = snapshot(nodes, [leaving], jobs=[job(flavors=("h200", "old"))])

    assert [action.count for action in checked(seen).actions] == [2]
    assert [action.count for action in checked(replace(seen, flavors=(slow,))).actions] == [1]
    variants = (Variant("tts/old", "old", 4, 2.0),)
    wanting = replace(
        seen,
        nodes=(node(2, name="b", flavor="old"),),
        workloads=(leaving, worker("w2", flavor="old", node="b")),
        services=(service(load(4), variants=variants),),
    )
    assert [action.reason for action in checked(wanting).actions] == [Reason.RETARGET]
    assert checked(replace(wanting, flavors=(slow,))).actions == ()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({"unsafe_s": 9.0}, {"kind": Kind.TRAINING}, id="lower priority before less loss"),
        pytest.param(
            {"phase": Phase.STARTING, "unsafe_s": 9.0}, {"unsafe_s": 1.0}, id="one that only starts loses nothing"
        ),
        pytest.param({"unsafe_s": 4.0}, {"unsafe_s": 1.0, "restart_cost_s": 5.0}, id="a dear restart counts as loss"),
        pytest.param({"flavor": "h200"}, {"flavor": "old", "started_s": 900.0}, id="right flavor before newest"),
        pytest.param({"started_s": 900.0}, {"started_s": 800.0}, id="newest"),
        pytest.param({"uid": "w1"}, {"uid": "w2"}, id="uid"),
    ],
)
def test_victim_order(first, second):
    def victim(uid, values):
        values = {"uid": uid} | values
        made = worker(
            values.pop("uid"), unsafe_s=values.pop("unsafe_s", 0.0), node="b" if values.get("flavor") == "old" else "a"
        )
        return replace(made, **values)

    there = [victim("w5", second), victim("w4", first)]
    variants = (Variant("tts/h200", "h200", 4, 2.0, preference=1), Variant("tts/old", "old", 4, 2.0))
    nodes = [node(2), node(2, name="b", flavor="old")]

    made = checked(snapshot(nodes, there, [service(load(4), variants=variants)]))

    assert [action.uid for action in made.actions] == [there[1].uid]


def test_a_victim_for_the_floor_is_not_taken_again_for_the_traffic():
    there = [worker(f"w{n}") for n in range(4)]

    made = checked(snapshot([node(4)], there, [service(load(8), least=1)]))

    assert acts(made) == [(Verb.EVICT, "w0", Reason.FLOOR), (Verb.EVICT, "w1", Reason.TRAFFIC)]


def test_what_may_not_be_taken_is_not_taken():
    there = [
        training("t1"),
        worker("kept", preemptible=False),
        replica("other", owner="other"),
        worker("leaving", phase=Phase.LEAVING, leaving_since_s=NOW_S - 1),
    ]

    made = checked(snapshot([node(4)], there, [service(load(8))]))

    assert made.actions == ()
    assert made.conditions == (Condition.UNMET_NEED,)


def test_preemptible_training_goes_after_all_cleaning():
    there = [training("t1", preemptible=True, durable_s=NOW_S), worker("w1", unsafe_s=99)]

    made = checked(snapshot([node(2)], there, [service(load(8))]))

    assert [action.uid for action in made.actions] == ["w1", "t1"]


def test_the_worker_floor_is_never_evicted_for_traffic_and_keeps_who_would_lose_most():
    there = [worker("w1", unsafe_s=9), worker("w2", unsafe_s=1), worker("w3", unsafe_s=5)]

    made = checked(snapshot([node(3)], there, [service(load(99))], [job(least=2)]))

    assert [action.uid for action in made.actions] == ["w2"]
    assert made.conditions == (Condition.UNMET_NEED,)


def test_a_victim_that_hangs_past_its_deadline_is_replaced_by_another_once():
    hung = worker("hung", phase=Phase.LEAVING, leaving_since_s=NOW_S - 9)
    there = [hung, worker("w1"), worker("w2")]

    first = checked(snapshot([node(3)], there, [service(load(4))]))
    gone = [hung, replace(there[1], phase=Phase.LEAVING, leaving_since_s=NOW_S), there[2]]
    second = checked(snapshot([node(3)], gone, [service(load(4))]))
    more = checked(snapshot([node(3)], gone, [service(load(8))]))

    assert acts(first) == [(Verb.EVICT, "w1", Reason.RETARGET)]
    assert second.actions == ()
    assert acts(more) == [(Verb.EVICT, "w2", Reason.TRAFFIC)]


def test_each_substitute_is_waited_for_twice_as_long_since_where_all_hang_more_victims_do_not_help():
    there = [worker(f"w{n}") for n in range(9)]
    sent_s = []

    for second in range(600):
        seen = snapshot([node(9)], there, [service(load(4))])
        made = checked(replace(seen, now_s=NOW_S + second))
        for action in made.actions:
            sent_s.append(second)
            there = [
                replace(one, phase=Phase.LEAVING, leaving_since_s=NOW_S + second) if one.uid == action.uid else one
                for one in there
            ]

    assert sent_s == [0, 9, 26, 59, 124, 189, 254, 319, 384]


def test_no_more_evictions_run_at_once_than_the_limit():
    leaving = [worker(f"l{n}", phase=Phase.LEAVING, leaving_since_s=NOW_S - 1) for n in range(2)]
    there = [*leaving, *[worker(f"w{n}") for n in range(6)]]

    made = checked(snapshot([node(8)], there, [service(load(32))], max_parallel=5))

    assert [action.uid for action in made.actions] == ["w0", "w1", "w2"]


def test_a_large_victim_is_taken_only_if_no_smaller_ones_suffice():
    big = worker("big", gpus=4)
    small = [worker("s1", unsafe_s=50), worker("s2", unsafe_s=60)]

    enough = checked(snapshot([node(6)], [big, *small], [service(load(8))]))
    too_few = checked(snapshot([node(6)], [big, *small], [service(load(12))]))

    assert [action.uid for action in enough.actions] == ["s1", "s2"]
    assert [action.uid for action in too_few.actions] == ["big"]  # it frees all that is needed by itself


def test_a_replica_of_two_gpus_takes_victims_of_one_node():
    variants = (Variant("tts/h200", "h200", 4, 2.0, gpus=2),)
    there = [worker("a1", unsafe_s=1), worker("b1", node="b", unsafe_s=2), worker("b2", node="b", unsafe_s=3)]

    made = checked(snapshot([node(1), node(2, name="b")], there, [service(load(4), variants=variants)]))

    assert [action.uid for action in made.actions] == ["b1", "b2"]


def test_nothing_is_evicted_where_it_would_not_make_room_for_a_whole_replica():
    variants = (Variant("tts/h200", "h200", 4, 2.0, gpus=4),)

    made = checked(snapshot([node(2)], [worker("w1"), worker("w2")], [service(load(4), variants=variants)]))

    assert made.actions == ()
    assert made.conditions == (Condition.UNMET_NEED,)


# --- lend ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "workers"),
    [
        pytest.param(snapshot([node(4, free=4)], jobs=[job()]), 4, id="all that is idle"),
        pytest.param(snapshot([node(4, free=4, idle_s=1.0)], jobs=[job()]), 0, id="not idle for long enough"),
        pytest.param(snapshot([node(4, free=4)], jobs=[job(most=2)]), 2, id="no more than the job allows"),
        pytest.param(snapshot([node(4, free=4)], jobs=[job(work=3)]), 3, id="no more than there is work"),
        pytest.param(snapshot([node(4, free=4)], jobs=[job(flavors=("old",))]), 0, id="only its flavors"),
        pytest.param(snapshot([node(4, free=4)], jobs=[job(gpus=3)]), 1, id="workers of several GPUs"),
        pytest.param(
            snapshot([node(4, free=2)], [worker(f"w{n}", phase=Phase.STARTING) for n in range(2)], jobs=[job(work=3)]),
            1,
            id="those that start will claim work first",
        ),
        pytest.param(
            snapshot([node(4, free=3)], [replica("r1")], [service(load(3))], [job()]), 3, id="spare slots carry no more"
        ),
        pytest.param(
            snapshot([node(4, free=3)], [replica("r1")], [service(load(0), burst_slots=8)], [job()]),
            2,
            id="headroom is started, not lent",
        ),
        pytest.param(
            snapshot(
                [node(9, free=8)], [replica("r1")], [service(load(2, slope=1.0))], [job(start_s=5.0, checkpoint_s=5.0)]
            ),
            6,
            id="what the slope will want before the worker is any good is kept",
        ),
        pytest.param(
            snapshot(
                [node(9, free=8)], [replica("r1")], [service(load(2, slope=1.0))], [job(start_s=0.5, checkpoint_s=0.5)]
            ),
            8,
            id="a short lease is enough for a quick worker",
        ),
        pytest.param(
            snapshot([node(9, free=8)], [replica("r1")], [service(load(2, slope=1.0), most=1)], [job(start_s=9.0)]),
            8,
            id="nothing is kept for a service at its maximum",
        ),
    ],
)
def test_lends_idle_gpus(seen, workers):
    made = checked(seen)

    assert sum(action.count for action in made.actions if action.uid == "clean") == workers


def test_jobs_share_by_weight_counting_what_they_have():
    jobs = [job("heavy", weight=3.0), job("light", weight=1.0)]
    there = [worker("w1", owner="light"), worker("w2", owner="light")]

    made = checked(snapshot([node(8, free=6)], there, jobs=jobs))

    assert acts(made) == [(Verb.START, "heavy", 6, Reason.IDLE)]  # 6 : 2 is 3 : 1


def test_floors_of_jobs_start_first_and_need_not_wait():
    jobs = [job("a"), job("b", least=2)]

    made = checked(snapshot([node(3, free=3, idle_s=0.0)], jobs=jobs))

    assert acts(made) == [(Verb.START, "b", 2, Reason.FLOOR)]


def test_says_when_there_is_no_work_for_idle_gpus():
    made = checked(snapshot([node(1, free=1)], services=[service(load(0))], jobs=[job(work=0)]))

    assert made.conditions == (Condition.NO_WORK,)


# --- budget --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        pytest.param([(Verb.START, "clean", 3)], "2 are seen free", id="more starts than free GPUs"),
        pytest.param(
            [(Verb.START, "clean", 1), (Verb.START, "tts/h200", 2)], "2 are seen free", id="together too many"
        ),
        pytest.param([(Verb.START, "wide", 1)], "do not fit", id="two GPUs, but on different nodes"),
        pytest.param([(Verb.START, "nobody", 1)], "nobody asked", id="unknown"),
        pytest.param([(Verb.EVICT, "w1", 1), (Verb.EVICT, "w1", 1)], "two actions", id="evicted twice"),
        pytest.param([(Verb.EVICT, "leaving", 1)], "is leaving", id="evicted although it leaves"),
        pytest.param([(Verb.EVICT, "kept", 1)], "not preemptible", id="not preemptible"),
        pytest.param([(Verb.EVICT, "r1", 1)], "is inference", id="a replica is never evicted"),
        pytest.param([(Verb.DRAIN, "w1", 1)], "is cleaning", id="a worker is never drained"),
        pytest.param([(Verb.CANCEL, "r1", 1)], "is running", id="nothing to cancel"),
        pytest.param([(Verb.DRAIN, "gone", 1)], "not in the snapshot", id="gone"),
    ],
)
def test_refuses_a_plan_that_breaks_the_budget(actions, message):
    there = [
        replica("r1"),
        worker("w1"),
        worker("kept", preemptible=False),
        worker("leaving", phase=Phase.LEAVING, leaving_since_s=NOW_S),
    ]
    nodes = [node(5, free=1), node(1, free=1, name="b"), node(4, free=4, name="c", schedulable=False)]
    seen = snapshot(nodes, there, [service(load(0))], [job(), job("wide", gpus=2)])

    with pytest.raises(BudgetExceeded, match=message):
        check_budget(seen, Plan(tuple(Action(verb, uid, count, Reason.TRAFFIC) for verb, uid, count in actions)))


def test_gpus_that_are_said_to_be_free_but_are_held_are_not_given_away():
    seen = snapshot([node(2, free=2)], [replica("r1"), replica("r2")], [service(load(9))], [job()])

    made = plan(seen)

    assert not any(action.verb is Verb.START for action in made.actions)
    with pytest.raises(BudgetExceeded):
        check_budget(seen, Plan((Action(Verb.START, "clean", 1, Reason.IDLE),)))


def test_starts_on_several_flavors_are_counted_against_every_union_of_them():
    nodes = [node(1, free=1, name=name, flavor=name) for name in "abc"]
    jobs = [job("ab", flavors=("a", "b")), job("bc", flavors=("b", "c"))]
    fits = Plan((Action(Verb.START, "ab", 2, Reason.IDLE), Action(Verb.START, "bc", 1, Reason.IDLE)))
    not_even_together = Plan((Action(Verb.START, "ab", 2, Reason.IDLE), Action(Verb.START, "bc", 2, Reason.IDLE)))

    check_budget(snapshot(nodes, jobs=jobs), fits)

    with pytest.raises(BudgetExceeded, match="3 are seen free"):
        check_budget(snapshot(nodes, jobs=jobs), not_even_together)
