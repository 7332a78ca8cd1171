"""JSON of three releases: 22.05's own, and the data_parser's of 24.11 and 25.11.

22.05's records are as that release printed them; those of 24.11 and 25.11 are written after the field lists of
their data_parser (v0.0.42, v0.0.44), shortened to what is read and what could mislead.
"""

import json
from typing import Any

import pytest

from slackwater_slurm.client import documents as adapter
from slackwater_slurm.core import GpuCount, Job, NodeState, OutputCut, UnknownShape

META_22_05 = {
    "plugin": {"type": "openapi/v0.0.38", "name": "Slurm OpenAPI v0.0.38"},
    "Slurm": {"version": {"major": 22, "micro": 8, "minor": 5}, "release": "22.05.8"},
}


def new_meta(parser: str) -> dict[str, Any]:
    return {
        "plugin": {"type": "", "name": "", "data_parser": f"data_parser/{parser}", "accounting_storage": ""},
        "client": {"source": "/dev/pts/0", "user": "root", "group": "root"},
        "command": ["show"],
        "slurm": {"version": {"major": "24", "micro": "5", "minor": "11"}, "release": "24.11.5", "cluster": "lab"},
    }


def number(value: int | None) -> dict[str, Any]:
    return {"set": value is not None, "infinite": False, "number": value or 0}


def job_22_05(**changes: Any) -> dict[str, Any]:
    return {
        "job_id": 7,
        "array_job_id": 1,
        "array_task_id": 0,
        "array_max_tasks": 3,
        "array_task_string": "",
        "comment": "sw:x y",
        "gres_detail": ["gpu:h200:1(IDX:2)"],
        "job_state": "RUNNING",
        "name": "clean a|b",
        "nice": None,
        "node_count": 1,
        "nodes": "h1",
        "partition": "cleaning",
        "restart_cnt": 2,
        "resv_name": "",
        "shared": None,
        "start_time": 1796003364,
        "state_reason": "None",
        "submit_time": 1796003360,
        "tasks": 1,
        "tres_per_job": "",
        "tres_per_node": "gres:gpu:h200:1",
        "tres_per_socket": "",
        "tres_per_task": "",
        "user_name": "root",
    } | changes


def job_new(**changes: Any) -> dict[str, Any]:
    old = job_22_05()
    numbers = ("array_job_id", "array_task_id", "array_max_tasks", "node_count", "tasks", "start_time", "submit_time")
    return (
        old
        | {key: number(old[key]) for key in numbers}
        | {"job_state": ["RUNNING"], "tres_per_node": "gres/gpu:h200:1", "nice": 0, "shared": []}
        | changes
    )


NEW = ("v0.0.40", "v0.0.42", "v0.0.44")
RUNNING = Job(
    job_id=7,
    array_id=1,
    task_id=0,
    name="clean a|b",
    user="root",
    partition="cleaning",
    state="RUNNING",
    reason="",
    gpus=GpuCount.of({"h200": 1}),
    nodes=("h1",),
    restarts=2,
    throttle=3,
    comment="sw:x y",
    submit_s=1796003360.0,
    start_s=1796003364.0,
    gpu_indexes=(("h1", (2,)),),
)


def read_jobs(meta: dict[str, Any], *records: dict[str, Any]) -> tuple[Job, ...]:
    return adapter.jobs(json.dumps({"meta": meta, "jobs": records, "errors": [], "warnings": []}))


def test_22_05_and_newer_shapes_of_one_job_are_one_value() -> None:
    found = [read_jobs(META_22_05, job_22_05()), *(read_jobs(new_meta(parser), job_new()) for parser in NEW)]

    assert found == [(RUNNING,)] * 4


def test_the_waiting_tasks_of_an_array_are_one_record_with_their_number() -> None:
    waiting = {"job_state": "PENDING", "state_reason": "JobArrayTaskLimit", "array_task_string": "3,6-7%6", "nodes": ""}
    old = job_22_05(**waiting, array_task_id=None, gres_detail=[], array_max_tasks=6)
    new = job_new(
        **waiting | {"job_state": ["PENDING"]}, array_task_id=number(None), gres_detail=[], array_max_tasks=number(6)
    )

    for (job,) in (read_jobs(META_22_05, old), read_jobs(new_meta("v0.0.42"), new)):
        assert (job.ref, job.num_tasks, job.throttle, job.reason) == ("1", 3, 6, "JobArrayTaskLimit")
        assert job.gpus == GpuCount.of({"h200": 1})


