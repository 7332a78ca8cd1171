"""A Slurm partition behind the operator's own loop."""

from pathlib import Path

import pytest

from slackwater_operator.core import Action, Limits, PermanentError, Reason, Verb
from slackwater_operator.loop import Loop
from slackwater_slurm.cluster import SlurmCluster
from slackwater_slurm.config import CleaningJob
from slackwater_slurm.core import NodeState
from slackwater_slurm.pool import SlurmPool
from slackwater_slurm.testing import FakeSlurm

JOB = CleaningJob(name="pod", input=Path("/in"), output=Path("/ledger"), max_workers=50)


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm({"h1": ("h200", 4), "r1": ("rtx5090", 2)})


def pool_of(slurm: FakeSlurm) -> SlurmPool:
    cluster = SlurmCluster(slurm, user="cleaner", partition="cleaning", jobs=[JOB], maintenance_lead_s=60)
    return SlurmPool(cluster)


def loop_of(pool: SlurmPool) -> Loop:
    return Loop(pool, (), Limits(lend_after_s=2.0))


async def play(loop: Loop, pool: SlurmPool, slurm: FakeSlurm, since_s: float, until_s: float) -> None:
    now_s = since_s
    while now_s < until_s:
        await pool.refresh(now_s, slurm.now_s, {"pod": True})
        await loop.tick(now_s)
        now_s += 1
        slurm.now_s += 1


async def test_the_operators_loop_lends_every_idle_gpu_and_stands_still(slurm: FakeSlurm) -> None:
    pool = pool_of(slurm)
    loop = loop_of(pool)

    await play(loop, pool, slurm, 0, 8)
    assert len(slurm.running()) == 6
    slurm.changes()
    await play(loop, pool, slurm, 8, 16)

    assert slurm.changes() == []


async def test_training_is_seen_as_held_and_never_touched(slurm: FakeSlurm) -> None:
    pool = pool_of(slurm)
    loop = loop_of(pool)
    training = slurm.train(3, "h200")

    await play(loop, pool, slurm, 0, 8)

    assert len(slurm.running()) == 3
    assert [task.job_id for task in slurm.running("train")] == [training]
    assert slurm.running("train")[0].restarts == 0


async def test_the_policy_takes_workers_off_a_draining_node(slurm: FakeSlurm) -> None:
    pool = pool_of(slurm)
    loop = loop_of(pool)
    await play(loop, pool, slurm, 0, 8)

    slurm.set_state("r1", NodeState.DRAINING)
    await play(loop, pool, slurm, 8, 12)

    assert {task.node for task in slurm.running()} == {"h1"}


async def test_anything_but_its_own_workers_is_refused(slurm: FakeSlurm) -> None:
    pool = pool_of(slurm)
    slurm.train(3, "h200")
    await pool.refresh(0, slurm.now_s, {"pod": True})

    for verb, uid in ((Verb.EVICT, "training/h1/h200"), (Verb.DRAIN, "replica")):
        (refusal,) = await pool.apply((Action(verb, uid, 1, Reason.TRAFFIC),), 0)
        assert isinstance(refusal.error, PermanentError)
        assert "only workers of ours" in str(refusal.error)
    assert slurm.changes() == []
