"""What the fleet's plan does, in tables and as properties over random clusters."""

from collections import Counter
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater_slurm.core import GpuCount
from slackwater_slurm.fleet import Cancel, Hold, Release, Requeue, Resume, SetThrottle, Submit, Wish, plan
from slackwater_slurm.observation import Array, Observation, Task

JOB = Wish("podcasts", max_workers=100)


def seen(*arrays: Array, idle: dict[str, int] | None = None, yielding: dict[str, str] | None = None) -> Observation:
    return Observation(
        now_s=0.0,
        nodes=(),
        gpus=(),
        idle=GpuCount.of(idle or {}),
        arrays=arrays,
        yielding=tuple(sorted((yielding or {}).items())),
    )


def array(
    array_id: int = 1,
    held: int = 0,
    *,
    displaced: int = 0,
    waiting: int = 0,
    throttle: int | None = None,
    gpu_type: str = "",
    job: str = "podcasts",
    node: str = "h1",
    paused: int = 0,
    stuck: tuple[str, ...] = (),
) -> Array:
    tasks = tuple(Task(f"{array_id}_{i}", array_id, i, node, GpuCount.of({"": 1}), True, float(i)) for i in range(held))
    return Array(array_id, job, gpu_type, tasks, displaced, waiting, paused, stuck, throttle)


def test_tasks_that_a_node_refused_to_launch_are_let_start_again() -> None:
    stuck = array(held=4, displaced=2, waiting=5, throttle=6, stuck=("1_2", "1_3"))

    assert plan(seen(stuck), [JOB]) == (Release(("1_2", "1_3")),)
    assert Release(("1_2", "1_3")) not in plan(seen(stuck), [replace(JOB, is_open=False)])


def test_a_node_that_slurm_drained_for_no_fault_of_its_own_is_resumed() -> None:
    assert plan(replace(seen(array(held=4, waiting=5, throttle=4)), misjudged=("h1",)), [JOB]) == (Resume("h1"),)


def test_submits_one_array_sized_to_the_idle_gpus() -> None:
    assert plan(seen(idle={"h200": 5}), [JOB]) == (Submit("podcasts", "", 1000, 5),)


def test_leaves_an_array_waiting_when_no_gpu_is_idle_so_that_slurm_can_fill_without_us() -> None:
    assert plan(seen(), [JOB]) == (Submit("podcasts", "", 1000, 1),)


def test_raises_the_throttle_at_once_when_gpus_are_idle() -> None:
    assert plan(seen(array(held=4, waiting=50, throttle=4), idle={"h200": 3}), [JOB]) == (SetThrottle(1, 7),)


def test_keeps_the_room_of_displaced_workers_so_that_slurm_puts_them_back_without_us() -> None:
    assert plan(seen(array(held=4, displaced=8, waiting=50, throttle=12)), [JOB]) == ()


def test_counts_room_once_when_the_gpus_of_displaced_workers_are_idle_again() -> None:
    assert plan(seen(array(held=4, displaced=8, waiting=50, throttle=12), idle={"h200": 8}), [JOB]) == ()


def test_lowers_the_throttle_when_idle_gpus_went_to_others() -> None:
    assert plan(seen(array(held=4, waiting=50, throttle=12)), [JOB]) == (SetThrottle(1, 4),)


def test_tolerates_a_throttle_that_is_one_too_high() -> None:
    assert plan(seen(array(held=4, waiting=50, throttle=5)), [JOB]) == ()


def test_sets_a_throttle_where_slurm_has_none() -> None:
    assert plan(seen(array(held=4, waiting=50, throttle=0)), [JOB]) == (SetThrottle(1, 4),)


def test_submits_another_array_when_the_first_is_used_up() -> None:
    actions = plan(seen(array(held=4), idle={"h200": 3}), [replace(JOB, array_tasks=20)])

    assert actions == (Submit("podcasts", "", 20, 3),)


