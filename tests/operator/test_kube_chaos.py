"""Cache and elector under random trouble: whatever happens, the copy ends right and nobody leads beside another."""

import asyncio
import random
from contextlib import suppress

import pytest

from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.election import Elector
from slackwater_operator.kube.transport import Limits
from slackwater_operator.kube.types import PODS, Object
from slackwater_operator.testing.kube import FakeKube
from slackwater_operator.testing.kube_clock import MovedClock


async def shortly(seconds: float) -> None:
    await asyncio.sleep(seconds / 1000)


@pytest.mark.parametrize("seed", range(6))
async def test_a_cache_ends_right_and_told_every_step_in_order(seed: int) -> None:
    rng = random.Random(seed)
    told: dict[str, Object] = {}

    def follow(kind: str, obj: Object) -> None:
        name = obj["metadata"]["name"]
        assert (name in told) == (kind != "ADDED"), (kind, name)
        if kind == "DELETED":
            del told[name]
            return
        if kind == "MODIFIED":
            before, after = told[name]["metadata"], obj["metadata"]
            assert before["uid"] == after["uid"]
            assert int(before["resourceVersion"]) < int(after["resourceVersion"])
        told[name] = obj

    async with FakeKube() as fake, fake.kube(sleep=shortly, rng=rng, limits=Limits(tries=2)) as kube:
        fake.page = 3
        cache = Cache(kube, PODS, labels="mine", sleep=shortly, rng=rng)
        cache.on_change(follow)
        failures: list[str] = []
        task = asyncio.create_task(cache.run())
        await cache.synced.wait()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(str(context)))
        for _ in range(400):
            name = f"p{rng.randrange(12)}"
            known = fake.get(PODS, name, "data")
            match rng.randrange(14):
                case 0:
                    fake.cut_watches(within_line=rng.random() < 0.5)
                case 1:
                    fake.cut(after_bytes=rng.randrange(1, 2000))
                case 2:
                    fake.compact()
                case 3:
                    fake.fail("watch" if rng.random() < 0.5 else "list", code=rng.choice((429, 500, 503)))
                case 4:
                    fake.end_watches()
                case 5:
                    fake.bookmark()
                case 6 | 7 if known is not None:
                    fake.remove(PODS, name, "data")
                case 8 | 9 if known is not None:
                    label = rng.choice(("mine", "other"))  # the second makes it leave the selection
                    labels = {"mine": None, "other": None, label: "1"}
                    fake.update(PODS, name, {"metadata": {"labels": labels}}, "data")
                case _ if known is None:
                    body = {"metadata": {"name": name, "namespace": "data", "labels": {"mine": "1"}}, "spec": {}}
                    made = fake.put(PODS, body)
                    if rng.random() < 0.7:
                        cache.remember(made)
                case _:
                    patch = {"spec": {"nodeName": str(rng.random())}}
                    made = fake.update(PODS, name, patch, "data")
                    if rng.random() < 0.5:
                        cache.remember(made)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() / 300)
        fake.release()
        wanted = {pod["metadata"]["name"]: pod for pod in fake.objects(PODS) if "mine" in pod["metadata"]["labels"]}

        def settled() -> bool:
            now = {obj["metadata"]["name"]: obj["metadata"]["resourceVersion"] for obj in cache}
            return now == {name: obj["metadata"]["resourceVersion"] for name, obj in wanted.items()}

        async with asyncio.timeout(10):
            while not settled():
                await asyncio.sleep(0.005)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

        assert sorted(told) == sorted(wanted)
        assert failures == []


@pytest.mark.parametrize("seed", range(4))
async def test_never_two_lead_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    leading: set[str] = set()
    terms: list[str] = []
    clocks = [MovedClock(now_s=rng.uniform(0, 1e6), wall_s=rng.uniform(1e9, 2e9)) for _ in range(3)]

    async with FakeKube() as fake, fake.kube(limits=Limits(tries=1)) as kube:

        def candidate(number: int, life: int) -> tuple[Elector, "asyncio.Task[None]"]:
            clock, name = clocks[number], f"{number}-{life}"

            async def lead() -> None:
                leading.add(name)
                terms.append(name)
                try:
                    await asyncio.Event().wait()
                finally:
                    leading.discard(name)

            elector = Elector(kube, "ns", "lease", name, clock=clock, wall=clock.wall, sleep=clock.sleep)
            return elector, asyncio.create_task(elector.run(lead))

        pairs = [candidate(number, 0) for number in range(3)]
        lives = [0, 0, 0]
        frozen: dict[int, float] = {}  # a process that gets no time, until when
        now_s = 0.0
        while now_s < 120.0:
            match rng.randrange(40):
                case 0:
                    fake.fail(plural="leases", code=rng.choice((409, 429, 500)), reason="Conflict", times=3)
                case 1:
                    fake.lose(plural="leases", times=rng.randrange(1, 4))
                case 2:
                    fake.pause()
                case 3 | 4:
                    fake.release()
                    fake.resume()
                case 5:
                    frozen.setdefault(rng.randrange(3), now_s + rng.uniform(1, 15))
                case 6:
                    number = rng.randrange(3)
                    if number not in frozen:
                        pairs[number][1].cancel()
                        await asyncio.gather(pairs[number][1], return_exceptions=True)
                        lives[number] += 1
                        pairs[number] = candidate(number, lives[number])
            now_s += 0.5
            for number, clock in enumerate(clocks):
                if frozen.get(number, 0.0) > now_s:
                    clock.now_s += 0.5  # time passes, and nothing of it runs
                else:
                    frozen.pop(number, None)
                    await clock.advance(0.5, settle=fake.settle)
            assert sum(elector.is_leader for elector, _ in pairs) <= 1
            awake = {f"{number}-{lives[number]}" for number in range(3) if number not in frozen}
            assert len(leading & awake) <= 1
        fake.release()
        fake.resume()
        for _, task in pairs:
            task.cancel()
        await asyncio.gather(*(task for _, task in pairs), return_exceptions=True)

        assert len(terms) >= 2
