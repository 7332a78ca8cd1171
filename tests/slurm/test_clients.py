"""One contract, held by each adapter that this machine can run, against a real Slurm."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slackwater_slurm.client import ADAPTERS, open_client
from slackwater_slurm.client.base import SlurmClient
from slackwater_slurm.core import (
    GpuCount,
    Job,
    NodeState,
    SlurmMissing,
    SlurmRefused,
    SlurmUnavailable,
    SlurmVersion,
    Submission,
)
from slackwater_slurm.lab import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.e2e]

SLEEP = "#!/bin/sh\nexec sleep 600\n"


def adapter_or_skip(name: str, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> SlurmClient:
    monkeypatch.setenv("SLURM_CONF", str(lab.conf))  # the library pyslurm reads it from this process
    try:
        return open_client(lab.environment(), name, conf=lab.conf)
    except SlurmMissing as reason:
        pytest.skip(str(reason))


@pytest.fixture(params=ADAPTERS)
def client(request: pytest.FixtureRequest, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> SlurmClient:
    return adapter_or_skip(request.param, lab, monkeypatch)


def wait_for(is_true: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """A job that is told to go before it has begun hears of it after Slurm's KillWait, half a minute."""
    end_s = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def running(client: SlurmClient, array_id: int) -> list[Job]:
    found = client.jobs(detail=True)
    return [job for job in found if array_id in (job.job_id, job.array_id) and job.state == "RUNNING"]


def cleaning(client: SlurmClient, tasks: int, **changes: object) -> int:
    submission = Submission(
        "clean", SLEEP, partition="cleaning", gpus=1, gpu_type="h200", num_tasks=tasks, output="/dev/null", requeue=True
    )
    return client.submit(replace(submission, **changes))  # type: ignore[arg-type]  # a test's own words


