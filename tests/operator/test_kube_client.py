"""The Kubernetes client: verbs, errors that speak, and what is sent twice."""

import asyncio
import json
import random

import pytest

from slackwater_operator.core import PermanentError, TemporaryError
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.connection import Connection
from slackwater_operator.kube.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    KubePermanent,
    NotFound,
    TooManyRequests,
    Unauthorized,
    Unreachable,
)
from slackwater_operator.kube.transport import Limits
from slackwater_operator.kube.types import DEPLOYMENTS, NODES, PODS, Object, Resource, custom
from slackwater_operator.testing.kube import FakeKube
from slackwater_operator.testing.kube_clock import MovedClock


def pod(name: str = "a", namespace: str = "serving", **labels: str) -> Object:
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"containers": [{"name": "engine", "resources": {"limits": {"cpu": "0.5"}}}]},
    }


async def instantly(seconds: float) -> None:
    await asyncio.sleep(0)


async def test_an_object_is_made_read_changed_and_deleted() -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        made = await kube.create(PODS, pod(), manager="test")
        await kube.merge(PODS, "a", {"metadata": {"labels": {"x": "1"}}}, "serving", manager="test")
        status = {"metadata": {"name": "a", "namespace": "serving"}, "status": {"nominatedNodeName": "n1"}}
        await kube.apply(PODS, status, manager="test", subresource="status")
        read = await kube.get(PODS, "a", "serving")
        await kube.delete(PODS, "a", "serving", uid=made["metadata"]["uid"])

        assert read["metadata"]["labels"] == {"x": "1"}
        assert read["status"]["nominatedNodeName"] == "n1"
        assert read["kind"] == "Pod"
        assert fake.objects(PODS) == []
        assert kube.counts == {
            ("create", "pods"): 1,
            ("merge", "pods"): 1,
            ("apply", "pods"): 1,
            ("get", "pods"): 1,
            ("delete", "pods"): 1,
        }


async def test_a_list_follows_its_pages_and_names_the_kind_of_its_items() -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        for number in range(7):
            fake.put(PODS, pod(f"p{number}", app="tts" if number % 2 else "clean"))

        found, version = await kube.list(PODS, "serving", labels="app in (tts, asr)", limit=2)

        assert [one["metadata"]["name"] for one in found] == ["p1", "p3", "p5"]
        assert {one["kind"] for one in found} == {"Pod"}
        assert int(version) == fake.store.version
        assert kube.counts["list", "pods"] == 2


@pytest.mark.parametrize(
    ("code", "reason", "kind", "family"),
    [
        pytest.param(401, "Unauthorized", Unauthorized, PermanentError, id="who-are-you"),
        pytest.param(403, "Forbidden", Forbidden, PermanentError, id="forbidden"),
        pytest.param(404, "NotFound", NotFound, PermanentError, id="not-found"),
        pytest.param(409, "AlreadyExists", AlreadyExists, PermanentError, id="already-exists"),
        pytest.param(409, "Conflict", Conflict, TemporaryError, id="conflict"),
        pytest.param(410, "Expired", Gone, PermanentError, id="gone"),
        pytest.param(400, "BadRequest", KubePermanent, PermanentError, id="other"),
    ],
)
async def test_an_error_says_what_was_tried_on_what_and_what_the_server_said(
    code: int, reason: str, kind: type[Exception], family: type[Exception]
) -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        fake.fail("merge", "pods", code=code, reason=reason, message="no, because")

        with pytest.raises(kind) as caught:
            await kube.merge(PODS, "a", {}, "serving", manager="test")

    assert isinstance(caught.value, family)
    assert str(caught.value) == f"merge Pod serving/a: no, because ({code} {reason})"


async def test_an_invalid_object_is_told_with_its_fields() -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        fake.fail(code=422, reason="Invalid", message="is invalid", causes=(("spec.gpus", "must be positive"),))

        with pytest.raises(Invalid) as caught:
            await kube.create(PODS, pod(), manager="test")

    assert caught.value.causes == ("spec.gpus: must be positive",)


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


async def test_deleting_one_that_was_replaced_says_that_it_is_gone() -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        fake.put(PODS, pod())

        with pytest.raises(NotFound, match=r"delete Pod serving/a: .*Precondition failed"):
            await kube.delete(PODS, "a", "serving", uid="another")

        assert len(fake.objects(PODS)) == 1


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


