"""Counts of GPUs, what a node can give, and submissions that Slurm would accept and never run."""

from typing import Any

import pytest

from slackwater_slurm.core import GpuCount, Job, Node, NodeState, Submission


def make_node(state: NodeState, **changes: Any) -> Node:
    fields: dict[str, Any] = {
        "name": "h1",
        "state": state,
        "state_text": state.value,
        "gpus": GpuCount.of({"h200": 4, "rtx5090": 2}),
        "gpus_used": GpuCount.of({"h200": 3}),
    }
    return Node(**(fields | changes))


def test_counts_add_and_subtract_by_type_and_drop_zeros() -> None:
    whole = GpuCount.of({"h200": 4}) + GpuCount.of({"h200": 4, "rtx5090": 2})

    assert whole.by_type == (("h200", 8), ("rtx5090", 2))
    assert (whole - GpuCount.of({"rtx5090": 2})).types == ("h200",)
    assert whole.times(2).total == 20
    assert str(GpuCount()) == "none"


def test_taking_more_than_there_is_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"\{'h200': -1\}"):
        GpuCount.of({"h200": 1}) - GpuCount.of({"h200": 2})


@pytest.mark.parametrize(
    "state", [NodeState.DRAINING, NodeState.DRAINED, NodeState.DOWN, NodeState.MAINT, NodeState.OTHER]
)
def test_a_node_in_a_state_that_takes_no_jobs_cannot_be_scheduled(state: NodeState) -> None:
    assert make_node(NodeState.MIXED).is_schedulable
    assert not make_node(state).is_schedulable


def test_a_node_that_does_not_answer_cannot_be_scheduled() -> None:
    assert not make_node(NodeState.IDLE, responding=False).is_schedulable


def make_job(**changes: Any) -> Job:
    fields: dict[str, Any] = {
        "job_id": 12,
        "array_id": None,
        "task_id": None,
        "name": "clean",
        "user": "u",
        "partition": "cleaning",
        "state": "PENDING",
        "reason": "",
        "gpus": GpuCount(),
    }
    return Job(**(fields | changes))


def test_a_job_is_named_as_commands_name_it() -> None:
    assert make_job().ref == "12"
    assert make_job(array_id=10, task_id=0).ref == "10_0"
    assert make_job(array_id=10).ref == "10"


def test_a_completing_job_still_holds_its_gpus_and_an_ended_one_does_not() -> None:
    assert make_job(state="COMPLETING").holds_gpus
    assert not make_job(state="PENDING").holds_gpus
    assert not make_job(state="PREEMPTED").holds_gpus


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"gpus": 0}, "gpus must be 1 or more, got 0", id="no GPUs, which Slurm accepts"),
        pytest.param({"gpus": -1}, "gpus must be 1 or more, got -1", id="negative"),
        pytest.param({"num_tasks": 0}, "num_tasks must be 1 or more", id="an empty array"),
        pytest.param(
            {"num_tasks": 4, "max_running": 0}, "max_running must be 1 or more", id="a throttle that lifts the limit"
        ),
        pytest.param({"max_running": 2}, "give num_tasks too", id="a throttle without an array"),
        pytest.param({"gpu_type": "h200"}, "needs a number of gpus", id="a type without a number"),
        pytest.param({"script": "sleep 1"}, "script must begin with #!", id="no shebang"),
        pytest.param({"name": "a\nb"}, "name must be printable", id="a newline in the name"),
    ],
)
def test_refuses_a_submission(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Submission(**({"name": "clean", "script": "#!/bin/sh\n"} | changes))