class TestEveryAdapter:
    def test_sees_each_node_once_with_its_gpus_and_partitions(self, client: SlurmClient) -> None:
        nodes = client.nodes()

        assert [(node.name, str(node.gpus), node.state) for node in nodes] == [
            ("h1", "h200:4", NodeState.IDLE),
            ("h2", "h200:4", NodeState.IDLE),
            ("r1", "rtx5090:2", NodeState.IDLE),
            ("r2", "rtx5090:2", NodeState.IDLE),
        ]
        assert {node.partitions for node in nodes} == {("cleaning", "train")}
        assert not any(node.gpus_used for node in nodes)

    def test_sees_partitions_and_the_running_configuration(self, client: SlurmClient) -> None:
        client.ping()
        cleaning_, train = client.partitions()

        assert (cleaning_.name, cleaning_.preempt_mode, cleaning_.grace_time_s) == ("cleaning", "REQUEUE", 0)
        assert (train.name, train.preempt_mode, train.is_default) == ("train", "OFF", True)
        assert cleaning_.priority_tier < train.priority_tier
        assert cleaning_.nodes == train.nodes == ("h1", "h2", "r1", "r2")
        assert cleaning_.max_time_s is None
        assert client.config()["PreemptType"] == "preempt/partition_prio"
        assert client.version() >= SlurmVersion(22, 5)

    def test_sees_which_gpus_a_job_holds_on_which_node(self, client: SlurmClient) -> None:
        job_id = client.submit(
            Submission("train", SLEEP, partition="train", gpus=2, num_nodes=2, output="/dev/null", comment="a b")
        )
        wait_for(lambda: bool(running(client, job_id)), "training runs")

        (job,) = running(client, job_id)
        used = {node.name: node for node in client.nodes() if node.gpus_used}

        assert (job.gpus.total, job.comment, job.name, job.restarts) == (4, "a b", "train", 0)
        assert job.array_id is None
        assert job.holds_gpus
        assert job.gpu_indexes is not None
        assert [node for node, _ in job.gpu_indexes] == list(job.nodes) == sorted(used)
        assert all(len(indexes) == 2 for _, indexes in job.gpu_indexes)
        assert sum((node.gpus_used for node in used.values()), GpuCount()) == job.gpus
        assert job.start_s is not None
        assert abs(job.start_s - time.time()) < 60

    def test_an_arrays_waiting_tasks_are_one_record_and_its_throttle_can_be_moved(self, client: SlurmClient) -> None:
        array_id = cleaning(client, 20, max_running=2)
        wait_for(lambda: len(running(client, array_id)) == 2, "two tasks run")

        (waiting,) = [job for job in client.jobs(detail=True) if job.is_pending]
        assert (waiting.ref, waiting.num_tasks, waiting.throttle) == (str(array_id), 18, 2)
        assert [job.task_id for job in running(client, array_id)] == [0, 1]

        client.set_throttle(array_id, 5)
        wait_for(lambda: len(running(client, array_id)) == 5, "five tasks run")
        client.set_throttle(array_id, 1)
        assert len(running(client, array_id)) == 5
        assert {job.throttle for job in client.jobs(detail=True)} == {1}

    def test_holding_starts_nothing_new_until_it_is_released(self, client: SlurmClient) -> None:
        array_id = cleaning(client, 3, hold=True)
        (held,) = client.jobs()
        assert held.is_held
        assert held.num_tasks == 3

        client.release([str(array_id)])
        wait_for(lambda: len(running(client, array_id)) == 3, "released tasks run")
        client.hold([str(array_id)])
        assert len(running(client, array_id)) == 3

    def test_requeues_what_runs_and_passes_over_what_waits_or_is_gone(self, client: SlurmClient) -> None:
        array_id = cleaning(client, 9)
        wait_for(lambda: len(running(client, array_id)) == 8, "all h200 run")

        client.requeue([f"{array_id}_0", f"{array_id}_8", "999999"])

        wait_for(lambda: any(job.restarts == 1 for job in client.jobs()), "the task is back in the queue")
        (back,) = [job for job in client.jobs() if job.restarts == 1]
        assert back.ref == f"{array_id}_0"

    def test_cancels_for_good_and_passes_over_what_is_gone(self, client: SlurmClient) -> None:
        array_id = cleaning(client, 12)
        other = cleaning(client, 1, gpu_type="rtx5090")
        wait_for(lambda: len(running(client, array_id)) == 8, "all h200 run")

        client.cancel([f"{array_id}_0", "999999"])
        client.cancel([str(array_id)])

        wait_for(lambda: [job.array_id for job in client.jobs()] == [other], "only the other array is left")

    def test_a_drained_node_takes_nothing_more_and_keeps_what_runs(self, client: SlurmClient, lab: Lab) -> None:
        array_id = cleaning(client, 1)
        wait_for(lambda: bool(running(client, array_id)), "a worker runs")
        busy = running(client, array_id)[0].nodes[0]
        free = {"h1": "h2", "h2": "h1"}[busy]

        lab.run("scontrol", "update", f"NodeName={busy},{free}", "State=DRAIN", "Reason=swap State=UP now")

        states = {node.name: node for node in client.nodes()}
        assert states[busy].state == NodeState.DRAINING
        assert states[free].state == NodeState.DRAINED
        assert not states[busy].is_schedulable
        assert not states[free].is_schedulable
        assert states[busy].gpus_used == GpuCount.of({"h200": 1})

    def test_a_maintenance_reservation_is_seen_before_it_begins(self, client: SlurmClient, lab: Lab) -> None:
        assert client.reservations() == ()
        words = ("ReservationName=swap", "Nodes=h2,r1", "Users=root", "Flags=MAINT,IGNORE_JOBS", "Duration=60")
        lab.run("scontrol", "create", "reservation", *words, "StartTime=now+1hour")

        (found,) = client.reservations()

        assert (found.name, found.nodes, found.is_maintenance, found.is_active) == ("swap", ("h2", "r1"), True, False)
        assert 3000 < found.start_s - time.time() < 3700
        assert found.end_s - found.start_s == 3600

    def test_a_name_made_to_look_like_other_records_stays_a_name(self, client: SlurmClient, lab: Lab) -> None:
        array_id = cleaning(client, 1)
        wait_for(lambda: bool(running(client, array_id)), "a worker runs")
        (worker,) = running(client, array_id)
        name = f"x\x1e\n9\x1f9\nJobId={worker.job_id} Nodes=r1 CPU_IDs=0 Mem=1 GRES=gpu:rtx5090:2(IDX:0-1)"
        words = (
            "--parsable",
            f"--job-name={name}",
            "--comment=a\x1eb\n|c",
            "--partition=cleaning",
            "--output=/dev/null",
        )
        lab.run("sbatch", *words, "--hold", input=SLEEP)

        named = {job.name: job for job in client.jobs(detail=True)}

        assert set(named) == {"clean", name}
        assert named[name].comment == "a\x1eb\n|c"
        assert named["clean"].gpus == GpuCount.of({"h200": 1})
        assert named["clean"].gpu_indexes != (("r1", (0, 1)),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"partition": "nope"}, "Invalid partition name", id="unknown partition"),
        pytest.param({"gpu_type": "b200"}, "Requested node configuration is not available", id="unknown type"),
        pytest.param({"gpus": 9}, "Requested node configuration is not available", id="more than a node has"),
        pytest.param({"num_tasks": 5000}, "Invalid job array specification", id="an array beyond MaxArraySize"),
        pytest.param({"reservation": "nope"}, "reservation", id="unknown reservation"),
        pytest.param({"time_limit": "soon"}, "time", id="no time"),
    ],
)
def test_what_slurm_refuses_is_one_line(lab: Lab, changes: dict[str, object], message: str) -> None:
    client = open_client(lab.environment(), conf=lab.conf)  # every adapter submits by the same command

    with pytest.raises(SlurmRefused, match=f"(?i)^sbatch: .*{message}") as caught:
        cleaning(client, 1, **changes)

    assert "\n" not in str(caught.value)
    assert client.jobs() == ()


