"""`KubeCluster`: a service or a job that is deleted and made again under its name starts clean."""

import json

import pytest

from slackwater_operator.cluster.kube.ports import JobProgress
from slackwater_operator.core import Phase, Reason
from slackwater_operator.resources import Reclaim, names, parse
from slackwater_operator.testing.kube_operator import JOBS, SERVICES
from slackwater_operator.testing.kube_world import World, by_uid

RECEIPT = json.dumps({"path": "/ledger/part/h0/1", "size_bytes": 9, "sha256": "ab" * 32, "unit": "u", "items": 7})


async def a_job_again(world: World, **spec: object) -> None:
    """The job `clean` is deleted and made again, while nobody looks in between."""
    world.fake.remove(JOBS, "clean", "default")
    world.job(**spec)


async def test_a_job_that_was_complete_is_not_complete_when_it_is_made_again() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        job = world.job()
        world.progress.jobs[job] = JobProgress(seen_s=1000.0, shards_open=0)
        await world.observe()
        was_complete = world.cluster.jobs()[0].is_complete
        world.progress.jobs[job] = JobProgress(seen_s=1001.0, shards_open=None)

        await a_job_again(world)

        seen = await world.observe()
        assert (was_complete, world.cluster.jobs()[0].is_complete) == (True, False)
        assert seen.jobs[0].open_units == 9999
        assert await world.start(job, 1) == ()


@pytest.mark.parametrize("looks", [False, True], ids=["at once", "after a look without it"])
async def test_a_job_made_again_inherits_no_failure_no_count_and_no_hold(looks: bool) -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        job = world.job(restartPolicy="Hold")
        world.progress.holds = False
        workers = await world.fill(job, 3)
        await world.evict(workers[:1], reason=Reason.LIMIT)
        world.finish(workers[0], 75, RECEIPT)
        world.finish(workers[1], 2, "no such folder: /data")
        world.clock.now_s += 10
        await world.tend()
        await world.tend()
        before = world.cluster.jobs()[0]

        world.fake.remove(JOBS, "clean", "default")
        if looks:
            await world.tend()
        world.job(restartPolicy="Hold")

        await world.observe()
        now = world.cluster.jobs()[0]
        assert (before.lost, before.failure != "", before.gpu_seconds > 0) == (1, True, True)
        assert (now.lost, now.failure, now.refusal, now.gpu_seconds) == (0, "", "", 0.0)
        assert await world.start(job, 1) == ()


async def test_a_service_made_again_is_started_whatever_was_wrong_with_the_old_one() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        variant = world.service()
        await world.start(variant, 1)
        world.run_all()
        [replica] = world.pods(names.POD_INFERENCE)
        world.finish(replica, 2, "No such option: --bogus")
        await world.tend()
        before = world.cluster.services()[0].refusal
        refusals = await world.start(variant, 1)

        world.fake.remove(SERVICES, "tts", "default")
        world.service()

        assert ("--bogus" in before, len(refusals)) == (True, 1)
        assert await world.start(variant, 1) == ()
        assert world.cluster.services()[0].refusal == ""


async def test_workers_of_the_old_job_leave_and_teach_the_new_one_nothing() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        job = world.job()
        [old] = await world.fill(job, 1)
        world.clock.now_s += 5

        await a_job_again(world)

        seen = await world.observe()
        view = world.cluster.jobs()[0]
        assert by_uid(seen)[old].phase is Phase.LEAVING
        assert (view.running, view.leaving, view.gpu_seconds) == (0, 0, 0.0)
        world.finish(old, 2, "its ledger is gone")
        await world.tend()
        assert world.pods() == []
        assert (world.cluster.jobs()[0].failure, world.cluster.jobs()[0].gpu_seconds) == ("", 0.0)
        assert await world.start(job, 1) == ()


async def test_replicas_of_the_old_service_get_no_request_of_the_new_one() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        variant = world.service()
        await world.start(variant, 1)
        world.run_all()
        await world.observe()
        before = world.cluster.endpoints("default/tts")

        world.fake.remove(SERVICES, "tts", "default")
        world.service()

        await world.observe()
        assert (len(before), world.cluster.endpoints("default/tts")) == (1, ())
        assert world.cluster.services()[0].replicas == ()


async def test_the_keeper_of_the_new_job_is_not_asked_what_a_worker_of_the_old_one_left() -> None:
    async with World() as world:
        _, workers = await world.full_node()
        world.progress.holds = False
        await world.evict(workers[:1], reason=Reason.LIMIT)
        await world.settle()

        await a_job_again(world)
        await world.observe()
        world.finish(workers[0], 75, RECEIPT)
        await world.tend()
        await world.tend()

        [victim] = parse(Reclaim, world.reclaims()[0]).status.victims
        assert (victim.outcome, victim.verified) == ("Unverified", None)
        assert (world.cluster.jobs()[0].lost, world.cluster.jobs()[0].unverified) == (0, 0)
