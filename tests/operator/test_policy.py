"""The policy, case by case, a snapshot in and a plan out: need, shrinking, training, nodes and limits."""

import math
from dataclasses import replace

import pytest

from slackwater_operator.core import Condition, Phase, Reason, Variant, Verb, Workload
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

# --- need: slots and replicas --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("demand", "options", "replicas"),
    [
        pytest.param(load(0), {}, 0, id="no demand needs nothing"),
        pytest.param(load(0), {"least": 2}, 2, id="the floor holds without demand"),
        pytest.param(load(0, rise=9), {"least": 1}, 1, id="yesterday's rises hold nothing without demand"),
        pytest.param(load(0), {"least": 1, "burst_slots": 9}, 3, id="a burst that a person asked for is kept"),
        pytest.param(load(8), {}, 2, id="a full replica is enough"),
        pytest.param(load(8.1), {}, 3, id="a part of a slot takes a replica"),
        pytest.param(load(8, slope=2), {}, 3, id="the slope counts over the lead time"),
        pytest.param(load(8, slope=2), {"lead_s": 8.0}, 6, id="a slow flavor looks further ahead"),
        pytest.param(load(8, slope=-5), {}, 2, id="a falling slope saves nothing"),
        pytest.param(load(8, rise=5), {}, 4, id="the learned rise is headroom"),
        pytest.param(load(8, rise=5), {"burst_slots": 3}, 4, id="headroom is the larger of rise and burst"),
        pytest.param(load(800), {"most": 5}, 5, id="never more than the maximum"),
        pytest.param(replace(load(0), panic_slots=8.0), {}, 2, id="the panic mean counts"),
        pytest.param(replace(load(0), stable_slots=8.0), {}, 2, id="the stable mean counts"),
        pytest.param(replace(load(0), now_slots=8.0), {}, 2, id="the newest sample counts"),
    ],
)
def test_starts_exactly_what_is_needed_at_once(demand, options, replicas):
    made = checked(snapshot([node(16, free=16)], services=[service(demand, **options)]))

    assert sum(action.count for action in made.actions) == replicas
    assert made.need_replicas == (("tts", replicas),)
    assert made.conditions in ((), (Condition.NO_WORK,))


def test_a_start_below_the_floor_says_so_and_the_rest_is_traffic():
    made = checked(snapshot([node(8, free=8)], services=[service(load(20), least=2)], jobs=[job(work=0)]))

    assert acts(made) == [(Verb.START, "tts/h200", 2, Reason.FLOOR), (Verb.START, "tts/h200", 3, Reason.TRAFFIC)]


def test_replicas_that_start_and_gpus_that_come_free_count_as_supply():
    there = [
        replica("r1"),
        replica("r2", phase=Phase.STARTING),
        worker("w1", phase=Phase.LEAVING, leaving_since_s=NOW_S - 1),
        worker("w2"),
    ]

    made = checked(snapshot([node(4)], there, [service(load(12))]))

    assert made.actions == ()
    assert made.need_replicas == (("tts", 3),)


def test_a_replica_that_waits_for_its_pod_is_not_started_again():
    pending = replica("r1", phase=Phase.PENDING, node="")

    made = checked(snapshot([node(2, free=2)], [pending], [service(load(4))], [job(work=0)]))

    assert made.actions == ()


def test_drains_are_cancelled_before_anything_is_started_and_starts_come_before_evictions():
    there = [
        replica("r1", phase=Phase.DRAINING, running=1, leaving_since_s=990.0),
        replica("r2", phase=Phase.DRAINING, running=3, leaving_since_s=990.0),
        worker("w1"),
        worker("w2"),
    ]

    made = checked(snapshot([node(5, free=1)], there, [service(load(16))]))

    assert acts(made) == [
        (Verb.CANCEL, "r2", Reason.TRAFFIC),
        (Verb.CANCEL, "r1", Reason.TRAFFIC),
        (Verb.START, "tts/h200", Reason.TRAFFIC),
        (Verb.EVICT, "w1", Reason.TRAFFIC),
    ]


def test_says_when_there_is_nothing_left_to_free():
    made = checked(snapshot([node(2)], [replica("r1", running=4), training("t1")], [service(load(9))]))

    assert made.actions == ()
    assert made.conditions == (Condition.UNMET_NEED,)


def test_fills_the_preferred_flavor_first_and_then_the_next():
    variants = (Variant("tts/old", "old", 2, 2.0, preference=1), Variant("tts/h200", "h200", 4, 2.0, preference=5))
    nodes = [node(2, free=2), node(4, free=4, name="b", flavor="old")]

    made = checked(snapshot(nodes, services=[service(load(11), variants=variants)], jobs=[job(work=0)]))

    assert acts(made) == [(Verb.START, "tts/h200", 2, Reason.TRAFFIC), (Verb.START, "tts/old", 2, Reason.TRAFFIC)]


