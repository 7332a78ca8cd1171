"""`KubeCluster`: what is observed while the API server has not answered yet, so that the next plan can be made."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from slackwater_operator.core import Action, Kind, Phase, Reason, Verb
from slackwater_operator.kube.types import PODS
from slackwater_operator.resources import names
from slackwater_operator.testing.kube_world import World, by_uid, phases


@asynccontextmanager
async def under_way(world: World, verb: str, plural: str, *actions: Action) -> AsyncIterator[None]:
    """The writes of these actions hang inside the block; at its end they have been carried out."""
    await world.observe()
    world.fake.hang(verb, plural, times=100)
    applying = asyncio.create_task(world.cluster.apply(actions, world.clock()))
    await asyncio.sleep(0.05)
    try:
        yield
    finally:
        world.fake.release()
        assert await applying == ()


async def test_workers_that_are_being_created_hold_their_gpus_and_count_as_starting() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1, gpus=4)
        job = world.job(maxWorkers=4)

        async with under_way(world, "create", PODS.plural, Action(Verb.START, job, 3, Reason.FLOOR)):
            seen = world.cluster.observe(world.clock())

            assert phases(seen, Kind.CLEANING) == [Phase.STARTING] * 3
            assert {(one.owner, one.preemptible) for one in seen.workloads} == {(job, False)}
            assert len(seen.nodes[0].idle_since_s) == 1
            assert world.pods() == []

        later = await world.observe()
        assert phases(later, Kind.CLEANING) == [Phase.STARTING] * 3
        assert sorted(by_uid(later)) == world.pods()
        assert all(one.preemptible for one in later.workloads)


async def test_two_plans_under_way_never_take_one_gpu_twice() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1, gpus=4)
        first, second = world.job("one", maxWorkers=4), world.job("two", maxWorkers=4)

        async with under_way(world, "create", PODS.plural, Action(Verb.START, first, 3, Reason.FLOOR)):
            again = asyncio.create_task(
                world.cluster.apply((Action(Verb.START, second, 3, Reason.FLOOR),), world.clock())
            )
            await asyncio.sleep(0.05)

        assert await again == ()
        assert (len(world.pods()), world.over_allocated()) == (4, [])


async def test_a_queue_s_limit_counts_workers_that_are_being_created() -> None:
    async with World() as world:
        world.pool(queues=[{"name": "asr", "weight": 1, "maxGPUs": 2}])
        world.nodes(1, gpus=4)
        job = world.job(queue="asr", maxWorkers=4)

        async with under_way(world, "create", PODS.plural, Action(Verb.START, job, 2, Reason.FLOOR)):
            [seen] = world.cluster.observe(world.clock()).jobs

            assert seen.max_workers == 2
            assert phases(world.cluster.observe(world.clock()), Kind.CLEANING) == [Phase.STARTING] * 2


async def test_a_worker_that_the_server_refuses_gives_its_gpu_back() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1, gpus=4)
        job = world.job(maxWorkers=4)
        world.fake.fail("create", PODS.plural, code=403, reason="Forbidden", times=3)

        refusals = await world.start(job, 3, Reason.FLOOR)

        seen = await world.observe()
        assert ([refusal.action.uid for refusal in refusals], seen.workloads) == ([job], ())
        assert len(seen.nodes[0].idle_since_s) == 4


async def test_victims_leave_from_the_decision_on_and_are_told_only_when_it_is_written_down() -> None:
    async with World() as world:
        variant, workers = await world.full_node(4)
        victims = workers[:2]

        actions = [Action(Verb.EVICT, uid, 1, Reason.TRAFFIC, variant) for uid in victims]
        async with under_way(world, "create", names.RECLAIM.plural, *actions):
            await world.cluster.tend(world.clock())
            seen = by_uid(world.cluster.observe(world.clock()))

            assert {uid: seen[uid].phase for uid in workers} == {
                uid: Phase.LEAVING if uid in victims else Phase.RUNNING for uid in workers
            }
            assert (world.leaving(), world.reclaims()) == ([], [])

        assert world.leaving() == sorted(victims)
        [reclaim] = world.reclaims()
        assert sorted(victim["pod"] for victim in reclaim["spec"]["victims"]) == sorted(victims)


async def test_victims_stay_if_the_reclaim_cannot_be_written() -> None:
    async with World() as world:
        variant, workers = await world.full_node(4)
        world.fake.fail("create", names.RECLAIM.plural, code=403, reason="Forbidden")

        [refusal] = await world.evict(workers[:1], variant)

        seen = by_uid(await world.observe())
        assert (refusal.action.uid, seen[workers[0]].phase, world.leaving()) == (workers[0], Phase.RUNNING, [])


async def test_a_replica_drains_from_the_decision_on_and_serves_again_from_the_next() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        variant = world.service(drain={"grace": "120s"})
        await world.start(variant, 1, Reason.TRAFFIC)
        world.run_all()
        [uid] = world.pods(names.POD_INFERENCE)

        async with under_way(world, "merge", PODS.plural, Action(Verb.DRAIN, uid, 1, Reason.QUIET)):
            assert by_uid(world.cluster.observe(world.clock()))[uid].phase is Phase.DRAINING
        async with under_way(world, "merge", PODS.plural, Action(Verb.CANCEL, uid, 1, Reason.TRAFFIC)):
            assert by_uid(world.cluster.observe(world.clock()))[uid].phase is Phase.RUNNING

        assert by_uid(await world.observe())[uid].phase is Phase.RUNNING
