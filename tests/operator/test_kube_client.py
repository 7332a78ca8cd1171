"""The Kubernetes client: verbs, watches and errors that speak."""

import asyncio
import json
from pathlib import Path

import pytest

from slackwater_operator.core import PermanentError, TemporaryError
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.connection import Connection
from slackwater_operator.kube.errors import (
    AlreadyExists,
    Call,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    KubePermanent,
    NotFound,
    Unauthorized,
    Unreachable,
    from_answer,
)
from slackwater_operator.kube.transport import Limits
from slackwater_operator.kube.types import DEPLOYMENTS, NODES, PODS, Object, Resource, custom
from slackwater_operator.testing.kube import FakeKube


def pod(name: str = "a", namespace: str = "serving", **labels: str) -> Object:
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"containers": [{"name": "engine", "resources": {"limits": {"cpu": "0.5"}}}]},
    }


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


async def test_deleting_one_that_was_replaced_says_that_it_is_gone() -> None:
    async with FakeKube() as fake, fake.kube() as kube:
        fake.put(PODS, pod())

        with pytest.raises(NotFound, match=r"delete Pod serving/a: .*Precondition failed"):
            await kube.delete(PODS, "a", "serving", uid="another")

        assert len(fake.objects(PODS)) == 1


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


async def test_an_answer_from_something_else_is_told_as_such() -> None:
    page = b"<html>502 Bad Gateway</html>"

    error = from_answer(Call("get", "Pod a/b"), 502, page)

    assert isinstance(error, Unreachable)
    assert str(error) == "get Pod a/b: <html>502 Bad Gateway</html> (502)"


def test_a_pretended_server_in_a_thread_serves_programs_that_are_not_asynchronous(tmp_path: Path) -> None:
    with FakeKube.in_thread() as fake:
        fake.add_node("n1")
        config = fake.write_kubeconfig(tmp_path / "config", "serving")

        async def read() -> list[Object]:
            async with Kube(Connection.from_kubeconfig(config)) as kube:
                return (await kube.list(NODES))[0]

        found = asyncio.run(read())

    assert [node["metadata"]["name"] for node in found] == ["n1"]


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