def test_the_floors_of_all_services_come_before_the_traffic_of_any():
    services = [
        service(load(40), name="a", variants=(Variant("a/h200", "h200", 4, 2.0),)),
        service(load(0), name="b", least=1, variants=(Variant("b/h200", "h200", 4, 2.0),)),
    ]

    made = checked(snapshot([node(2, free=2)], services=services))

    assert acts(made) == [(Verb.START, "b/h200", Reason.FLOOR), (Verb.START, "a/h200", Reason.TRAFFIC)]


# --- down ----------------------------------------------------------------------------------------


def fleet(count: int, **rest) -> list[Workload]:
    return [replica(f"r{number}", running=1, **rest) for number in range(count)]


@pytest.mark.parametrize(
    ("count", "demand", "drained"),
    [
        pytest.param(4, load(8), 1, id="two too many: one is tolerated, one goes"),
        pytest.param(3, load(8), 0, id="one too many is tolerated"),
        pytest.param(4, load(8, peak=9), 0, id="the maximum of the window holds"),
        pytest.param(4, load(8, peak=math.inf), 0, id="a window that is not covered holds"),
        pytest.param(4, load(8, rise=1), 0, id="headroom has to fit into the survivors"),
        pytest.param(4, load(8, slope=0.5), 0, id="a rise under way holds"),
        pytest.param(4, load(8, stale=True), 0, id="stale signals hold"),
        pytest.param(40, load(8), 4, id="a tenth of the fleet a step"),
        pytest.param(2, load(0), 1, id="nothing is tolerated when the window saw no request"),
        pytest.param(1, load(0), 1, id="to zero if the spec allows"),
    ],
)
def test_shrinks_only_by_what_the_whole_window_did_not_need(count, demand, drained):
    made = checked(snapshot([node(count)], fleet(count), [service(demand)]))

    assert [action.verb for action in made.actions] == [Verb.DRAIN] * drained
    assert {action.reason for action in made.actions} <= {Reason.QUIET}


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(replica("x", phase=Phase.DRAINING, leaving_since_s=990.0), id="one drains"),
        pytest.param(replica("x", phase=Phase.STARTING), id="one starts"),
    ],
)
def test_no_new_shrink_while_a_change_is_under_way(extra):
    made = checked(snapshot([node(9)], [*fleet(8), extra], [service(load(8))]))

    assert made.actions == ()


def test_drains_the_replica_with_the_fewest_streams_then_the_least_preferred_then_the_newest():
    variants = (Variant("tts/h200", "h200", 4, 2.0, preference=1), Variant("tts/old", "old", 4, 2.0))
    base = [replica("busy", running=4, flavor="old", node="b"), replica("kept", running=2)]
    order = [
        replica("empty", running=0),
        replica("old-new", running=1, flavor="old", node="b", started_s=9.0),
        replica("old-old", running=1, flavor="old", node="b"),
        replica("h200", running=1),
    ]

    drained = []
    while len(order) > len(drained):
        there = base + [one for one in order if one.uid not in drained]
        seen = snapshot(
            [node(9), node(9, name="b", flavor="old")],
            there,
            [service(load(1), variants=variants, deadband_replicas=0)],
        )
        drained += [action.uid for action in checked(seen).actions]

    assert drained == [one.uid for one in order]


def test_survivors_of_unequal_size_must_carry_the_load():
    variants = (Variant("tts/big", "big", 16, 2.0, preference=1), Variant("tts/small", "small", 2, 2.0))
    there = [
        replica("big", running=0, flavor="big", node="b"),
        replica("s1", running=2, flavor="small"),
        replica("s2", running=2, flavor="small"),
        replica("s3", running=2, flavor="small"),
    ]
    nodes = [node(3, flavor="small"), node(1, name="b", flavor="big")]

    made = checked(snapshot(nodes, there, [service(load(10), variants=variants, deadband_replicas=0)]))

    assert acts(made) == [(Verb.DRAIN, "s1", Reason.QUIET)]  # without the big one 6 slots would be left


def test_replicas_above_the_maximum_are_drained_at_once_even_on_stale_signals():
    made = checked(snapshot([node(5)], fleet(5), [service(load(20, stale=True), most=2)]))

    assert [action.reason for action in made.actions] == [Reason.LIMIT] * 3
    assert {action.verb for action in made.actions} == {Verb.DRAIN}


# --- stale signals -------------------------------------------------------------------------------


def test_stale_signals_keep_the_floor_and_hold_everything_else():
    there = [replica("r1", running=4), *[worker(f"w{n}") for n in range(3)]]
    seen = snapshot([node(5, free=1)], there, [service(load(99, stale=True), least=3)], [job()])

    made = checked(seen)

    assert acts(made) == [(Verb.START, "tts/h200", Reason.FLOOR), (Verb.EVICT, "w0", Reason.FLOOR)]
    assert made.conditions == (Condition.SIGNALS_STALE,)
    assert made.need_replicas == (("tts", 3),)