def test_a_job_that_is_both_over_and_completing_still_holds_its_gpus() -> None:
    (job,) = read_jobs(new_meta("v0.0.42"), job_new(job_state=["CANCELLED", "COMPLETING"]))

    assert job.state == "COMPLETING"
    assert job.holds_gpus


def test_jobs_that_are_over_are_left_out() -> None:
    assert read_jobs(META_22_05, job_22_05(job_state="PREEMPTED")) == ()
    assert read_jobs(new_meta("v0.0.44"), job_new(job_state=["TIMEOUT"])) == ()


def test_each_text_of_gres_detail_belongs_to_one_node() -> None:
    record = job_22_05(nodes="h[1-2]", gres_detail=["gpu:h200:2(IDX:0-1)", "gpu:rtx5090:1(IDX:3)"], node_count=2)

    (job,) = read_jobs(META_22_05, record)

    assert job.gpus == GpuCount.of({"h200": 2, "rtx5090": 1})
    assert job.gpu_indexes == (("h1", (0, 1)), ("h2", (3,)))


NODE_22_05 = {
    "name": "h1",
    "state": "mixed",
    "state_flags": ["DRAIN"],
    "gres": "gpu:h200:4(S:0)",
    "gres_used": "gpu:h200:2(IDX:0,3)",
    "partitions": ["train", "cleaning"],
}
NODE_NEW = {key: value for key, value in NODE_22_05.items() if key != "state_flags"} | {"state": ["MIXED", "DRAIN"]}


def test_22_05_and_newer_shapes_of_one_node_are_one_value() -> None:
    documents = [{"meta": META_22_05, "errors": [], "nodes": [NODE_22_05]}]
    documents += [{"meta": new_meta(parser), "errors": [], "nodes": [NODE_NEW]} for parser in NEW]

    found = {adapter.nodes(json.dumps(document)) for document in documents}

    ((node,),) = found
    assert (node.name, node.state, node.partitions) == ("h1", NodeState.DRAINING, ("cleaning", "train"))
    assert node.gpus == GpuCount.of({"h200": 4})
    assert node.gpu_indexes_used == (("h200", (0, 3)),)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        pytest.param(
            {"meta": new_meta("v0.0.99"), "jobs": []}, r"data_parser/v0\.0\.99.*text adapter", id="a newer parser"
        ),
        pytest.param(
            {"meta": {"plugin": {"type": "openapi/v0.0.36"}}, "jobs": []}, r"openapi/v0\.0\.36", id="an older one"
        ),
        pytest.param({"jobs": []}, "nothing named meta.plugin", id="no meta"),
        pytest.param([], "nothing named meta.plugin", id="a list"),
        pytest.param({"meta": META_22_05, "sinfo": []}, "no list 'jobs', it has meta, sinfo", id="another command's"),
        pytest.param(
            {"meta": META_22_05, "jobs": [], "errors": [{"error": "Unable to query"}]},
            "Unable to query",
            id="an error inside",
        ),
        pytest.param(
            {"meta": META_22_05, "jobs": [job_22_05(job_state=7)]}, "job_state should be a word", id="a state"
        ),
        pytest.param(
            {"meta": META_22_05, "jobs": [job_22_05(restart_cnt="2")]}, "restart_cnt should be a number", id="a word"
        ),
        pytest.param({"meta": META_22_05, "jobs": [job_22_05(nodes={})]}, "nodes should be a text", id="an object"),
        pytest.param(
            {"meta": META_22_05, "jobs": [job_22_05(gres_detail=["gpu:1", "gpu:1"])]},
            "one text a node",
            id="more than nodes",
        ),
    ],
)
def test_an_unknown_shape_is_one_clear_line(document: Any, message: str) -> None:
    with pytest.raises(UnknownShape, match=message) as caught:
        adapter.jobs(json.dumps(document))

    assert "\n" not in str(caught.value)


def test_json_that_was_cut_can_be_tried_again() -> None:
    whole = json.dumps({"meta": META_22_05, "jobs": [job_22_05()]})

    with pytest.raises(OutputCut, match="JSON of jobs ends or breaks at byte"):
        adapter.jobs(whole[: len(whole) // 2])
