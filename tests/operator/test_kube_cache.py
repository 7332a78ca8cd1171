"""The cache: one list, then watches, through everything that can happen to them."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.transport import Limits
from slackwater_operator.kube.trim import lean, only
from slackwater_operator.kube.types import NODES, PODS, Object
from slackwater_operator.testing.kube import FakeKube


def pod(name: str, namespace: str = "data", **labels: str) -> Object:
    return {"metadata": {"name": name, "namespace": namespace, "labels": labels}, "spec": {"containers": []}}


async def until(holds: Callable[[], object]) -> None:
    """Wait on real input and output, which no clock can move."""
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.001)


class Noted:
    """A cache with all that it told."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.told: list[tuple[str, str]] = []
        cache.on_change(lambda kind, obj: self.told.append((kind, obj["metadata"]["name"])))

    @property
    def names(self) -> list[str]:
        return sorted(obj["metadata"]["name"] for obj in self.cache)


async def instantly(seconds: float) -> None:
    await asyncio.sleep(0)


@asynccontextmanager
async def running(kube: Kube, **options: object) -> AsyncIterator[Noted]:
    noted = Noted(Cache(kube, PODS, **{"sleep": instantly, "rng": random.Random(1), **options}))  # type: ignore[arg-type]
    task = asyncio.create_task(noted.cache.run())
    try:
        await asyncio.wait_for(noted.cache.synced.wait(), 5)
        yield noted
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_it_lists_once_and_follows_by_watch() -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        fake.page = 2
        for name in ("a", "b", "c"):
            fake.put(PODS, pod(name))
        async with running(kube) as noted:
            fake.put(PODS, pod("d"))
            fake.update(PODS, "a", {"spec": {"nodeName": "n1"}}, "data")
            fake.remove(PODS, "b", "data")
            await until(lambda: len(noted.told) == 6)

            assert noted.told[3:] == [("ADDED", "d"), ("MODIFIED", "a"), ("DELETED", "b")]
            assert noted.names == ["a", "c", "d"]
            found = noted.cache.get("data", "a")
            assert found is not None
            assert found["spec"]["nodeName"] == "n1"
            assert noted.cache.lists == 1


async def test_a_broken_watch_goes_on_where_it_was_without_a_list() -> None:
    async with FakeKube() as fake, fake.kube() as kube, running(kube) as noted:
        for number in range(5):
            await until(lambda: fake.watching)
            fake.cut_watches()
            fake.put(PODS, pod(f"p{number}"))
            await until(lambda: len(noted.cache) == number + 1)  # noqa: B023 - awaited in the same turn

        assert noted.names == ["p0", "p1", "p2", "p3", "p4"]
        assert kube.counts["list", "pods"] == 1
        assert [kind for kind, _ in noted.told] == ["ADDED"] * 5


async def test_a_watch_cut_at_any_byte_loses_and_repeats_nothing() -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        for after_bytes in range(1, 700, 37):
            fake.cut("pods", after_bytes=after_bytes)
        async with running(kube) as noted:
            for number in range(40):
                fake.put(PODS, pod(f"p{number:02}"))
                if number % 7 == 0:
                    await asyncio.sleep(0.001)
            await until(lambda: len(noted.cache) == 40)

            assert sorted(noted.told) == [("ADDED", f"p{number:02}") for number in range(40)]
            assert noted.cache.lists == 1
            assert noted.cache.watches > 5


async def test_a_cut_within_a_line_is_no_event() -> None:
    async with FakeKube() as fake, fake.kube() as kube, running(kube) as noted:
        await until(lambda: fake.watching)
        fake.cut_watches(within_line=True)
        await until(lambda: noted.cache.watches == 2)
        fake.put(PODS, pod("a"))
        await until(lambda: noted.names == ["a"])

        assert noted.told == [("ADDED", "a")]


@pytest.mark.parametrize("as_event", [True, False])
async def test_after_410_it_lists_again_and_tells_the_difference(as_event: bool) -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        fake.gone_as_event = as_event
        for name in ("stays", "goes", "changes", "returns"):
            fake.put(PODS, pod(name))
        async with running(kube) as noted:
            await until(lambda: fake.watching)
            noted.told.clear()
            fake.fail("watch", "pods", times=3)
            fake.cut_watches()
            fake.remove(PODS, "goes", "data")
            fake.remove(PODS, "returns", "data")
            fake.put(PODS, pod("returns"))
            fake.update(PODS, "changes", {"spec": {"nodeName": "n1"}}, "data")
            fake.put(PODS, pod("comes"))
            fake.compact()
            await until(lambda: noted.cache.lists == 2 and len(noted.told) >= 5)

            assert sorted(noted.told) == [
                ("ADDED", "comes"),
                ("ADDED", "returns"),
                ("DELETED", "goes"),
                ("DELETED", "returns"),
                ("MODIFIED", "changes"),
            ]
            assert noted.told.index(("DELETED", "returns")) < noted.told.index(("ADDED", "returns"))
            assert noted.names == ["changes", "comes", "returns", "stays"]


