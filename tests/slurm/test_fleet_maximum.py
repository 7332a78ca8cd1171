"""A maximum that falls while several lanes run: what is sent back stays away, and the rest is left in peace."""

from dataclasses import replace
from pathlib import Path

import pytest

from slackwater_slurm.cluster import SlurmCluster
from slackwater_slurm.config import CleaningJob
from slackwater_slurm.core import GpuCount
from slackwater_slurm.fleet import Requeue, SetThrottle, Wish, plan
from slackwater_slurm.observation import Array, Observation, Task
from slackwater_slurm.testing import FakeSlurm

WISH = Wish("podcasts", max_workers=10, gpu_types=("h200", "rtx5090"))
JOB = CleaningJob(name="pod", input=Path("in"), output=Path("ledger"), max_workers=6, gpu_types=("h200", "rtx5090"))


def lane(array_id: int, gpu_type: str, held: int, since_s: float) -> Array:
    """An array whose throttle is what it holds, with tasks to spare."""
    gpus = GpuCount.of({gpu_type: 1})
    tasks = tuple(
        Task(f"{array_id}_{index}", array_id, index, "h1", gpus, True, since_s + index) for index in range(held)
    )
    return Array(array_id, "podcasts", gpu_type, tasks, 0, 50, 0, (), held)


def seen(*arrays: Array) -> Observation:
    return Observation(now_s=0.0, nodes=(), gpus=(), idle=GpuCount(), arrays=arrays, yielding=())


@pytest.mark.parametrize(
    ("held", "max_workers", "throttles", "sent_back"),
    [
        pytest.param((3, 3), 4, {1: 3, 2: 1}, ("2_1", "2_2"), id="the newest are in the second lane"),
        pytest.param((1, 4), 4, {1: 1, 2: 3}, ("2_3",), id="one too many"),
        pytest.param((4, 1), 3, {1: 2, 2: 1}, ("1_2", "1_3"), id="the newest of all is its lane's last and stays"),
        pytest.param((4, 4), 2, {1: 1, 2: 1}, ("1_1", "1_2", "1_3", "2_1", "2_2", "2_3"), id="one each"),
    ],
)
def test_throttles_together_never_exceed_the_maximum_and_what_is_sent_back_is_above_them(
    held: tuple[int, int], max_workers: int, throttles: dict[int, int], sent_back: tuple[str, ...]
) -> None:
    arrays = (lane(1, "h200", held[0], 0.0), lane(2, "rtx5090", held[1], 100.0))

    actions = plan(seen(*arrays), [replace(WISH, max_workers=max_workers)])

    after = {1: held[0], 2: held[1]}
    after |= {action.array_id: action.max_running for action in actions if isinstance(action, SetThrottle)}
    assert after == throttles
    assert [action for action in actions if isinstance(action, Requeue)] == [Requeue(sent_back, "maximum")]


@pytest.mark.parametrize("max_workers", [5, 4, 3, 2])
def test_a_lowered_maximum_is_reached_once_and_for_all(max_workers: int) -> None:
    slurm = FakeSlurm({"h1": ("h200", 4), "r1": ("rtx5090", 4)})
    cluster = SlurmCluster(slurm, user="cleaner", partition="cleaning", jobs=[JOB], maintenance_lead_s=60)
    cluster.connect()

    def tick() -> None:
        cluster.tick(slurm.now_s, {"pod": True})
        slurm.now_s += 5

    for _ in range(3):
        tick()
    assert len(slurm.running()) == 6

    cluster.use([JOB.model_copy(update={"max_workers": max_workers})])
    for _ in range(3):
        tick()
    slurm.changes()
    for _ in range(5):
        tick()

    assert len(slurm.running()) == max_workers
    assert slurm.changes() == []
