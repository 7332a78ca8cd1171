"""SlurmCluster against a cluster in memory: fills, yields, adopts, refuses."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater_slurm.cluster import SlurmCluster
from slackwater_slurm.config import CleaningJob
from slackwater_slurm.core import NodeState, SlurmRefused, SlurmUnavailable
from slackwater_slurm.fleet import Action, Submit
from slackwater_slurm.observation import Use, mark
from slackwater_slurm.testing import FakeSlurm

MACHINES = {"h1": ("h200", 4), "h2": ("h200", 4), "r1": ("rtx5090", 2), "r2": ("rtx5090", 2)}
ALL = tuple(sorted(MACHINES))
OPEN = {"podcasts": True}


def job(**changes: object) -> CleaningJob:
    values = {"name": "podcasts", "input": Path("/data/in"), "output": Path("/data/ledger"), "max_workers": 100}
    return CleaningJob.model_validate(values | changes)


def made(slurm: FakeSlurm, *jobs: CleaningJob, partition: str = "cleaning") -> SlurmCluster:
    return SlurmCluster(slurm, user="cleaner", partition=partition, jobs=jobs, maintenance_lead_s=60)


def controller(slurm: FakeSlurm, *jobs: CleaningJob) -> SlurmCluster:
    cluster = made(slurm, *(jobs or (job(),)))
    cluster.connect()
    return cluster


def settle(cluster: SlurmCluster, slurm: FakeSlurm, open_jobs: dict[str, bool] | None = None) -> list[Action]:
    """Tick until nothing is done any more; what was done."""
    done: list[Action] = []
    for _ in range(8):
        slurm.now_s += 5
        tick = cluster.tick(slurm.now_s, OPEN if open_jobs is None else open_jobs)
        done += tick.actions
        if not tick.actions:
            return done
    raise AssertionError(f"the plan does not come to rest: {done[-3:]}")


def test_fills_every_idle_gpu_by_one_array() -> None:
    slurm = FakeSlurm(MACHINES)

    settle(controller(slurm), slurm)

    assert len(slurm.running()) == 12
    assert slurm.changes() == ["submit"]


def test_training_comes_and_goes_and_slurm_puts_workers_back_without_us() -> None:
    slurm = FakeSlurm(MACHINES)
    cluster = controller(slurm)
    settle(cluster, slurm)

    training = slurm.train(4, "h200")
    settle(cluster, slurm)
    assert (len(slurm.running("train")), len(slurm.running())) == (1, 8)
    slurm.changes()
    slurm.finish(training)

    assert len(slurm.running()) == 12  # before any tick
    settle(cluster, slurm)
    assert slurm.changes() == []


def test_grows_into_gpus_that_become_idle_later() -> None:
    slurm = FakeSlurm(MACHINES)
    training = [slurm.train(4, "h200"), slurm.train(4, "h200")]
    cluster = controller(slurm)
    settle(cluster, slurm)
    assert len(slurm.running()) == 4

    for one in training:
        slurm.finish(one)
    settle(cluster, slurm)

    assert len(slurm.running()) == 12
    assert slurm.changes() == ["submit", "set_throttle"]


def test_leaves_a_draining_node_and_goes_back_when_it_is_resumed() -> None:
    slurm = FakeSlurm(MACHINES)
    cluster = controller(slurm)
    settle(cluster, slurm)

    slurm.set_state("h1", NodeState.DRAINING)
    settle(cluster, slurm)
    assert [task for task in slurm.running() if task.node == "h1"] == []
    assert len(slurm.running()) == 8

    slurm.set_state("h1", NodeState.IDLE)
    settle(cluster, slurm)
    assert len(slurm.running()) == 12


def test_leaves_nodes_a_minute_before_their_maintenance_and_not_earlier() -> None:
    slurm = FakeSlurm(MACHINES)
    cluster = controller(slurm)
    settle(cluster, slurm)
    slurm.reserve("firmware", ("h1", "h2"), slurm.now_s + 600, slurm.now_s + 4200, "MAINT", "IGNORE_JOBS")

    settle(cluster, slurm)
    assert len(slurm.running()) == 12
    slurm.now_s += 550
    settle(cluster, slurm)

    assert {task.node for task in slurm.running()} == {"r1", "r2"}
    assert "requeue" in slurm.changes()


def test_does_not_count_gpus_that_a_reservation_keeps_from_it() -> None:
    slurm = FakeSlurm(MACHINES)
    slurm.reserve("course", ("h1",), slurm.now_s + 3600, slurm.now_s + 7200)

    tick = controller(slurm).tick(slurm.now_s, OPEN)

    assert tick.seen.idle.by_type == (("h200", 4), ("rtx5090", 4))
    assert tick.seen.count(Use.IDLE) == 12


def test_a_restarted_controller_adopts_its_array_and_submits_nothing() -> None:
    slurm = FakeSlurm(MACHINES)
    settle(controller(slurm), slurm)
    slurm.changes()

    settle(controller(slurm), slurm)

    assert slurm.changes() == []


def test_a_controller_killed_right_after_its_submission_is_followed_by_one_that_adopts() -> None:
    class Killed(Exception):
        pass

    def die() -> None:
        raise Killed

    slurm = FakeSlurm(MACHINES, after_submit=die)
    with pytest.raises(Killed):
        settle(controller(slurm), slurm)
    slurm.after_submit = None

    settle(controller(slurm), slurm)

    assert slurm.changes() == ["submit"]
    assert len(slurm.running()) == 12


def test_two_controllers_at_once_come_to_rest_with_one_array_that_waits() -> None:
    slurm = FakeSlurm(MACHINES)
    one, two = controller(slurm), controller(slurm)
    seen = two.tick(slurm.now_s, {}).seen  # looks before the other submits, acts after
    settle(one, slurm)
    two.apply(Submit("podcasts", "", 1000, seen.idle.total))

    settle(one, slurm)
    settle(two, slurm)

    waiting = {task.array_id for task in slurm.tasks if not task.node}
    assert len(waiting) == 1
    assert len(slurm.running()) == 12


def test_a_finished_ledger_ends_the_array() -> None:
    slurm = FakeSlurm(MACHINES)
    cluster = controller(slurm)
    settle(cluster, slurm)

    settle(cluster, slurm, {"podcasts": False})
    for task in list(slurm.running()):
        slurm.finish(task.ref)
    settle(cluster, slurm, {"podcasts": False})

    assert slurm.tasks == []
    assert slurm.changes() == ["submit", "hold", "cancel"]


def test_a_used_up_array_is_followed_by_another() -> None:
    slurm = FakeSlurm(MACHINES)
    cluster = controller(slurm, job(array_tasks=12))
    settle(cluster, slurm)

    for task in slurm.running()[:5]:
        slurm.finish(task.ref)
    settle(cluster, slurm)

    assert len(slurm.running()) == 12
    assert slurm.changes() == ["submit", "submit"]


def test_an_array_is_never_larger_than_the_cluster_allows() -> None:
    slurm = FakeSlurm(MACHINES)
    slurm.settings["MaxArraySize"] = "6"
    cluster = controller(slurm)

    settle(cluster, slurm)

    assert {submission.num_tasks for submission in slurm.submissions} == {6}
    assert len(slurm.running()) == 12


def test_an_array_that_a_person_holds_stays_held() -> None:
    slurm = FakeSlurm(MACHINES)
    cluster = controller(slurm)
    settle(cluster, slurm)
    slurm.hold([str(slurm.running()[0].array_id)])
    for task in list(slurm.running()):
        slurm.finish(task.ref)
    slurm.changes()

    settle(cluster, slurm)

    assert "submit" not in slurm.changes()
    assert slurm.running() == []


def test_a_job_that_is_not_known_yet_is_left_alone() -> None:
    slurm = FakeSlurm(MACHINES)

    assert controller(slurm).tick(slurm.now_s, {}).actions == ()


@pytest.mark.parametrize(
    ("user", "partition", "comment"),
    [
        pytest.param("mallory", "cleaning", mark("podcasts", ""), id="another user's copy of our mark"),
        pytest.param("cleaner", "train", mark("podcasts", ""), id="our mark in another partition"),
        pytest.param("cleaner", "cleaning", "slackwater:clean:podcasts", id="half a mark"),
        pytest.param("cleaner", "cleaning", "", id="no mark"),
    ],
)
def test_never_touches_what_is_not_its_own(user: str, partition: str, comment: str) -> None:
    slurm = FakeSlurm(MACHINES)
    foreign = slurm.train(4, "h200", user=user, comment=comment)
    slurm.tasks[0].partition = partition
    slurm.tasks[0].array_id = foreign  # looks like an array, too
    slurm.set_state("h1", NodeState.DRAINING)
    slurm.set_state("h2", NodeState.DRAINING)
    cluster = controller(slurm)

    settle(cluster, slurm)
    settle(cluster, slurm, {"podcasts": False})

    assert any(task.job_id == foreign for task in slurm.tasks)
    touched = [arguments for name, arguments in slurm.calls if name != "submit"]
    assert not any(str(foreign) in str(arguments) for arguments in touched)


def test_counts_gpus_by_use_and_type() -> None:
    slurm = FakeSlurm(MACHINES)
    slurm.train(3, "h200")
    slurm.set_state("r2", NodeState.DRAINED)
    cluster = controller(slurm, job(max_workers=4))
    settle(cluster, slurm)

    seen = cluster.tick(slurm.now_s, OPEN).seen

    assert (seen.count(Use.TRAINING), seen.count(Use.CLEANING)) == (3, 4)
    assert (seen.count(Use.IDLE), seen.count(Use.UNAVAILABLE)) == (3, 2)
    assert seen.gpus_of("rtx5090", Use.UNAVAILABLE) == 2


def test_tells_preemption_yielding_and_a_lost_node_apart() -> None:
    slurm = FakeSlurm(MACHINES)
    cluster = controller(slurm)
    settle(cluster, slurm)
    causes: list[tuple[str, int]] = []

    def watch() -> None:
        for _ in range(3):
            slurm.now_s += 5
            changes = cluster.tick(slurm.now_s, OPEN).changes
            causes.extend((cause.value, count) for (_, cause), count in changes.requeues)

    slurm.train(4, "h200")
    watch()
    slurm.set_state("r1", NodeState.DRAINING)
    watch()
    slurm.set_state("r2", NodeState.DOWN)
    watch()

    assert causes == [("preempted", 4), ("yielded", 2), ("node", 2)]


def test_measures_how_long_training_waited_for_gpus_it_took() -> None:
    slurm = FakeSlurm(MACHINES)
    cluster = controller(slurm)
    settle(cluster, slurm)

    slurm.train(4, "h200")
    training = next(task for task in slurm.tasks if task.partition == "train")
    training.start_s = training.submit_s + 2
    tick = cluster.tick(slurm.now_s + 5, OPEN)

    assert tick.changes.training_waited_s == (2.0,)


def test_workers_that_end_at_once_are_counted_even_between_two_looks() -> None:
    slurm = FakeSlurm(MACHINES)
    cluster = controller(slurm)
    settle(cluster, slurm)

    for _ in range(20):  # each end starts the next
        slurm.finish(slurm.running()[0].ref)
    tick = cluster.tick(slurm.now_s + 5, OPEN)

    assert dict(tick.changes.ended_early) == {"podcasts": 20}


def test_workers_that_end_after_hours_are_no_failures() -> None:
    slurm = FakeSlurm(MACHINES)
    cluster = controller(slurm)
    settle(cluster, slurm)

    slurm.now_s += 14_400
    for task in list(slurm.running()):
        slurm.finish(task.ref)
    tick = cluster.tick(slurm.now_s, OPEN)

    assert dict(tick.changes.ended) == {"podcasts": 12}
    assert tick.changes.ended_early == ()


def test_a_refused_submission_is_tried_again_with_back_off(caplog: pytest.LogCaptureFixture) -> None:
    slurm = FakeSlurm(MACHINES)
    cluster = controller(slurm)
    tries = []
    for _ in range(24):
        slurm.fail_in["submit"] = SlurmRefused("sbatch: a quota is used up")
        cluster.tick(slurm.now_s, OPEN)
        tries.append("submit" not in slurm.fail_in)
        slurm.now_s += 5

    assert [index for index, tried in enumerate(tries) if tried] == [0, 3, 9, 21]
    assert caplog.text.count("a quota is used up") == 1


def test_a_client_that_fails_in_the_middle_leaves_the_rest_to_the_next_tick() -> None:
    slurm = FakeSlurm(MACHINES)
    cluster = controller(slurm)
    slurm.fail_in["submit"] = SlurmUnavailable("sbatch gave no answer within 10 s")
    with pytest.raises(SlurmUnavailable):
        cluster.tick(slurm.now_s, OPEN)

    settle(cluster, slurm)

    assert len(slurm.running()) == 12


def test_what_is_submitted_is_a_requeueable_array_of_one_gpu_workers_that_execs() -> None:
    slurm = FakeSlurm(MACHINES)
    settle(controller(slurm, job(gpu_types=("h200",), settings={"vad": True, "rate": 3})), slurm)

    submission = slurm.submissions[0]

    assert (submission.gpus, submission.gpu_type, submission.requeue) == (1, "h200", True)
    assert submission.time_limit == "240"
    assert submission.comment == "slackwater:clean:podcasts:h200"
    last = submission.script.strip().splitlines()[-1]
    assert last.startswith("exec slackwater clean run /data/in --output /data/ledger")
    assert "--set vad=true" in last


# --- a day in which everything happens ------------------------------------------------------------------

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, 4), st.sampled_from(("h200", "rtx5090"))),
        st.tuples(st.just("finish"), st.integers(0, 9), st.just("")),
        st.tuples(st.just("end worker"), st.integers(0, 9), st.just("")),
        st.tuples(st.just("drain"), st.just(0), st.sampled_from(ALL)),
        st.tuples(st.just("resume"), st.just(0), st.sampled_from(ALL)),
        st.tuples(st.just("restart"), st.just(0), st.just("")),
    ),
    max_size=12,
)


@given(EVENTS)
@settings(max_examples=25, deadline=None)
def test_comes_to_rest_with_every_usable_gpu_in_use_and_no_training_touched(
    events: list[tuple[str, int, str]],
) -> None:
    slurm = FakeSlurm(MACHINES)
    cluster = controller(slurm, job(array_tasks=15))
    for what, number, name in events:
        training = slurm.running("train")
        if what == "train":
            slurm.train(min(number, MACHINES["r1"][1]) if name == "rtx5090" else number, name)
        elif what == "finish" and training:
            slurm.finish(training[number % len(training)].ref)
        elif what == "end worker" and slurm.running():
            slurm.finish(slurm.running()[number % len(slurm.running())].ref)
        elif what == "drain":
            slurm.set_state(name, NodeState.DRAINING)
        elif what == "resume":
            slurm.set_state(name, NodeState.IDLE)
        elif what == "restart":
            cluster = controller(slurm, job(array_tasks=15))
        before = {task.ref: task.restarts for task in slurm.tasks if task.partition == "train"}
        cluster.tick(slurm.now_s, OPEN)
        assert {task.ref: task.restarts for task in slurm.tasks if task.partition == "train"} == before
        slurm.now_s += 5

    settle(cluster, slurm)

    usable = {name for name in MACHINES if slurm.states.get(name, NodeState.IDLE) is NodeState.IDLE}
    for name in MACHINES:
        used = sum(task.gpus for task in slurm.tasks if task.node == name)
        assert used == MACHINES[name][1] if name in usable else not [t for t in slurm.running() if t.node == name]
