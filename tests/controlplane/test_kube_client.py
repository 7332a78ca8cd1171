"""The client on a real API server: what the pretended one cannot show."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from slackwater_controlplane.cluster import ControlPlane
from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.connection import Connection
from slackwater_operator.kube.election import Elector
from slackwater_operator.kube.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    KubePermanent,
    NotFound,
    Unauthorized,
    Unreachable,
)
from slackwater_operator.kube.events import Recorder
from slackwater_operator.kube.transport import Limits
from slackwater_operator.kube.trim import only
from slackwater_operator.kube.types import (
    CONFIG_MAPS,
    EVENTS,
    LEASES,
    NAMESPACES,
    NODES,
    PODS,
    SERVICE_ACCOUNTS,
    Object,
)

ME = "test"


@pytest.fixture
async def kube(control_plane: ControlPlane) -> AsyncIterator[Kube]:
    async with Kube(Connection.from_kubeconfig(control_plane.kubeconfig())) as kube:
        yield kube


def pod(name: str, namespace: str, **labels: str) -> Object:
    container = {"name": "worker", "image": "worker:1", "resources": {"requests": {"cpu": "0.5", "memory": "1Gi"}}}
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"schedulerName": "nobody", "nodeName": "no-such-node", "containers": [container]},
    }


async def until(holds: Callable[[], object], timeout_s: float = 20.0) -> float:
    """The seconds until it held."""
    began_s = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.01)
    return time.monotonic() - began_s


@asynccontextmanager
async def running(cache: Cache) -> AsyncIterator[Cache]:
    task = asyncio.create_task(cache.run())
    try:
        await asyncio.wait_for(cache.synced.wait(), 20)
        yield cache
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_every_verb_and_every_refusal(kube: Kube, namespace: str) -> None:
    at = {"name": "a", "namespace": namespace}
    made = await kube.create(CONFIG_MAPS, {"metadata": at, "data": {"x": "1"}}, manager=ME)
    with pytest.raises(AlreadyExists, match=f"create ConfigMap {namespace}/a: "):
        await kube.create(CONFIG_MAPS, {"metadata": at}, manager=ME)
    changed = await kube.merge(CONFIG_MAPS, "a", {"data": {"y": "2"}}, namespace, manager=ME)
    with pytest.raises(Conflict, match="the object has been modified"):
        await kube.replace(CONFIG_MAPS, made, manager=ME)
    await kube.replace(CONFIG_MAPS, {**changed, "data": {"z": "3"}}, manager=ME)
    with pytest.raises(Conflict) as clash:
        await kube.apply(CONFIG_MAPS, {"metadata": at, "data": {"z": "4"}}, manager="other", force=False)
    applied = await kube.apply(CONFIG_MAPS, {"metadata": at, "data": {"z": "4", "w": "5"}}, manager="other")
    less = await kube.apply(CONFIG_MAPS, {"metadata": at, "data": {"w": "5"}}, manager="other")
    with pytest.raises(NotFound, match="UID in the precondition"):
        await kube.delete(CONFIG_MAPS, "a", namespace, uid="11111111-1111-1111-1111-111111111111")
    await kube.delete(CONFIG_MAPS, "a", namespace, uid=made["metadata"]["uid"])
    with pytest.raises(NotFound, match=f"get ConfigMap {namespace}/a: "):
        await kube.get(CONFIG_MAPS, "a", namespace)
    with pytest.raises(NotFound):
        await kube.delete(CONFIG_MAPS, "a", namespace)

    assert clash.value.causes[0].startswith(".data.z: conflict with")
    assert applied["data"] == {"z": "4", "w": "5"}
    assert less["data"] == {"w": "5"}


async def test_an_invalid_pod_names_its_fields(kube: Kube, namespace: str) -> None:
    broken = pod("a", namespace)
    broken["spec"]["containers"][0]["name"] = "No Name"

    with pytest.raises(Invalid) as caught:
        await kube.create(PODS, broken, manager=ME, dry_run=True)

    assert [cause.split(":")[0] for cause in caught.value.causes] == ["spec.containers[0].name"]


async def test_a_misspelt_field_of_a_new_pod_is_named_and_not_dropped(kube: Kube, namespace: str) -> None:
    broken = pod("a", namespace)
    broken["spec"]["containers"][0]["imagePullPolice"] = "Always"

    with pytest.raises(KubePermanent, match=r"unknown field \"spec.containers\[0\].imagePullPolice\""):
        await kube.create(PODS, broken, manager=ME)

    with pytest.raises(NotFound):
        await kube.get(PODS, "a", namespace)


async def test_a_lost_answer_is_recognised_although_the_server_writes_quantities_its_way(
    kube: Kube, namespace: str
) -> None:
    tried = []
    send = kube._transport.send

    async def lossy(call, *args, **options):  # type: ignore[no-untyped-def]
        answer = await send(call, *args, **options)
        if call.verb == "create" and not tried:
            tried.append(call)
            raise Unreachable("the connection broke")
        return answer

    kube._transport.send = lossy  # type: ignore[method-assign]
    made = await kube.create(PODS, pod("a", namespace, app="x"), manager=ME)

    assert made["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "500m"
    with pytest.raises(AlreadyExists):
        await kube.create(PODS, pod("a", namespace, app="y"), manager=ME)


async def test_a_pods_service_account_and_what_it_may_not_do(
    kube: Kube, control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    wanted = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    path = SERVICE_ACCOUNTS.path(namespace, "default", "token")
    answer = json.loads(await kube.raw("POST", path, body=json.dumps(wanted).encode()))
    (tmp_path / "token").write_text(answer["status"]["token"])
    (tmp_path / "ca.crt").write_bytes(control_plane.ca_file.read_bytes())
    host, port = control_plane.url.removeprefix("https://").split(":")
    inside = Connection.in_cluster({"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}, tmp_path)

    async with Kube(inside) as account:
        assert b"gitVersion" in await account.raw("GET", "/version")
        with pytest.raises(Forbidden, match=f"list Pod {namespace}/\\*: .*system:serviceaccount:{namespace}:default"):
            await account.list(PODS, namespace)
        (tmp_path / "token").write_text("wrong")
        account.connection.credentials.renew()
        with pytest.raises(Unauthorized):
            await account.raw("GET", "/version")


async def test_many_writes_at_once_and_a_cache_that_keeps_up(kube: Kube, namespace: str) -> None:
    count = 600
    async with running(Cache(kube, PODS, namespace=namespace)) as cache:
        room = asyncio.Semaphore(64)

        async def make(number: int) -> None:
            async with room:
                await kube.create(PODS, pod(f"p{number}", namespace, app="x"), manager=ME)

        await asyncio.gather(*(make(number) for number in range(count)))
        await until(lambda: len(cache) == count)

        assert cache.lists == 1

    seen = 0
    watch = kube.watch(PODS, namespace, resource_version="0")
    async for kind, _ in watch:
        seen += kind == "ADDED"
        if seen == count:
            break
    await watch.aclose()

    assert seen == count


async def test_a_cache_stays_right_through_a_killed_and_a_paused_server(fresh_control_plane: ControlPlane) -> None:
    limits = Limits(watch_silence_s=70.0, tries=2)
    async with Kube(Connection.from_kubeconfig(fresh_control_plane.kubeconfig()), limits=limits) as kube:
        keep = only("data")
        async with running(Cache(kube, CONFIG_MAPS, namespace="default", keep=keep, rng=random.Random(1))) as cache:
            await until(lambda: cache.watches)
            before = cache.lists
            _, old = await kube.list(NAMESPACES)
            fresh_control_plane.pause("kube-apiserver")
            await asyncio.sleep(1.0)
            stalled_s = cache.stalled_s(time.monotonic())
            fresh_control_plane.resume("kube-apiserver")
            await kube.create(CONFIG_MAPS, {"metadata": {"name": "a", "namespace": "default"}}, manager=ME)
            await until(lambda: ("default", "a") in cache)
            fresh_control_plane.kill("kube-apiserver")
            await asyncio.to_thread(fresh_control_plane.start_server, "kube-apiserver")
            body = {"metadata": {"name": "b", "namespace": "default"}, "data": {"x": "1"}}
            made = await kube.create(CONFIG_MAPS, body, manager=ME)
            with pytest.raises(Gone):  # a new server does not know the versions before its start
                await anext(kube.watch(NAMESPACES, resource_version=old))
            await kube.delete(CONFIG_MAPS, "a", "default")
            cache.remember(made)
            await until(lambda: ("default", "b") in cache and ("default", "a") not in cache)

            assert stalled_s >= 0.9
            assert before == 1
            assert cache.lists <= 2
            found = cache.get("default", "b")
            assert found is not None
            assert found["data"] == {"x": "1"}


async def test_one_leader_follows_another_within_ten_seconds(kube: Kube, namespace: str) -> None:
    leads: list[str] = []

    def candidate(name: str) -> tuple[Elector, asyncio.Task[None]]:
        elector = Elector(kube, namespace, "lease", name)

        async def lead() -> None:
            leads.append(name)
            try:
                await asyncio.Event().wait()
            finally:
                leads.remove(name)

        return elector, asyncio.create_task(elector.run(lead))

    a, first = candidate("a")
    await until(lambda: leads == ["a"])
    b, second = candidate("b")
    await asyncio.sleep(2.0)
    first.cancel()
    handed_s = await until(lambda: leads == ["b"])
    _, third = candidate("c")
    await asyncio.sleep(1.5)

    async def vanish() -> None:
        """No release: as if the process had been killed."""

    b._release = vanish  # type: ignore[method-assign]
    second.cancel()
    followed_s = await until(lambda: leads == ["c"])
    third.cancel()
    await asyncio.gather(first, second, third, return_exceptions=True)
    lease = await kube.get(LEASES, "lease", namespace)

    assert handed_s < 2.5
    assert 5.5 <= followed_s <= 10.0
    assert lease["spec"]["leaseTransitions"] == 2
    assert not a.is_leader


async def test_events_are_accepted_and_counted(kube: Kube, namespace: str) -> None:
    recorder = Recorder(kube, "slackwater.dev/operator", instance="pod-1")
    task = asyncio.create_task(recorder.run())
    owner = await kube.create(CONFIG_MAPS, {"metadata": {"name": "a", "namespace": namespace}}, manager=ME)
    node = await kube.create(NODES, {"metadata": {"name": f"node-{namespace}"}}, manager=ME)

    for number in range(3):
        recorder.emit(owner, "Warning", "ReclaimDeadlineExceeded", "pod w-1 hangs", "Reclaim")
        recorder.emit(node, "Normal", "Broken", f"GPU {number} is gone", "Observe")
        await asyncio.sleep(0.2)
    async with asyncio.timeout(10):
        events: list[Object] = []
        while [event.get("series", {}).get("count") for event in events] != [3]:
            await asyncio.sleep(0.1)
            events, _ = await kube.list(EVENTS, namespace)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    others, _ = await kube.list(EVENTS, "default", fields=f"regarding.name=node-{namespace}")
    await kube.delete(NODES, f"node-{namespace}")

    assert recorder.dropped == 0
    assert [(event["reason"], event["series"]["count"]) for event in events] == [("ReclaimDeadlineExceeded", 3)]
    assert [event["reason"] for event in others].count("Broken") == 3  # the node controller has something to say, too
