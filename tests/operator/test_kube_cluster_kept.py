"""`KubeCluster`: the pod of a failure stays for a while, so that people can read its logs."""

import pytest

from slackwater_operator.cluster.kube.endings import KEEP_S
from slackwater_operator.core import Reason
from slackwater_operator.kube.types import PODS
from slackwater_operator.resources import names
from slackwater_operator.testing.kube_world import World

FAILED = "ValueError: no audio"


def is_booked(world: World, uid: str) -> bool:
    namespace, _, name = uid.partition("/")
    return names.ANNOTATION_BOOKED in (world.fake.get(PODS, name, namespace)["metadata"].get("annotations") or {})


async def test_the_newest_pod_that_failed_by_itself_stays_for_its_logs_and_holds_nothing() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        first, second, left = await world.fill(world.job(), 3)
        world.finish(left, 75)
        world.finish(first, 1, FAILED)
        await world.tend()
        after_one = world.pods()
        world.finish(second, 2, FAILED)
        await world.tend()
        after_two, was_booked = world.pods(), is_booked(world, second)

        seen = await world.observe()
        await world.tend(KEEP_S - 60.0)
        before_long = world.pods()
        await world.tend(61.0)

        assert (after_one, after_two, before_long, world.pods()) == ([first, second], [second], [second], [])
        assert was_booked
        assert (len(seen.nodes[0].idle_since_s), seen.workloads) == (8, ())


async def test_each_job_and_each_service_keeps_its_own() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        variant = world.service()
        [one], [other] = await world.fill(world.job("a"), 1), await world.fill(world.job("b"), 1)
        await world.start(variant, 1, Reason.TRAFFIC)
        world.run_all()
        [engine] = world.pods(names.POD_INFERENCE)

        for uid in (one, other, engine):
            world.finish(uid, 1, FAILED)
        await world.tend()

        assert world.pods() == sorted([one, other, engine])


async def test_who_was_told_to_go_does_not_stay_however_it_ended() -> None:
    async with World() as world:
        _, workers = await world.full_node(gpus=1)

        await world.evict(workers, reason=Reason.LIMIT)
        world.finish(workers[0], 1, FAILED)
        await world.tend()

        assert world.pods() == []


async def test_a_new_leader_keeps_it_too_counts_it_once_and_starts_with_a_clean_sheet() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        job = world.job()
        first, second = await world.fill(job, 2)
        world.clock.now_s += 100
        world.finish(first, 2, FAILED)
        await world.tend()
        was_counted = world.cluster.jobs()[0].gpu_seconds

        await world.restart()
        await world.tend()
        view = world.cluster.jobs()[0]
        kept = world.pods()
        world.finish(second, 1, FAILED)
        await world.tend()

        assert was_counted == pytest.approx(200.0, abs=1.0)
        assert view.gpu_seconds == pytest.approx(100.0, abs=1.0)  # of the one that runs; the status has the rest
        assert view.failure == ""
        assert kept == [first, second]
        assert world.pods() == [second]


async def test_somebody_deletes_it_and_no_other_takes_its_place() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        [worker] = await world.fill(world.job(), 1)
        world.finish(worker, 1, FAILED)
        await world.tend()

        world.fake.remove(PODS, worker.partition("/")[2], "default")
        await world.tend()

        assert world.pods() == []
