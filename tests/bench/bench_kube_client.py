"""What the operator's API client does in a second on a real API server, and what 5,000 pods cost in memory."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from run import Row

from slackwater_controlplane.build import Programs, cache_folder
from slackwater_controlplane.fixtures import new_control_plane
from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.connection import Connection
from slackwater_operator.kube.trim import Keep, lean, only
from slackwater_operator.kube.types import NAMESPACES, PODS, Object

PODS_MADE = 5000
PARALLEL = 64
SPACE = "bench"


def measure() -> list[Row]:
    cache = cache_folder(os.environ)
    with new_control_plane(Programs(cache, os.environ), cache) as cluster:
        config = cluster.kubeconfig()
        rows = asyncio.run(_write_and_watch(config))
        return [*rows, _memory(config, "lean"), _memory(config, "only")]


async def _write_and_watch(config: Path) -> list[Row]:
    async with Kube(Connection.from_kubeconfig(config)) as kube:
        await kube.create(NAMESPACES, {"metadata": {"name": SPACE}}, manager="bench")
        await asyncio.sleep(3)  # for its service account
        room = asyncio.Semaphore(PARALLEL)

        async def make(number: int) -> None:
            async with room:
                await kube.create(PODS, _pod(number), manager="bench")

        began_s, cpu_s = time.monotonic(), time.process_time()
        await asyncio.gather(*(make(number) for number in range(PODS_MADE)))
        creates_s, creates_cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
        began_s, cpu_s = time.monotonic(), time.process_time()
        seen = 0
        async for kind, _ in kube.watch(PODS, SPACE, resource_version="0"):
            seen += kind == "ADDED"
            if seen == PODS_MADE:
                break
        watch_s, watch_cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    peer_s = await asyncio.to_thread(_official_watch, config)
    return [
        Row("creates_per_s", PODS_MADE / creates_s, "1/s", note=f"{PARALLEL} in parallel"),
        Row("create_cpu", 1e6 * creates_cpu_s / PODS_MADE, "us", note="of the client"),
        Row(
            "watch_events_per_s",
            PODS_MADE / watch_s,
            "1/s",
            peer="kubernetes.watch.Watch",
            peer_value=PODS_MADE / peer_s,
            note="pods that were there before",
        ),
        Row("watch_event_cpu", 1e6 * watch_cpu_s / PODS_MADE, "us", note="of the client"),
    ]


def _pod(number: int) -> Object:
    container = {"name": "worker", "image": "worker:1", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    return {
        "metadata": {"name": f"p{number:05}", "namespace": SPACE, "labels": {"app": "bench"}},
        "spec": {"nodeName": f"n{number % 500}", "schedulerName": "nobody", "containers": [container]},
    }


def _official_watch(config: Path) -> float:
    """Seconds that the official client takes for the same events."""
    from kubernetes import client, watch
    from kubernetes import config as configs

    api: Any = client.CoreV1Api(configs.new_client_from_config(str(config)))
    began_s = time.monotonic()
    stream = watch.Watch()
    for seen, _ in enumerate(stream.stream(api.list_namespaced_pod, SPACE, resource_version="0"), 1):
        if seen == PODS_MADE:
            stream.stop()
    return time.monotonic() - began_s


def _memory(config: Path, keep: str) -> Row:
    """What a process with a cache of all pods holds, measured in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "cache.py")
        script.write_text(f"import sys; sys.path[:0] = {sys.path!r}\nimport bench_kube_client as b\nb.hold({keep!r})\n")
        out = subprocess.run(
            [sys.executable, str(script), str(config)], capture_output=True, text=True, check=True, timeout=300
        ).stdout
    return Row(f"rss_{PODS_MADE}_pods_{keep}", float(out), "MB", note="of the whole process, after its first list")


def hold(keep: str) -> None:
    """The body of that process: prints its resident megabytes."""
    keeps: dict[str, Keep] = {
        "lean": lean,
        "only": only("spec.nodeName", "spec.priorityClassName", "spec.containers.resources", "status.phase"),
    }
    sys.stdout.write(str(asyncio.run(_hold(Path(sys.argv[1]), keeps[keep]))))


async def _hold(config: Path, keep: Keep) -> float:
    async with Kube(Connection.from_kubeconfig(config)) as kube:
        cache = Cache(kube, PODS, namespace=SPACE, keep=keep)
        task = asyncio.create_task(cache.run())
        await cache.synced.wait()
        found: float = psutil.Process().memory_info().rss / 2**20
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return found