def test_splits_the_room_between_an_old_array_and_its_successor() -> None:
    old, new = array(1, held=4, waiting=2, throttle=6), array(2, held=1, waiting=19, throttle=1)

    assert plan(seen(old, new, idle={"h200": 4}), [JOB]) == (SetThrottle(2, 3),)


def test_cancels_the_younger_of_two_arrays_that_a_killed_controller_left() -> None:
    older, younger = array(1, held=4, waiting=500, throttle=4), array(2, waiting=500, throttle=4)

    assert plan(seen(older, younger), [JOB]) == (Cancel(2, "an older array suffices"),)


def test_a_finished_job_is_held_while_workers_run_and_cancelled_when_none_does() -> None:
    done = replace(JOB, is_open=False)

    assert plan(seen(array(held=2, waiting=5, throttle=2), idle={"h200": 2}), [done]) == (Hold(1),)
    assert plan(seen(array(held=2, waiting=5, paused=5, throttle=2)), [done]) == ()
    assert plan(seen(array(waiting=5, paused=5, throttle=2)), [done]) == (Cancel(1, "no longer wanted"),)


@pytest.mark.parametrize("reason", ["drain", "maintenance"])
def test_leaves_nodes_that_are_to_be_left(reason: str) -> None:
    actions = plan(seen(array(held=2, waiting=5, throttle=2, node="h1"), yielding={"h1": reason}), [JOB])

    assert actions == (Requeue(("1_0", "1_1"), reason),)


def test_a_lowered_maximum_is_given_back_by_the_newest_workers() -> None:
    actions = plan(seen(array(held=4, waiting=5, throttle=4)), [replace(JOB, max_workers=2)])

    assert actions == (SetThrottle(1, 2), Requeue(("1_2", "1_3"), "maximum"))


def test_two_jobs_share_idle_gpus_by_the_number_of_their_workers() -> None:
    jobs = [Wish("one", max_workers=100), Wish("two", max_workers=100)]

    actions = plan(seen(array(1, held=4, waiting=9, throttle=4, job="one"), idle={"h200": 6}), jobs)

    assert actions == (SetThrottle(1, 5), Submit("two", "", 1000, 5))


def test_each_named_type_has_its_own_array() -> None:
    wish = replace(JOB, gpu_types=("rtx5090", "h200"))

    actions = plan(seen(idle={"h200": 2, "rtx5090": 3, "a100": 9}), [wish])

    assert actions == (Submit("podcasts", "rtx5090", 1000, 3), Submit("podcasts", "h200", 1000, 2))


def test_an_array_of_a_type_that_is_no_longer_wished_runs_out() -> None:
    wish = replace(JOB, gpu_types=("h200",))

    actions = plan(seen(array(1, held=2, waiting=5, throttle=2, gpu_type="rtx5090"), idle={"h200": 2}), [wish])

    assert actions == (Hold(1), Submit("podcasts", "h200", 1000, 2))


def test_a_wish_that_cannot_be_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"job podcasts: .* got 5, 3, 1000"):
        Wish("podcasts", min_workers=5, max_workers=3)


# --- properties ------------------------------------------------------------------------------------------

TYPES = ("h200", "rtx5090")
counts = st.integers(0, 40)
arrays = st.builds(
    lambda array_id, held, displaced, waiting, throttle, gpu_type, job, node: array(
        array_id,
        held,
        displaced=displaced,
        waiting=waiting,
        throttle=throttle if waiting else None,
        gpu_type=gpu_type,
        job=job,
        node=node,
    ),
    st.integers(1, 9),
    counts,
    counts,
    counts,
    counts,
    st.sampled_from(("", *TYPES)),
    st.sampled_from(("one", "two", "foreign")),
    st.sampled_from(("h1", "h2")),
)
observations = st.builds(
    lambda found, h200, rtx, leaving: seen(
        *sorted(found, key=lambda a: a.array_id),
        idle={"h200": h200, "rtx5090": rtx},
        yielding={"h2": "drain"} if leaving else {},
    ),
    st.lists(arrays, max_size=5, unique_by=lambda a: a.array_id),
    counts,
    counts,
    st.booleans(),
)
wishes = st.lists(
    st.builds(
        lambda job, most, least, types, is_open: Wish(job, min(least, most), most, types, 30, is_open),
        st.sampled_from(("one", "two")),
        st.integers(2, 60),
        st.integers(0, 3),
        st.sampled_from(((), ("h200",), TYPES)),
        st.booleans(),
    ),
    max_size=2,
    unique_by=lambda wish: wish.job,
)