def test_a_service_that_was_never_heard_stops_lending_only_while_it_has_replicas():
    unheard = service(replace(load(0, stale=True), age_s=math.inf), least=0)

    nothing = checked(snapshot([node(3, free=3)], (), [unheard], [job()]))
    serving = checked(snapshot([node(3, free=2)], fleet(1), [unheard], [job()]))

    assert acts(nothing) == [(Verb.START, "clean", 3, Reason.IDLE)]
    assert serving.actions == ()


def test_stale_signals_of_one_service_do_not_stop_lending_on_other_flavors():
    nodes = [node(1, free=1), node(1, free=1, name="b", flavor="old")]

    made = checked(snapshot(nodes, services=[service(load(0, stale=True))], jobs=[job(flavors=("h200", "old"))]))

    assert acts(made) == [(Verb.START, "clean", Reason.IDLE)]


# --- training ------------------------------------------------------------------------------------


def test_waiting_training_gets_gpus_of_cleaning_and_not_of_inference():
    there = [replica("r1", running=4), worker("w1"), worker("w2"), training("t1", phase=Phase.PENDING, gpus=2)]

    made = checked(snapshot([node(3)], there, [service(load(4))], [job()]))

    assert acts(made) == [(Verb.EVICT, "w1", Reason.TRAINING), (Verb.EVICT, "w2", Reason.TRAINING)]


def test_free_gpus_that_training_waits_for_are_not_lent():
    waiting = training("t1", phase=Phase.PENDING, gpus=2)

    made = checked(snapshot([node(3, free=3)], [waiting], jobs=[job()]))

    assert acts(made) == [(Verb.START, "clean", Reason.IDLE)]


def test_training_takes_a_free_gpu_rather_than_waiting_for_one_that_leaves():
    there = [worker("w1", phase=Phase.LEAVING, leaving_since_s=NOW_S - 1), training("t1", phase=Phase.PENDING)]

    made = checked(snapshot([node(2, free=1)], there, jobs=[job()]))

    assert made.actions == ()


def test_training_that_can_never_fit_evicts_nobody():
    made = checked(snapshot([node(2)], [worker("w1"), worker("w2"), training("t1", phase=Phase.PENDING, gpus=8)]))

    assert made.actions == ()


# --- nodes and limits ----------------------------------------------------------------------------


@pytest.mark.parametrize("state", [{"schedulable": False}, {"broken_gpus": 4}], ids=["cordoned", "broken"])
def test_nothing_starts_on_a_lost_node_and_preemptible_work_leaves_it(state):
    there = [worker("w1"), training("t1")]

    made = checked(snapshot([node(4, free=2, **state)], there, [service(load(8))], [job(least=3)]))

    assert acts(made) == [(Verb.EVICT, "w1", Reason.NODE)]


def test_a_replica_on_a_cordoned_node_serves_until_another_has_taken_over():
    nodes = [node(1, schedulable=False), node(1, free=1, name="b")]
    old, new = replica("old", running=2), replica("new", node="b")

    first = checked(snapshot(nodes, [old], [service(load(4))]))
    starting = checked(
        snapshot([nodes[0], node(1, name="b")], [old, replace(new, phase=Phase.STARTING)], [service(load(4))])
    )
    running = checked(snapshot([nodes[0], node(1, name="b")], [old, new], [service(load(4))]))

    assert acts(first) == [(Verb.START, "tts/h200", Reason.NODE)]
    assert starting.actions == ()
    assert acts(running) == [(Verb.DRAIN, "old", Reason.NODE)]


def test_a_gpu_that_breaks_under_a_full_node_sends_the_cheapest_worker_away():
    there = [worker("w1", unsafe_s=5), worker("w2", unsafe_s=1), replica("r1", running=4)]
    whole = [node(3, broken_gpus=1)]

    made = checked(snapshot(whole, there, [service(load(4))]))
    after = [there[0], replace(there[1], phase=Phase.LEAVING, leaving_since_s=NOW_S), there[2]]
    later = checked(snapshot(whole, after, [service(load(8))]))

    assert acts(made) == [(Verb.EVICT, "w2", Reason.NODE)]
    assert acts(later) == [(Verb.EVICT, "w1", Reason.TRAFFIC)]  # what leaves does not come back: it is broken


def test_workers_above_the_maximum_are_evicted_cheapest_first():
    there = [worker("w1", unsafe_s=9), worker("w2", unsafe_s=1), worker("w3", unsafe_s=5)]

    made = checked(snapshot([node(3)], there, jobs=[job(most=1)]))

    assert acts(made) == [(Verb.EVICT, "w2", Reason.LIMIT), (Verb.EVICT, "w3", Reason.LIMIT)]
