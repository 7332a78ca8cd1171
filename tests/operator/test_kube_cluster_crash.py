"""`KubeCluster` under the real policy, with the operator killed before each of its writes in turn.

Whatever write it was, the next operator ends where an undisturbed one ends: as many replicas as the traffic needs, as
many workers sent away as that took, no GPU given to two, nobody told to go twice.
"""

from collections import Counter

import pytest

from slackwater_operator.core import Limits, TrafficSample
from slackwater_operator.loop import Loop, ServiceSpec, VariantSpec
from slackwater_operator.resources import names
from slackwater_operator.testing.kube_operator import Crash
from slackwater_operator.testing.kube_world import World
from slackwater_operator.traffic import Window

NEED = 3  # replicas
ROUNDS = 10
SLOTS = 64
WRITES = 8  # a Reclaim and its end; a victim's end and a replica for each of three GPUs
CONTESTED_WRITES = 17  # and for each of them one that keeps its place: made, nominated, removed


def new_loop(world: World, variant: str) -> Loop:
    spec = ServiceSpec("default/tts", 1, 8, (VariantSpec(variant, "east/h200", SLOTS),), 0, 1, Window())
    return Loop(world.cluster, [spec], Limits(max_parallel=64))


async def play(*, rival: bool, before: int | None = None, after: int | None = None) -> World:
    """Two nodes of four GPUs full of cleaning, then traffic for three replicas; returns the world as it ended."""
    async with World() as world:
        world.pool(lending={"lendAfter": "0s"})
        world.nodes(2, gpus=4)
        variant = world.service(minReplicas=1, maxReplicas=8)
        job = world.job()
        await world.fill(job, 8)
        if rival:
            world.rival()
        world.forget_writes()
        world.crash_before, world.crash_after = before, after
        loop = new_loop(world, variant)
        for number in range(ROUNDS):
            world.clock.now_s += 1.0
            now_s = world.clock()
            world.signals.samples.append(("default/tts", TrafficSample(now_s, SLOTS * NEED - 8, 0, 1000 + number)))
            await world.settle()
            try:
                await loop.tick(now_s)
                await world.cluster.tend(now_s)
            except Crash:
                await world.restart()
                loop = new_loop(world, variant)
            assert world.over_allocated() == []
            for uid in world.leaving():
                world.finish(uid, 75)
            world.run_all()
            assert world.over_allocated() == []
        await world.settle()
        world.cluster.observe(world.clock())
        return world


def deletes(world: World) -> Counter[str]:
    """How often each worker was told to go."""
    return Counter(
        seen.name for seen in world.fake.requests if seen.verb == "delete" and seen.name.startswith("clean-")
    )


def assert_ended_well(world: World) -> None:
    assert len(world.pods(names.POD_INFERENCE)) == NEED
    assert sorted(deletes(world).values()) == [1] * NEED
    assert len(world.pods(names.POD_CLEANING)) == 8 - NEED


@pytest.mark.parametrize(("rival", "writes"), [(False, WRITES), (True, CONTESTED_WRITES)])
async def test_an_undisturbed_run_takes_exactly_what_it_needs(rival: bool, writes: int) -> None:
    world = await play(rival=rival)

    assert_ended_well(world)
    assert len(world.writes) == writes
    assert {reclaim["status"]["phase"] for reclaim in world.reclaims()} == {"Serving"}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("rival", "number"),
    [*((False, number) for number in range(WRITES)), *((True, number) for number in range(CONTESTED_WRITES))],
)
async def test_killed_at_any_write_the_next_operator_ends_in_the_same_place(
    rival: bool, number: int, when: str
) -> None:
    world = await play(rival=rival, **{when: number})

    assert world.crashed
    assert_ended_well(world)
    assert {reclaim["status"]["phase"] for reclaim in world.reclaims()} == {"Serving"}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(3))
async def test_killed_while_filling_idle_gpus_no_gpu_goes_to_two(number: int, when: str) -> None:
    async with World() as world:
        world.pool()
        world.nodes(1, gpus=4)
        world.job(maxWorkers=3)
        setattr(world, f"crash_{when}", number)
        loop = Loop(world.cluster, [], Limits())
        for _ in range(3):
            world.clock.now_s += 1.0
            await world.settle()
            try:
                await loop.tick(world.clock())
                await world.cluster.tend(world.clock())
            except Crash:
                await world.restart()
                loop = Loop(world.cluster, [], Limits())
            world.run_all()
            assert world.over_allocated() == []

        assert world.crashed
        assert len(world.pods(names.POD_CLEANING)) == 3