async def test_applying_less_removes_and_another_managers_field_is_a_conflict() -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        kind = custom("cleaningjobs", "CleaningJob", True)
        at = {"name": "clean", "namespace": "data"}
        await kube.apply(kind, {"metadata": at, "spec": {"maxWorkers": 4, "queue": "x"}}, manager="a")
        await kube.apply(kind, {"metadata": at, "spec": {"maxWorkers": 4}}, manager="a")

        with pytest.raises(Conflict, match="conflict") as caught:
            await kube.apply(kind, {"metadata": at, "spec": {"maxWorkers": 5}}, manager="b", force=False)
        forced = await kube.apply(kind, {"metadata": at, "spec": {"maxWorkers": 5}}, manager="b")

        assert caught.value.causes == ('spec.maxWorkers: conflict with "a"',)
        assert forced["spec"] == {"maxWorkers": 5}


async def test_a_dry_run_changes_nothing_and_passes_no_hook() -> None:
    async with FakeKube() as fake, fake.kube() as kube:

        async def never(verb: str, resource: Resource, name: str) -> None:
            raise AssertionError(verb)

        kube.before_write = never

        tried = await kube.create(PODS, pod(), manager="test", dry_run=True)

        assert tried["metadata"]["name"] == "a"
        assert fake.objects(PODS) == []


async def test_the_hook_before_a_write_can_stop_it() -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        seen: list[tuple[str, str, str]] = []

        async def stop(verb: str, resource: Resource, name: str) -> None:
            seen.append((verb, resource.plural, name))
            if verb == "delete":
                raise RuntimeError("killed here")

        kube.before_write = stop
        await kube.create(PODS, pod(), manager="test")

        with pytest.raises(RuntimeError, match="killed here"):
            await kube.delete(PODS, "a", "serving")

        assert seen == [("create", "pods", "a"), ("delete", "pods", "a")]
        assert len(fake.objects(PODS)) == 1


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


async def test_a_watch_brings_changes_and_ends_quietly() -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        fake.put(PODS, pod("before"))
        _, version = await kube.list(PODS)
        events = []

        async def follow() -> None:
            async for kind, obj in kube.watch(PODS, "serving", labels="app=tts", resource_version=version):
                events.append((kind, obj["metadata"].get("name")))

        task = asyncio.create_task(follow())
        fake.put(PODS, pod("a", app="tts"))
        fake.put(PODS, pod("b", app="tts", namespace="elsewhere"))
        fake.update(PODS, "a", {"metadata": {"labels": {"app": "other"}}}, "serving")
        while not fake.watching:
            await asyncio.sleep(0.001)
        fake.bookmark()
        while len(events) < 3:
            await asyncio.sleep(0.001)
        fake.end_watches()
        await task

        assert events == [("ADDED", "a"), ("DELETED", "a"), ("BOOKMARK", None)]


@pytest.mark.parametrize("as_event", [True, False])
async def test_a_forgotten_version_is_gone(as_event: bool) -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        fake.gone_as_event = as_event
        fake.put(PODS, pod())
        fake.compact()
        fake.put(PODS, pod("b"))

        with pytest.raises(Gone, match="watch Pod"):
            async for _ in kube.watch(PODS, resource_version="1000"):
                pass


@pytest.mark.parametrize("cut", [1, 50, 200, 700])
async def test_a_watch_that_breaks_says_so_and_brings_only_whole_events(cut: int) -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        fake.cut("pods", after_bytes=cut)
        fake.put(PODS, pod("a"))
        fake.put(PODS, pod("b"))
        names = []

        async def follow() -> None:
            async for _, obj in kube.watch(PODS, resource_version="1000"):
                names.append(obj["metadata"]["name"])

        with pytest.raises(Unreachable, match="watch Pod"):
            await follow()

        assert names in ([], ["a"])


async def test_a_silent_watch_is_a_dead_one() -> None:
    async with FakeKube() as fake, fake.kube(limits=Limits(watch_silence_s=0.05)) as kube:
        with pytest.raises(Unreachable, match="watch Deployment"):
            async for _ in kube.watch(DEPLOYMENTS, resource_version="1000"):
                pass


async def test_raw_requests_and_logs() -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        fake.put(PODS, pod())
        fake.logs["serving", "a"] = "hello"

        log = await kube.raw("GET", PODS.path("serving", "a", "log"), params={"container": "engine"})

        assert log == b"hello"
        assert b"v1.36" in await kube.raw("GET", "/version")


async def test_the_pretended_server_can_be_asked_for_its_kinds() -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        groups = json.loads(await kube.raw("GET", "/apis"))["groups"]
        ours = json.loads(await kube.raw("GET", "/apis/slackwater.dev/v1alpha1"))["resources"]

        assert "slackwater.dev" in [group["name"] for group in groups]
        assert {one["name"]: one["shortNames"] for one in ours if one.get("shortNames")}["cleaningjobs"] == ["clj"]
        with pytest.raises(NotFound):
            await kube.raw("GET", "/apis/slackwater.dev/v2")
