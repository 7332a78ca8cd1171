"""`KubeCluster`: cleaning jobs and training pods as the policy sees them."""

from datetime import datetime

import pytest

from slackwater_operator.cluster.kube.ports import JobProgress, WorkerProgress
from slackwater_operator.core import Kind, Phase, Reason
from slackwater_operator.kube.types import PODS
from slackwater_operator.testing.kube_operator import JOBS
from slackwater_operator.testing.kube_world import World, by_uid, phases

FLAVOR = "east/h200"
DURABLE = "2026-11-30T10:00:00+00:00"


async def test_a_job_is_complete_when_its_ledger_has_no_open_shard() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        job = world.job()
        [worker] = await world.fill(job, 1)
        world.progress.jobs[job] = JobProgress(seen_s=1000.0, shards_open=1)
        world.finish(worker, 0)
        await world.tend()
        still_open = world.cluster.jobs()[0].is_complete
        world.progress.jobs[job] = JobProgress(seen_s=1001.0, shards_open=0)

        seen = await world.observe()

        assert (still_open, world.cluster.jobs()[0].is_complete) == (False, True)
        assert seen.jobs[0].open_units == 0


async def test_while_the_keeper_is_silent_workers_that_find_nothing_to_do_look_again_more_and_more_rarely() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        job = world.job()
        workers = await world.fill(job, 2)
        world.progress.jobs[job] = JobProgress(seen_s=1000.0, shards_open=2)  # and nothing since
        rests = []
        for worked_s in (0.0, 0.0, 0.0, 31.0):
            world.clock.now_s += worked_s
            for worker in workers:
                world.finish(worker, 0)
            await world.tend()
            ended_s = world.clock.now_s
            while (await world.observe()).jobs[0].open_units == 0:
                world.clock.now_s += 0.5
            rests.append(world.clock.now_s - ended_s)
            workers = await world.fill(job, 2)

        assert rests == [1.0, 2.0, 4.0, 1.0]


async def test_what_was_lost_and_what_was_spent_is_known_to_the_next_leader_too() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        job = world.job()
        failed, preempted, _ = await world.fill(job, 3)
        world.clock.now_s += 100
        world.finish(failed, 1)  # its pod stays, taken in
        await world.tend()
        before = world.cluster.jobs()[0]
        status = {"lost": 1, "unverified": 2, "gpuSeconds": before.gpu_seconds, "lastDurableTime": DURABLE}
        world.fake.put(JOBS, {**world.fake.get(JOBS, "clean", "default"), "status": status})
        await world.settle()
        world.clock.now_s += 5
        world.finish(preempted, 75)  # nobody takes this one in before the next leader does

        await world.restart()
        await world.tend()
        now = world.cluster.jobs()[0]
        await world.tend(10.0)
        later = world.cluster.jobs()[0]

        assert before.gpu_seconds == pytest.approx(300.0, abs=1.0)
        assert (now.lost, now.unverified, now.durable_wall_s) == (1, 2, datetime.fromisoformat(DURABLE).timestamp())
        assert now.gpu_seconds == pytest.approx(before.gpu_seconds, abs=1.0)
        assert later.gpu_seconds == pytest.approx(now.gpu_seconds + 10.0, abs=0.5)  # of the one that is left


async def test_what_a_worker_has_made_durable_is_seen_and_settled_when_it_leaves() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        job = world.job()
        [uid] = await world.fill(job, 1)
        world.progress.workers[uid.split("/")[1]] = WorkerProgress(1010.0, 4, "h0")
        world.clock.now_s += 12

        running = await world.observe()
        world.finish(uid, 75)
        gone = await world.observe()

        worker = by_uid(running)[uid]
        assert (worker.durable_s, worker.committed_s) == (1010.0, pytest.approx(10.0, abs=1.0))
        assert gone.departed == ((uid, pytest.approx(12.0, abs=1.0)),)


async def test_a_queue_s_limit_is_shared_by_its_jobs() -> None:
    async with World() as world:
        world.pool(queues=[{"name": "asr", "weight": 3, "maxGPUs": 5}])
        world.nodes(1)
        first, second = world.job("a", queue="asr"), world.job("b", queue="asr")
        await world.fill(second, 2)

        seen = await world.observe()

        assert [(job.uid, job.max_workers, job.weight) for job in seen.jobs] == [(first, 3, 3.0), (second, 2, 3.0)]


async def test_a_suspended_job_wants_no_workers() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        world.job(suspend=True, minWorkers=1)

        seen = await world.observe()

        assert [(job.min_workers, job.max_workers, job.open_units) for job in seen.jobs] == [(0, 0, 0)]


async def test_a_waiting_training_pod_is_seen_after_a_moment_if_the_scheduler_cannot_help_it() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1, gpus=2)
        await world.fill(world.job(), 2)
        world.training_pod()
        world.training_pod("helped", preemptionPolicy="PreemptLowerPriority")
        world.training_pod("elsewhere", nodeSelector={"zone": "west"})
        world.training_pod("gated", schedulingGates=[{"name": "quota"}])

        at_once = await world.observe()
        world.clock.now_s += 2
        later = await world.observe()

        assert phases(at_once, Kind.TRAINING) == []
        assert [(w.uid, w.phase, w.node, w.flavor) for w in later.workloads if w.kind is Kind.TRAINING] == [
            ("default/train", Phase.PENDING, "", FLAVOR)
        ]


async def test_a_training_pod_that_was_promised_a_gpu_keeps_it() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1, gpus=2)
        world.training_pod()
        world.fake.update(PODS, "train", {"status": {"nominatedNodeName": "n1"}}, "default")

        seen = await world.observe()

        assert phases(seen, Kind.TRAINING) == [Phase.STARTING]
        assert len(seen.nodes[0].idle_since_s) == 1


@pytest.mark.parametrize(("policy", "said"), [("Hold", "waits for a person"), ("Stop", "ended with a preemption")])
async def test_a_preemption_ends_a_job_that_says_so(policy: str, said: str) -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        job = world.job(restartPolicy=policy)
        workers = await world.fill(job, 2)
        await world.evict(workers[:1], reason=Reason.TRAINING, beneficiary="default/train")
        world.finish(workers[0])

        seen = await world.observe()

        assert said in world.cluster.jobs()[0].failure
        assert (seen.jobs[0].open_units, seen.jobs[0].max_workers) == (0, 0 if policy == "Stop" else 9999)
