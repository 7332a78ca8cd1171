"""When the cluster wants a plan early, and what it does not want one for."""

import pytest

from slackwater_operator.core import Phase
from slackwater_operator.kube.types import PODS
from slackwater_operator.resources import names
from slackwater_operator.testing.kube_operator import JOBS, RECLAIMS, SERVICES
from slackwater_operator.testing.kube_world import World, by_uid
from slackwater_operator.testing.resources import a_job, a_service


async def test_the_end_of_a_worker_pokes_once_before_anybody_looks() -> None:
    async with World() as world:
        _, workers = await world.full_node(2)
        await world.observe()
        world.pokes = 0

        world.finish(workers[0])
        await world.settle()

        assert world.pokes == 1
        await world.observe()
        await world.tend()
        assert world.pokes == 1  # looking at what ended is no reason to look again


async def test_a_worker_that_is_gone_without_an_end_pokes_too() -> None:
    async with World() as world:
        _, workers = await world.full_node(2)
        await world.observe()
        world.pokes = 0

        world.fake.remove(PODS, workers[0].partition("/")[2], "default")
        await world.settle()

        assert world.pokes == 1


async def test_pods_that_begin_and_statuses_do_not_poke() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        job = world.job()
        await world.start(job, 2)
        await world.observe()
        world.pokes = 0

        world.run_all()
        clean = world.fake.get(JOBS, "clean", "default")
        assert clean is not None
        world.fake.put(JOBS, clean | {"status": {"workers": {"running": 2}}})
        await world.settle()

        assert world.pokes == 0


@pytest.mark.parametrize("what", ["made", "edited", "deleted"])
async def test_a_spec_that_plans_are_made_from_pokes(what: str) -> None:
    async with World() as world:
        world.service("tts")
        world.job("clean")
        await world.observe()
        world.pokes = 0

        if what == "made":
            world.fake.put(JOBS, a_job("more"))
        elif what == "edited":
            edited = a_service("tts", minReplicas=1)
            edited["metadata"]["generation"] = 2
            world.fake.put(SERVICES, edited)
        else:
            world.fake.remove(JOBS, "clean", "default")
        await world.settle()

        assert world.pokes == 1


async def test_our_own_record_of_a_take_back_does_not_poke() -> None:
    async with World() as world:
        variant, workers = await world.full_node(2)
        await world.observe()
        world.pokes = 0

        await world.evict(workers[:1], variant)
        await world.settle()

        assert len(world.fake.objects(RECLAIMS)) == 1
        assert world.pokes == 0


async def test_workloads_are_in_the_order_of_their_uids_whichever_came_first() -> None:
    async with World() as world:
        _, workers = await world.full_node(8)
        await world.observe()

        world.finish(workers[3])
        late = world.pod(workers[0])
        late["metadata"] = {**late["metadata"], "name": "a-late-one", "uid": "late"}
        world.fake.put(PODS, late)
        seen = await world.observe()

        assert [workload.uid for workload in seen.workloads] == sorted(
            [*(uid for uid in workers if uid != workers[3]), names.object_uid("default", "a-late-one")]
        )


async def test_a_pod_that_changed_is_seen_anew_and_the_others_stay_the_same_values() -> None:
    async with World() as world:
        _, workers = await world.full_node(2)
        before = by_uid(await world.observe())

        await world.kube.delete(PODS, workers[0].partition("/")[2], "default")
        after = by_uid(await world.observe())

        assert after[workers[0]].phase is Phase.LEAVING
        assert after[workers[1]] is before[workers[1]]