@given(observations, wishes)
@settings(max_examples=120, deadline=None)
def test_what_is_set_never_exceeds_own_and_idle_gpus_nor_the_maximum(
    observation: Observation, wished: list[Wish]
) -> None:
    actions = plan(observation, wished)

    for wish in wished:
        own = [one for one in observation.arrays if one.job == wish.job]
        raised = [
            action
            for action in actions
            if (isinstance(action, Submit) and action.job == wish.job)
            or (isinstance(action, SetThrottle) and action.array_id in {one.array_id for one in own})
        ]
        workers = sum(one.held_workers + one.displaced for one in own)
        floor = max(wish.min_workers, len(wish.lanes)) + len(own)  # every array and lane may start one
        assert sum(action.max_running for action in raised) <= workers + observation.idle.total + floor
        assert all(1 <= action.max_running <= wish.max_workers for action in raised)


@given(observations, wishes)
@settings(max_examples=120, deadline=None)
def test_idle_gpus_are_promised_once_over_all_jobs(observation: Observation, wished: list[Wish]) -> None:
    actions = plan(observation, wished)

    promised = 0
    floors = 0
    for wish in wished:
        own = [one for one in observation.arrays if one.job == wish.job]
        workers = sum(one.held_workers + one.displaced for one in own)
        new = sum(action.max_running for action in actions if isinstance(action, Submit) and action.job == wish.job)
        promised += max(0, new - workers)
        floors += max(wish.min_workers, len(wish.lanes))
    assert promised <= observation.idle.total + floors


@given(observations, wishes)
@settings(max_examples=120, deadline=None)
def test_only_arrays_of_wished_jobs_are_ever_named(observation: Observation, wished: list[Wish]) -> None:
    jobs = {wish.job for wish in wished}
    ours = {one.array_id for one in observation.arrays if one.job in jobs}

    for action in plan(observation, wished):
        match action:
            case SetThrottle(array_id) | Hold(array_id) | Cancel(array_id):
                assert array_id in ours
            case Requeue(refs):
                assert {int(ref.split("_")[0]) for ref in refs} <= ours
            case Submit(job):
                assert job in jobs


@given(observations, wishes)
@settings(max_examples=50, deadline=None)
def test_equal_observations_give_equal_actions(observation: Observation, wished: list[Wish]) -> None:
    assert plan(deepcopy(observation), deepcopy(wished)) == plan(observation, wished)


@given(observations, wishes)
@settings(max_examples=80, deadline=None)
def test_nothing_that_runs_is_cancelled(observation: Observation, wished: list[Wish]) -> None:
    running = Counter({one.array_id: one.held_workers for one in observation.arrays})

    cancelled = [action.array_id for action in plan(observation, wished) if isinstance(action, Cancel)]

    assert all(running[array_id] == 0 for array_id in cancelled)


@given(observations, wishes)
@settings(max_examples=80, deadline=None)
def test_a_throttle_just_set_is_not_set_again(observation: Observation, wished: list[Wish]) -> None:
    actions = plan(observation, wished)

    set_to = {action.array_id: action.max_running for action in actions if isinstance(action, SetThrottle)}
    after = replace(
        observation,
        arrays=tuple(replace(one, throttle=set_to.get(one.array_id, one.throttle)) for one in observation.arrays),
    )
    again = [action for action in plan(after, wished) if isinstance(action, SetThrottle)]
    assert again == []
