"""SlurmCluster against a cluster in memory: what a killed slurmd leaves, and a user without the rights to mend it."""

from pathlib import Path

import pytest

from slackwater_slurm.cluster import SlurmCluster
from slackwater_slurm.config import CleaningJob
from slackwater_slurm.core import NodeState, SlurmRefused
from slackwater_slurm.fleet import Release, Resume
from slackwater_slurm.testing import FakeSlurm

MACHINES = {"h1": ("h200", 4), "h2": ("h200", 4), "r1": ("rtx5090", 2), "r2": ("rtx5090", 2)}
OPEN = {"podcasts": True}


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm(MACHINES)


@pytest.fixture
def cluster(slurm: FakeSlurm) -> SlurmCluster:
    """A controller that has filled the cluster."""
    job = CleaningJob(name="podcasts", input=Path("/data/in"), output=Path("/data/ledger"), max_workers=100)
    made = SlurmCluster(slurm, user="cleaner", partition="cleaning", jobs=[job], maintenance_lead_s=60)
    made.connect()
    look(made, slurm, 2)
    return made


def look(cluster: SlurmCluster, slurm: FakeSlurm, times: int) -> list[type]:
    """Look so often, five seconds apart; the kinds of what was done."""
    done: list[type] = []
    for _ in range(times):
        slurm.now_s += 5
        done += [type(action) for action in cluster.tick(slurm.now_s, OPEN).actions]
    return done


def test_a_node_daemon_lost_in_a_preemption_costs_no_worker_its_place(slurm: FakeSlurm, cluster: SlurmCluster) -> None:
    slurm.lose_node_daemon("r1")

    assert look(cluster, slurm, 4)[:2] == [Resume, Release]
    assert len(slurm.running()) == 12


def test_a_node_that_a_person_drained_stays_drained(slurm: FakeSlurm, cluster: SlurmCluster) -> None:
    slurm.lose_node_daemon("r1")
    slurm.node_reasons["r1"] = "fan is broken"

    assert Resume not in look(cluster, slurm, 4)
    assert slurm.states["r1"] is NodeState.DRAINED
    assert {task.node for task in slurm.running()} == {"h1", "h2", "r2"}


def test_one_who_may_not_resume_nodes_asks_seldom_and_goes_on(
    slurm: FakeSlurm, cluster: SlurmCluster, caplog: pytest.LogCaptureFixture
) -> None:
    slurm.lose_node_daemon("r1")

    for _ in range(5):
        slurm.fail_in["resume"] = SlurmRefused("scontrol: access/permission denied")
        look(cluster, slurm, 1)

    assert [record.message for record in caplog.records if "permission denied" in record.message] == [
        "resume node=r1 reason=drained for tasks whose end it had not seen not possible now: "
        "scontrol: access/permission denied"
    ]
    assert {task.node for task in slurm.running()} == {"h1", "h2", "r2"}
