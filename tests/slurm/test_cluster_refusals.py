"""What SlurmCluster refuses when it connects: what could not work, or would stand in training's way."""

from pathlib import Path

import pytest

from slackwater_operator.core import PermanentError
from slackwater_slurm.cluster import SlurmCluster
from slackwater_slurm.config import CleaningJob
from slackwater_slurm.core import Partition
from slackwater_slurm.testing import FakeSlurm

MACHINES = {"h1": ("h200", 4), "h2": ("h200", 4), "r1": ("rtx5090", 2), "r2": ("rtx5090", 2)}
ALL = tuple(sorted(MACHINES))


def connect(slurm: FakeSlurm, *, partition: str = "cleaning", gpu_types: tuple[str, ...] = ()) -> None:
    job = CleaningJob(name="pod", input=Path("/in"), output=Path("/ledger"), gpu_types=gpu_types)
    SlurmCluster(slurm, user="cleaner", partition=partition, jobs=[job], maintenance_lead_s=60).connect()


@pytest.mark.parametrize(
    ("partition", "gpu_types", "message"),
    [
        pytest.param("batch", (), r"partition 'batch' .*there are: cleaning, train", id="partition"),
        pytest.param("cleaning", ("a100",), r"type 'a100'; it has h200:8, rtx5090:4", id="GPU type"),
    ],
)
def test_a_wrong_configuration_is_refused_in_one_line(partition: str, gpu_types: tuple[str, ...], message: str) -> None:
    with pytest.raises(PermanentError, match=message) as refused:
        connect(FakeSlurm(MACHINES), partition=partition, gpu_types=gpu_types)

    assert "\n" not in str(refused.value)


def test_a_partition_without_gpus_is_refused() -> None:
    slurm = FakeSlurm(MACHINES, partitions_list=[Partition("cleaning", "UP", (), 1, "REQUEUE")])
    slurm.partitions_list.append(Partition("train", "UP", ALL, 9, "OFF"))

    with pytest.raises(PermanentError, match="no node of partition 'cleaning' has GPUs"):
        connect(slurm)


@pytest.mark.parametrize(
    ("partitions", "message"),
    [
        pytest.param(
            [Partition("cleaning", "UP", ALL, 1, "OFF"), Partition("train", "UP", ALL, 9, "OFF")],
            "must have PreemptMode=REQUEUE",
            id="cannot be preempted",
        ),
        pytest.param(
            [Partition("cleaning", "UP", ALL, 5, "REQUEUE"), Partition("train", "UP", ALL, 5, "OFF")],
            "nothing could preempt cleaning",
            id="no higher tier",
        ),
    ],
)
def test_refuses_a_partition_in_which_it_would_stand_in_trainings_way(
    partitions: list[Partition], message: str
) -> None:
    slurm = FakeSlurm(MACHINES, partitions_list=partitions)

    with pytest.raises(PermanentError, match=message):
        connect(slurm)


def test_a_partition_that_cancels_instead_of_requeueing_is_taken_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cancelling = [Partition("cleaning", "UP", ALL, 1, "CANCEL"), Partition("train", "UP", ALL, 9, "OFF")]

    connect(FakeSlurm(MACHINES, partitions_list=cancelling))

    assert "do not come back by themselves" in caplog.text