async def test_quiet_watches_that_end_make_no_lists() -> None:
    now = [0.0]
    async with FakeKube() as fake, fake.kube() as kube, running(kube, clock=lambda: now[0]) as noted:
        for number in range(1, 6):
            await until(lambda: fake.watching)
            now[0] += 300.0
            fake.end_watches()
            await until(lambda: noted.cache.watches == number + 1)  # noqa: B023 - awaited in the same turn

        assert kube.counts["list", "pods"] == 1


async def test_bookmarks_move_the_place_to_go_on_from() -> None:
    async with FakeKube() as fake, fake.kube() as kube, running(kube) as noted:
        await until(lambda: fake.watching)
        fake.put(NODES, {"metadata": {"name": "n1"}})
        fake.bookmark()
        await until(lambda: noted.cache._at == fake.store.version)
        fake.compact()
        fake.cut_watches()
        await until(lambda: noted.cache.watches == 2 and fake.watching)

        assert noted.cache.lists == 1


async def test_errors_wait_longer_and_longer_and_never_end_it() -> None:
    delays: list[float] = []

    async def note(seconds: float) -> None:
        delays.append(seconds)
        await asyncio.sleep(0)

    async with FakeKube() as fake, fake.kube(sleep=instantly, limits=Limits(tries=1)) as kube:
        fake.fail("list", "pods", code=403, reason="Forbidden", times=4)
        fake.fail("list", "pods", code=500, times=4)
        fake.drop("list", "pods", times=2)
        async with running(kube, sleep=note) as noted:
            fake.put(PODS, pod("a"))
            await until(lambda: noted.names == ["a"])

    assert len(delays) == 10
    assert delays[0] <= 0.2
    assert 5.0 <= max(delays) <= 10.0


async def test_stalls_are_seen_and_every_sign_of_life_ends_them() -> None:
    now = [0.0]
    async with FakeKube() as fake, fake.kube() as kube, running(kube, clock=lambda: now[0]) as noted:
        await until(lambda: fake.watching)
        now[0] = 100.0
        stalled = noted.cache.stalled_s(now[0])
        fake.bookmark()
        await until(lambda: noted.cache.stalled_s(now[0]) == 0.0)

        now[0] = 150.0
        assert stalled == 100.0
        assert noted.cache.stalled_s(now[0]) == 50.0


async def test_a_paused_server_is_a_stall_and_its_return_is_noticed() -> None:
    limits = Limits(watch_silence_s=0.1, silence_s=0.1, tries=1)
    async with FakeKube() as fake, fake.kube(limits=limits) as kube, running(kube) as noted:
        await until(lambda: fake.watching)
        fake.pause()
        fake.put(PODS, pod("a"))
        await asyncio.sleep(0.25)
        known = noted.names
        fake.resume()
        await until(lambda: noted.names == ["a"])

        assert known == []
        assert noted.cache.watches >= 2
        assert noted.cache.lists == 1


async def test_an_own_write_is_known_before_the_watch_brings_it_and_told_once() -> None:
    async with FakeKube() as fake, fake.kube() as kube, running(kube) as noted:
        await until(lambda: fake.watching)
        made = await kube.create(PODS, pod("a"), manager="test")
        noted.cache.remember(made)
        at_once = noted.names
        fake.put(PODS, pod("b"))
        await until(lambda: noted.names == ["a", "b"])

        assert at_once == ["a"]
        assert noted.told == [("ADDED", "a"), ("ADDED", "b")]


async def test_an_answer_that_comes_after_the_objects_end_is_no_news() -> None:
    async with FakeKube() as fake, fake.kube() as kube, running(kube) as noted:
        made = fake.put(PODS, pod("a"))
        fake.remove(PODS, "a", "data")
        await until(lambda: noted.told == [("ADDED", "a"), ("DELETED", "a")])

        noted.cache.remember(made)

        assert noted.names == []


async def test_a_remembered_object_that_was_deleted_before_its_watch_goes() -> None:
    async with FakeKube() as fake, fake.kube() as kube, running(kube) as noted:
        await until(lambda: fake.watching)
        fake.pause()
        made = fake.put(PODS, pod("a"))
        noted.cache.remember(made)
        fake.remove(PODS, "a", "data")
        known = noted.names
        fake.resume()
        await until(lambda: noted.names == [])

        assert known == ["a"]
        assert noted.told == [("ADDED", "a"), ("DELETED", "a")]


async def test_a_remembered_object_survives_the_echo_of_its_earlier_life() -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        fake.put(PODS, pod("a", life="first"))
        async with running(kube) as noted:
            await until(lambda: fake.watching)
            fake.pause()
            fake.update(PODS, "a", {"spec": {"nodeName": "n1"}}, "data")
            fake.remove(PODS, "a", "data")
            second = fake.put(PODS, pod("a", life="second"))
            noted.cache.remember(second)
            fake.resume()
            fake.put(PODS, pod("b"))
            await until(lambda: "b" in noted.names)

            found = noted.cache.get("data", "a")
            assert found is not None
            assert found["metadata"]["labels"] == {"life": "second"}
            assert noted.told == [("ADDED", "a"), ("DELETED", "a"), ("ADDED", "a"), ("ADDED", "b")]


