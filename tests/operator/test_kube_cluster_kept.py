"""`KubeCluster`: the pod of a failure stays for a while, so that people can read its logs."""

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


async def test_a_new_leader_keeps_it_too_and_does_not_take_its_end_in_again() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        first, second = await world.fill(world.job(), 2)
        world.finish(first, 2, FAILED)
        await world.tend()

        await world.restart()
        await world.tend()
        failure, kept = world.cluster.jobs()[0].failure, world.pods()
        world.finish(second, 1, FAILED)
        await world.tend()

        assert failure == ""  # what stopped the job is in its conditions, as of a spec
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