def test_adapters_agree_on_everything_but_the_words_of_a_state(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    text, json = (adapter_or_skip(name, lab, monkeypatch) for name in ("text", "json"))
    array_id = cleaning(text, 20, max_running=3)
    training = text.submit(Submission("t", SLEEP, partition="train", gpus=1, gpu_type="rtx5090", output="/dev/null"))
    text.submit(Submission("w", SLEEP, partition="train,cleaning", gpus=2, hold=True, output="/dev/null"))
    lab.run("scontrol", "update", "NodeName=r2", "State=DRAIN", "Reason=x")
    wait_for(lambda: len(running(text, array_id)) == 3 and bool(running(text, training)), "all run")

    for other in (json, *pyslurm_if_any(lab)):
        assert other.jobs() == text.jobs(detail=True)
        assert other.partitions() == text.partitions()
        assert [replace(node, state_text="") for node in other.nodes()] == [
            replace(node, state_text="") for node in text.nodes()
        ]


def pyslurm_if_any(lab: Lab) -> Iterator[SlurmClient]:
    try:
        yield open_client(lab.environment(), "pyslurm", conf=lab.conf)
    except SlurmMissing:
        return  # the contract's own cases say why


def test_a_dead_controller_is_worth_another_try_and_a_new_one_answers(lab: Lab) -> None:
    text, json = (open_client(lab.environment(), name, conf=lab.conf, timeout_s=1.0) for name in ("text", "json"))
    lab.kill("slurmctld")
    try:
        for ask in (text.ping, text.jobs, json.nodes):
            with pytest.raises(SlurmUnavailable, match=r"^(scontrol|squeue|sinfo)") as caught:
                ask()
            assert "\n" not in str(caught.value)
    finally:
        lab.start_controller()

    text.ping()
    assert len(json.nodes()) == 4


def test_a_configuration_that_is_not_there_is_named(tmp_path: Path, lab: Lab) -> None:
    client = open_client(lab.environment(), conf=tmp_path / "none.conf", timeout_s=0.5)

    with pytest.raises(SlurmMissing, match=r"squeue: no usable slurm\.conf .*none\.conf.*set SLURM_CONF") as caught:
        client.jobs()

    assert "\n" not in str(caught.value)
