"""One hour of real traffic through the real policy, on simulated fleets.

The hour has 54 streams at once on average and 89 at its peak.  A fleet is sized here so that the peak
fills 70 % of it, which is what services are commonly provisioned for; serving alone then uses 42 % of it,
about what fleets sized for the 99th percentile of fourteen days are used (48 %).
"""

from collections import Counter
from dataclasses import replace

import pytest

from slackwater_operator.core import Condition, Kind, Phase, Verb
from slackwater_operator.simulate import Fleet, SimulatedCluster, simulate, ticks
from slackwater_operator.traces import TraceRequest, load_conversation, overlay, slice_trace
from slackwater_operator.traffic import Window

ONE_SERVICE = Fleet(gpus=32, slots_per_replica=4, checkpoint_s=3.0)


def test_an_hour_of_the_trace_fills_the_fleet_and_nobody_waits():
    outcome = simulate(ONE_SERVICE, load_conversation())

    assert outcome.requests == 19_366
    assert 0.40 < outcome.useful_ratio_without_filling < 0.45
    assert outcome.useful_ratio >= 1.6 * outcome.useful_ratio_without_filling
    assert outcome.wait_p99_s == 0.0
    assert outcome.wait_max_s <= ONE_SERVICE.lead_s
    assert outcome.late_ratio <= 0.001
    assert outcome.evictions >= 3
    assert outcome.lost_s == pytest.approx(0.0, abs=1e-6)
    assert outcome.turns <= 2 * 58 / 5  # changes of direction in 58 minutes: two in five minutes of real traffic
    assert outcome.seconds["free"] <= 0.08 * sum(outcome.seconds.values())


def test_a_pool_of_eight_services_is_more_than_nine_tenths_useful():
    fleet = Fleet(gpus=56, slots_per_replica=16, window=Window(down_s=30, rise_quantile=0.9))  # 896 slots, peak 599

    outcome = simulate(fleet, overlay(load_conversation(), 8, apart_s=7.3))

    assert outcome.useful_ratio >= 0.9
    assert outcome.useful_ratio >= 1.6 * outcome.useful_ratio_without_filling
    assert outcome.wait_p99_s == 0.0
    assert outcome.late_ratio <= 0.001


def test_a_quiet_hour_without_cleaning_work_is_what_the_filling_is_compared_with():
    idle = simulate(Fleet(gpus=32, slots_per_replica=4, open_units=0), slice_trace(load_conversation(), 0, 900))

    assert idle.useful_ratio == idle.useful_ratio_without_filling
    assert idle.evictions == 0
    assert idle.seconds["free"] > 0.2 * sum(idle.seconds.values())


def test_victims_that_hang_are_replaced_and_lose_at_most_one_checkpoint_interval():
    fleet = Fleet(gpus=32, slots_per_replica=4, checkpoint_s=7.0, hang_ratio=0.3, seed=3)

    outcome = simulate(fleet, slice_trace(load_conversation(), 1000, 1200))

    assert outcome.killed > 0
    assert outcome.actions["evict retarget"] > 0
    assert 0 < outcome.max_lost_s <= 7.0
    assert outcome.lost_s <= 7.0 * outcome.killed
    assert outcome.late_ratio <= 0.01


def burst(size: int) -> list[TraceRequest]:
    """Twelve minutes of the trace with `size` more requests within four seconds of its tenth minute."""
    more = [TraceRequest(600 + 4 * number / size, 100, 300) for number in range(size)]
    return sorted([*slice_trace(load_conversation(), 0, 720), *more], key=lambda request: request.t_s)


def test_a_burst_larger_than_any_seen_waits_about_one_lead_time():
    outcome = simulate(ONE_SERVICE, burst(50))

    assert 0 < outcome.wait_max_s <= ONE_SERVICE.lead_s
    assert outcome.lost_s == pytest.approx(0.0, abs=1e-6)


def test_the_same_burst_waits_for_streams_to_end_where_the_policy_does_not_see_it():
    seen = simulate(ONE_SERVICE, burst(50))

    unseen = simulate(replace(ONE_SERVICE, deaf_s=(600.0, 700.0)), burst(50))

    assert unseen.peak_replicas < seen.peak_replicas
    assert unseen.wait_max_s > 3 * seen.wait_max_s
    assert unseen.late_ratio > 0.01 > seen.late_ratio


def test_while_the_signals_are_lost_nothing_shrinks_and_nothing_is_evicted():
    cluster = SimulatedCluster(
        Fleet(gpus=32, slots_per_replica=4, deaf_s=(300.0, 500.0)), slice_trace(load_conversation(), 0, 600)
    )

    deaf = [made for seen, made in ticks(cluster, 599.0) if 305.0 < seen.now_s < 500.0]

    assert all(made.actions == () for made in deaf)
    assert all(made.conditions == (Condition.SIGNALS_STALE,) for made in deaf)


def test_no_gpu_is_held_twice_and_none_is_forgotten_at_any_moment():
    fleet = Fleet(gpus=20, slots_per_replica=4, gpus_per_node=8, hang_ratio=0.2)
    cluster = SimulatedCluster(fleet, slice_trace(load_conversation(), 1800, 400))

    for seen, made in ticks(cluster, 400.0):
        held = Counter()
        for workload in seen.workloads:
            held[workload.node] += workload.gpus
        for node in seen.nodes:
            assert held[node.name] + len(node.idle_since_s) == node.gpus
        running = {workload.uid: workload for workload in seen.workloads}
        for action in made.actions:
            if action.verb is Verb.EVICT:
                assert running[action.uid].kind is Kind.CLEANING
                assert running[action.uid].phase is not Phase.LEAVING


def test_the_same_hour_is_played_the_same_way_twice():
    fleet = Fleet(gpus=16, slots_per_replica=8, hang_ratio=0.2, seed=5)
    requests = slice_trace(load_conversation(), 600, 600)

    assert simulate(fleet, requests) == simulate(fleet, requests)


def test_an_hour_without_requests_lends_all_but_the_floor():
    outcome = simulate(Fleet(gpus=8, slots_per_replica=4), [TraceRequest(400.0, 1, 20)])

    assert outcome.peak_replicas == 1
    assert outcome.actions == {"start floor": 1, "start idle": 7}
    assert outcome.useful_ratio > 0.85