async def test_what_is_remembered_outlives_a_list_that_is_older_but_not_one_that_is_newer() -> None:
    async with FakeKube() as fake, fake.kube() as kube, running(kube) as noted:
        await until(lambda: fake.watching)
        fake.pause()
        noted.cache.remember(fake.put(PODS, pod("ghost")))
        fake.remove(PODS, "ghost", "data")
        fake.compact()
        ahead = pod("ahead")
        ahead["metadata"] |= {"uid": "u", "resourceVersion": str(fake.store.version + 50)}
        noted.cache.remember(ahead)
        fake.cut_watches()
        fake.resume()
        await until(lambda: noted.cache.lists == 2 and "ghost" not in noted.names)

        assert noted.names == ["ahead"]


async def test_an_own_write_is_known_while_the_list_is_on_its_way() -> None:
    async with FakeKube() as fake, fake.kube() as kube, running(kube) as noted:
        fake.put(PODS, pod("a"))
        await until(lambda: noted.names == ["a"] and fake.watching)
        fake.hang("list", "pods")
        fake.fail("watch", "pods", code=410, reason="Expired")
        fake.cut_watches()
        await until(lambda: noted.cache.lists == 2)

        noted.cache.remember(await kube.create(PODS, pod("b"), manager="test"))
        at_once = noted.names
        fake.release()
        await until(lambda: fake.watching)

        assert at_once == ["a", "b"]
        assert noted.names == ["a", "b"]
        assert noted.told == [("ADDED", "a"), ("ADDED", "b")]


async def test_a_server_that_went_back_to_a_backup_is_believed() -> None:
    async with FakeKube() as fake, fake.kube() as kube, running(kube) as noted:
        fake.put(PODS, pod("a"))
        fake.update(PODS, "a", {"spec": {"nodeName": "later"}}, "data")
        fake.put(PODS, pod("b"))
        await until(lambda: noted.names == ["a", "b"] and fake.watching)
        fake.store.version = 500
        fake.store.history.clear()
        fake.remove(PODS, "b", "data")
        fake.update(PODS, "a", {"spec": {"nodeName": "earlier"}}, "data")
        fake.fail("watch", "pods", code=504, reason="Timeout", message="Too large resource version: 1003, current: 502")
        fake.cut_watches()
        await until(lambda: noted.cache.lists == 2 and fake.watching)

        found = noted.cache.get("data", "a")
        assert found is not None
        assert found["spec"]["nodeName"] == "earlier"
        assert noted.names == ["a"]


async def test_a_version_that_the_server_can_never_bear_is_given_up() -> None:
    async with FakeKube() as fake, fake.kube(limits=Limits(tries=1)) as kube, running(kube) as noted:
        await until(lambda: fake.watching)
        fake.fail("watch", "pods", code=500, message="decoding failed", times=6)
        fake.cut_watches()
        fake.put(PODS, pod("a"))
        await until(lambda: noted.names == ["a"])

        assert noted.cache.lists == 2


async def test_only_what_the_selectors_mean_is_remembered() -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        fake.put(PODS, pod("mine", app="tts"))
        fake.put(PODS, pod("other", app="else"))
        async with running(kube, namespace="data", labels="app=tts", fields="status.phase!=Failed") as noted:
            for obj in (pod("x", app="else"), pod("y", "elsewhere", app="tts"), pod("z", app="tts")):
                noted.cache.remember(fake.put(PODS, obj))

            assert noted.names == ["mine", "z"]


async def test_a_callback_that_fails_harms_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    def fail(kind: str, obj: Object) -> None:
        raise RuntimeError("mine")

    async with FakeKube() as fake, fake.kube() as kube, running(kube) as noted:
        noted.cache.on_change(fail)
        noted.cache.on_change(lambda kind, obj: noted.told.append(("after", kind)))
        fake.put(PODS, pod("a"))
        await until(lambda: ("after", "ADDED") in noted.told)

    assert "a callback failed at ADDED Pod data/a" in caplog.text


def test_what_is_kept_is_trimmed_and_the_rest_stays_as_it_was() -> None:
    obj = pod("a", app="tts")
    obj["metadata"] |= {
        "managedFields": [{"manager": "x"}],
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "note": "y"},
        "selfLink": "z",
    }
    obj["spec"] = {"nodeName": "n1", "volumes": [1], "containers": [{"name": "c", "image": "i", "resources": {"a": 1}}]}
    keep = only("spec.nodeName", "spec.containers.name", "spec.containers.resources")

    kept, whole = keep(obj), lean(obj)

    assert kept["spec"] == {"nodeName": "n1", "containers": [{"name": "c", "resources": {"a": 1}}]}
    assert kept["metadata"] == {
        "name": "a",
        "namespace": "data",
        "labels": {"app": "tts"},
        "annotations": {"note": "y"},
    }
    assert whole["spec"] == obj["spec"]
    assert "managedFields" not in whole["metadata"]
    assert "managedFields" in obj["metadata"]
