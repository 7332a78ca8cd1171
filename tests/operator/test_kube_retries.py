"""What the Kubernetes client sends again, what it does not, and when it gives up."""

import asyncio
import random

import pytest

from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.connection import Connection
from slackwater_operator.kube.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    TooManyRequests,
    Unreachable,
)
from slackwater_operator.kube.transport import Limits
from slackwater_operator.kube.types import NODES, PODS, Object, Resource
from slackwater_operator.testing.kube import FakeKube
from slackwater_operator.testing.kube_clock import MovedClock


def pod(name: str = "a", namespace: str = "serving", **labels: str) -> Object:
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"containers": [{"name": "engine", "resources": {"limits": {"cpu": "0.5"}}}]},
    }


async def instantly(seconds: float) -> None:
    await asyncio.sleep(0)


async def test_a_throttled_call_waits_as_long_as_the_server_asks() -> None:
    clock = MovedClock()
    async with FakeKube() as fake, fake.kube(clock=clock, sleep=clock.sleep) as kube:
        fake.fail("create", "pods", code=429, reason="TooManyRequests", retry_after=3)

        task = asyncio.create_task(kube.create(PODS, pod(), manager="test"))
        while not clock.sleeping:
            await asyncio.sleep(0.001)
        await clock.advance(2.9)
        before = task.done()
        await clock.advance(0.2)
        made = await task

        assert not before
        assert made["metadata"]["name"] == "a"
        assert kube.counts["create", "pods"] == 2


@pytest.mark.parametrize("code", [429, 503])
async def test_tries_end_within_their_bound_and_the_error_keeps_the_delay(code: int) -> None:
    async with FakeKube() as fake, fake.kube(sleep=instantly) as kube:
        fake.fail("get", "nodes", code=code, retry_after=2, times=99)

        with pytest.raises((TooManyRequests, Unreachable)) as caught:
            await kube.get(NODES, "n1")

        assert caught.value.delay_s == 2.0
        assert kube.counts["get", "nodes"] == 5

        slow = Limits(retry_within_s=1.0)
        async with fake.kube(sleep=instantly, limits=slow) as hasty:
            with pytest.raises((TooManyRequests, Unreachable)):
                await hasty.get(NODES, "n1")
            assert hasty.counts["get", "nodes"] == 1


async def test_a_create_whose_answer_is_lost_is_read_back() -> None:
    async with FakeKube() as fake, fake.kube(sleep=instantly) as kube:
        fake.lose("create", "pods")

        made = await kube.create(PODS, pod(), manager="test")

        assert made["metadata"]["uid"] == fake.objects(PODS)[0]["metadata"]["uid"]
        assert [seen.verb for seen in fake.requests] == ["create", "create", "get"]


async def test_another_ones_object_is_not_taken_for_ours_after_a_lost_answer() -> None:
    async with FakeKube() as fake, fake.kube(sleep=instantly) as kube:
        fake.put(PODS, pod(app="someone-else's"))
        fake.drop("create", "pods")

        with pytest.raises(AlreadyExists):
            await kube.create(PODS, pod(app="ours"), manager="test")


async def test_a_create_is_not_repeated_if_no_name_can_tell_whether_it_was_done() -> None:
    async with FakeKube() as fake, fake.kube(sleep=instantly) as kube:
        fake.lose("create", "pods")

        with pytest.raises(Unreachable) as caught:
            await kube.create(
                PODS, {"metadata": {"generateName": "w-", "namespace": "data"}, "spec": {}}, manager="test"
            )

        assert caught.value.unknown
        assert len(fake.objects(PODS)) == 1


async def test_a_delete_by_uid_may_lose_its_answer() -> None:
    async with FakeKube() as fake, fake.kube(sleep=instantly) as kube:
        uid = fake.put(PODS, pod())["metadata"]["uid"]
        fake.lose("delete", "pods")

        await kube.delete(PODS, "a", "serving", uid=uid)

        assert kube.counts["delete", "pods"] == 2


async def test_a_delete_without_uid_is_not_repeated() -> None:
    async with FakeKube() as fake, fake.kube(sleep=instantly) as kube:
        fake.put(PODS, pod())
        fake.lose("delete", "pods")

        with pytest.raises(Unreachable):
            await kube.delete(PODS, "a", "serving")

        assert kube.counts["delete", "pods"] == 1


async def test_a_lost_merge_is_sent_again_but_not_one_with_a_precondition() -> None:
    async with FakeKube() as fake, fake.kube(sleep=instantly) as kube:
        version = fake.put(PODS, pod())["metadata"]["resourceVersion"]
        fake.lose("merge", "pods")
        await kube.merge(PODS, "a", {"metadata": {"labels": {"x": "1"}}}, "serving", manager="test")
        fake.drop("merge", "pods")

        with pytest.raises(Unreachable):
            await kube.merge(PODS, "a", {"metadata": {"resourceVersion": version}}, "serving", manager="test")

        assert kube.counts["merge", "pods"] == 3


async def test_a_replace_of_an_old_version_is_a_conflict_and_is_never_sent_twice() -> None:
    async with FakeKube() as fake, fake.kube(sleep=instantly) as kube:
        old = fake.put(PODS, pod())
        fake.update(PODS, "a", {"metadata": {"labels": {"x": "1"}}}, "serving")

        with pytest.raises(Conflict, match="the object has been modified"):
            await kube.replace(PODS, old, manager="test")
        fake.lose("replace", "pods")
        with pytest.raises(Unreachable):
            await kube.replace(PODS, await kube.get(PODS, "a", "serving"), manager="test")

        assert kube.counts["replace", "pods"] == 2


async def test_what_may_no_longer_write_does_not_try_again() -> None:
    async with FakeKube() as fake, fake.kube(sleep=instantly) as kube:
        allowed = [True, False]

        async def fence(verb: str, resource: Resource, name: str) -> None:
            if not allowed.pop(0):
                raise Forbidden("no longer the leader")

        kube.before_write = fence
        fake.fail("create", "pods", code=429)

        with pytest.raises(Forbidden, match="no longer the leader"):
            await kube.create(PODS, pod(), manager="test")

        assert fake.objects(PODS) == []


async def test_no_server_is_said_as_such_and_surely_did_nothing() -> None:
    async with Kube(Connection("http://127.0.0.1:1"), sleep=instantly, rng=random.Random(1)) as kube:
        with pytest.raises(Unreachable, match=r"get Node n1: no answer from http://127\.0\.0\.1:1") as caught:
            await kube.get(NODES, "n1")

    assert not caught.value.unknown
    assert kube.counts["get", "nodes"] == 5


async def test_a_silent_server_is_given_up_on() -> None:
    async with FakeKube() as fake:
        limits = Limits(silence_s=0.05, tries=2)
        async with fake.kube(limits=limits, sleep=instantly) as kube:
            fake.hang("get", "nodes", times=2)

            with pytest.raises(Unreachable, match=r"[Tt]imeout"):
                await kube.get(NODES, "n1")

            assert kube.counts["get", "nodes"] == 2
