"""`KubeCluster`: replicas that leave without cutting a stream."""

from slackwater_operator.core import Action, Kind, Phase, Reason, TemporaryError, Verb
from slackwater_operator.kube.types import PODS
from slackwater_operator.resources import names
from slackwater_operator.testing.kube_world import World, by_uid, phases


async def serving(world: World, count: int = 1) -> list[str]:
    """Replicas that serve; returns their uids."""
    world.pool()
    world.nodes(1)
    variant = world.service(drain={"grace": "120s"})
    await world.start(variant, count, Reason.TRAFFIC)
    world.run_all()
    await world.observe()
    return world.pods(names.POD_INFERENCE)


def told(world: World) -> list[str]:
    """Who the gateway may send to."""
    return [replica.uid for replica in world.signals.tellings["default/tts"]]


async def test_a_drain_takes_the_replica_out_of_its_gateway_at_once_and_is_written_on_the_pod() -> None:
    async with World() as world:
        first, second = await serving(world, 2)

        refusals = await world.apply(Action(Verb.DRAIN, first, 1, Reason.QUIET))

        assert (refusals, told(world)) == ((), [second])
        assert names.ANNOTATION_DRAINING_SINCE in world.pod(first)["metadata"]["annotations"]
        assert by_uid(await world.observe())[first].phase is Phase.DRAINING


async def test_a_replica_ends_only_when_its_last_stream_is_over() -> None:
    async with World() as world:
        [uid] = await serving(world)
        world.signals.streams[uid] = 2
        await world.apply(Action(Verb.DRAIN, uid, 1, Reason.QUIET))

        await world.tend(60.0)
        streaming = world.leaving()
        world.signals.streams.clear()
        await world.tend(1.0)

        assert (streaming, world.leaving()) == ([], [uid])
        assert world.pod(uid)["metadata"]["deletionGracePeriodSeconds"] == 59


async def test_the_last_word_of_a_gateway_is_waited_for() -> None:
    async with World() as world:
        [uid] = await serving(world)
        await world.apply(Action(Verb.DRAIN, uid, 1, Reason.QUIET))

        await world.tend(1.0)
        early = world.leaving()
        await world.tend(1.0)

        assert (early, world.leaving()) == ([], [uid])


async def test_a_silent_gateway_costs_the_whole_grace_and_no_stream() -> None:
    async with World() as world:
        [uid] = await serving(world)
        await world.apply(Action(Verb.DRAIN, uid, 1, Reason.QUIET))
        world.signals.is_silent = True

        await world.tend(119.0)
        waiting = world.leaving()
        await world.tend(2.0)

        assert (waiting, world.leaving()) == ([], [uid])
        assert world.pod(uid)["metadata"]["deletionGracePeriodSeconds"] == 2


async def test_a_cancelled_drain_serves_on() -> None:
    async with World() as world:
        [uid] = await serving(world)
        await world.apply(Action(Verb.DRAIN, uid, 1, Reason.QUIET))

        refusals = await world.apply(Action(Verb.CANCEL, uid, 1, Reason.TRAFFIC))
        await world.tend(10.0)

        assert (refusals, world.leaving(), told(world)) == ((), [], [uid])
        assert phases(await world.observe(), Kind.INFERENCE) == [Phase.RUNNING]


async def test_what_leaves_cannot_be_called_back_nor_drained_twice() -> None:
    async with World() as world:
        [uid] = await serving(world)
        drain, cancel = Action(Verb.DRAIN, uid, 1, Reason.QUIET), Action(Verb.CANCEL, uid, 1, Reason.TRAFFIC)

        early = await world.apply(cancel)
        await world.apply(drain)
        twice = await world.apply(drain)
        await world.tend(2.0)
        late = await world.apply(cancel)

        assert [str(refusal.error) for refusal in (*early, *twice, *late)] == [
            f"{uid} is not draining",
            f"{uid} is draining already",
            f"{uid} is leaving already",
        ]
        assert all(isinstance(refusal.error, TemporaryError) for refusal in (*early, *twice, *late))


async def test_a_draining_replica_of_an_older_revision_is_never_asked_back() -> None:
    async with World() as world:
        [uid] = await serving(world)
        world.revisions.names["default/tts"] = "r2"
        await world.apply(Action(Verb.DRAIN, uid, 1, Reason.LIMIT))

        seen = await world.observe()

        assert by_uid(seen)[uid].phase is Phase.LEAVING


async def test_a_drain_goes_on_under_the_next_leader() -> None:
    async with World() as world:
        [uid] = await serving(world)
        await world.apply(Action(Verb.DRAIN, uid, 1, Reason.QUIET))
        await world.restart()

        seen = await world.observe()
        await world.tend(2.0)

        assert by_uid(seen)[uid].leaving_since_s == 1000.0
        assert world.leaving() == [uid]


async def test_a_replica_that_never_began_is_not_waited_for() -> None:
    async with World() as world:
        world.pool()
        world.nodes(1)
        await world.start(world.service(), 1, Reason.TRAFFIC)
        [uid] = world.pods()
        world.signals.is_silent = True
        await world.apply(Action(Verb.DRAIN, uid, 1, Reason.QUIET))

        await world.tend(2.0)

        assert world.leaving() == [uid]


async def test_a_replica_without_readiness_gets_no_requests() -> None:
    async with World() as world:
        [uid] = await serving(world)
        world.fake.update(
            PODS, uid.split("/")[1], {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}, "default"
        )

        await world.observe()

        assert told(world) == []
