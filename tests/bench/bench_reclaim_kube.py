"""GPUs taken back from cleaning, by us and by kube-scheduler's own preemption, on 500 fake nodes with 8 GPUs each.

`make bench NAME=reclaim_kube` needs the programs of `.setup/controlplane control-plane kwok`.  Both sides have one
control plane, one fleet and workers that end at once; everything past the decision is the API server's and kwok's.
The need is a write to the API on both sides: the scale of a service here, pods of a high priority there.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kube_fleet import (
    DATA,
    JOBS,
    MANAGER,
    RECEIPT,
    RECLAIMS,
    SERVICES,
    SERVING,
    Pods,
    StandIn,
    add_fleet,
    control_plane,
    each,
    flavor_and_pool,
    install,
    is_bound,
    is_leaving,
    is_running,
    job,
    operator,
    operator_kubeconfig,
    pods,
    service,
)
from run import Row

from slackwater_controlplane import stages
from slackwater_controlplane.cluster import ControlPlane
from slackwater_controlplane.kwok import Kwok
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.connection import Connection
from slackwater_operator.kube.types import PODS, PRIORITY_CLASSES, Object

NODES = int(os.environ.get("RECLAIM_NODES", "500"))
GPUS = 8 * NODES
ROUNDS = int(os.environ.get("RECLAIM_ROUNDS", "5"))
SIZES = tuple(size for size in (1, 32, 256) if size <= GPUS // 2)
PEER = "kube-scheduler's PriorityClasses"
PATIENCE_S = 600.0
SETTLE_S = 3.0  # for the API server's own work after a round
FILLED_S = 25.0  # kwok goes on for a while with what it saw of thousands of pods


@dataclass(frozen=True, slots=True)
class Taken:
    """One side's rounds.  seconds: need known to all bound, by size.   too_many: victims beyond the need, in all."""

    fill_s: float
    seconds: dict[int, list[float]]
    too_many: int


def say(words: str) -> None:
    sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] {words}\n")


class Victims:
    """Names of the workers that were told to leave."""

    def __init__(self) -> None:
        self.gone: set[str] = set()

    def note(self, _change: str, pod: Object) -> None:
        if is_leaving(pod):
            self.gone.add(pod["metadata"]["name"])


async def ours(kube: Kube, stand_in: StandIn) -> tuple[Taken, list[Object]]:
    """The operator's turn; also the records that it left."""
    receipt = json.dumps(RECEIPT | {"unit": "u1", "worker": "w", "items": 1, "audio_s": 1.0})
    with (
        pods(kube, "slackwater.dev/kind=cleaning") as (workers, _),
        pods(kube, "slackwater.dev/kind=inference") as (
            replicas,
            _,
        ),
    ):
        victims = Victims()
        workers.on_change(victims.note)
        running = workers.counting(is_running)
        began_s = time.monotonic()
        await kube.create(JOBS, job("clean", stand_in.url, GPUS, {stages.MESSAGE: receipt}), manager=MANAGER)
        fill_s = await full(workers, running) - began_s
        say(f"ours: {GPUS} GPUs filled in {fill_s:.1f} s")
        await asyncio.sleep(FILLED_S)
        seconds: dict[int, list[float]] = {size: [] for size in SIZES}
        too_many = 0
        for number in range(ROUNDS):
            for size in SIZES:
                name = f"tts-{number}-{size}"
                await kube.create(SERVICES, service(name, stand_in.url, 2 * size), manager=MANAGER)
                await asyncio.sleep(SETTLE_S)
                before = len(victims.gone)
                asked_s = time.monotonic()  # a floor, not traffic: that would be answered with headroom on top
                scale = {"spec": {"replicas": size}}
                await kube.merge(SERVICES, name, scale, SERVING, subresource="scale", manager=MANAGER)
                bound_s = await replicas.until(
                    lambda size=size: replicas.count(is_bound) >= size, PATIENCE_S, f"{size} replicas bound"
                )
                seconds[size].append(bound_s - asked_s)
                await asyncio.sleep(1.0)
                too_many += len(victims.gone) - before - size
                say(f"ours: {size} GPUs in {seconds[size][-1]:.3f} s, {len(victims.gone) - before} victims")
                await kube.delete(SERVICES, name, SERVING)
                await replicas.until(lambda: replicas.count(lambda _: True) == 0, PATIENCE_S, "no replicas left")
                await full(workers, running)
        records, _ = await kube.list(RECLAIMS)
        await kube.delete(JOBS, "clean", DATA)
        await workers.until(lambda: workers.count(lambda _: True) == 0, PATIENCE_S, "no workers left")
    return Taken(fill_s, seconds, too_many), records


async def full(workers: Pods, running: Callable[[], int]) -> float:
    return await workers.until(lambda: running() >= GPUS, PATIENCE_S, f"{GPUS} workers running")


async def peer(kube: Kube) -> Taken:
    """kube-scheduler's turn: the same need as pods of a high priority among pods of a low one."""
    for name, value in (("peer-high", 1_000_000), ("peer-low", -1_000)):
        body = {"metadata": {"name": name}, "value": value, "globalDefault": False}
        await kube.create(PRIORITY_CLASSES, body, manager=MANAGER)
    with pods(kube, "bench/role=low") as (low, _), pods(kube, "bench/role=high") as (high, _):
        victims = Victims()
        low.on_change(victims.note)
        running = low.counting(is_running)
        began_s = time.monotonic()
        await create(kube, "low", "fill", GPUS)
        fill_s = await full(low, running) - began_s
        say(f"peer: {GPUS} GPUs filled in {fill_s:.1f} s")
        await asyncio.sleep(FILLED_S)
        seconds: dict[int, list[float]] = {size: [] for size in SIZES}
        too_many = 0
        for number in range(ROUNDS):
            for size in SIZES:
                await asyncio.sleep(SETTLE_S)
                before = len(victims.gone)
                asked_s = time.monotonic()
                await create(kube, "high", f"r{number}-{size}", size)
                bound_s = await high.until(
                    lambda size=size: high.count(is_bound) >= size, PATIENCE_S, f"{size} pods bound"
                )
                seconds[size].append(bound_s - asked_s)
                await asyncio.sleep(1.0)
                taken = len(victims.gone) - before
                too_many += taken - size
                say(f"peer: {size} GPUs in {seconds[size][-1]:.3f} s, {taken} victims")
                await each([kube.delete(PODS, f"high-r{number}-{size}-{n}", SERVING, grace_s=0) for n in range(size)])
                await high.until(lambda: high.count(lambda _: True) == 0, PATIENCE_S, "no pods left")
                await create(kube, "low", f"again{number}-{size}", taken)
                await full(low, running)
    return Taken(fill_s, seconds, too_many)


async def create(kube: Kube, role: str, name: str, count: int) -> None:
    await each([kube.create(PODS, pod(role, f"{role}-{name}-{n}"), manager=MANAGER) for n in range(count)])


def pod(role: str, name: str) -> Object:
    """As restricted as ours are, so that both cost the API server the same."""
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
    container = {
        "name": "main",
        "image": "main:1",
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "securityContext": security,
    }
    identity = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    return {
        "metadata": {"name": name, "namespace": SERVING, "labels": {"bench/role": role}},
        "spec": {
            "priorityClassName": f"peer-{role}",
            "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
            "terminationGracePeriodSeconds": 20,
            "automountServiceAccountToken": False,
            "securityContext": identity,
            "containers": [container],
        },
    }


async def play(cluster: ControlPlane, folder: Path) -> tuple[Taken, Taken, list[Object]]:
    connection = Connection.from_kubeconfig(cluster.kubeconfig())
    async with Kube(connection, user_agent="bench") as kube, StandIn().serving() as stand_in:
        for resource, body in flavor_and_pool():
            await kube.create(resource, body, manager=MANAGER)
        with operator(operator_kubeconfig(cluster, folder), folder):
            mine, records = await ours(kube, stand_in)
        theirs = await peer(kube)
    return mine, theirs, records


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as name, control_plane() as (cluster, programs), Kwok(cluster) as kwok:
        folder = Path(name)
        install(cluster, programs)
        add_fleet(kwok, NODES)
        say(f"{NODES} nodes are there")
        try:
            mine, theirs, records = asyncio.run(play(cluster, folder))
        except BaseException:
            sys.stderr.write((folder / "operator.log").read_text()[-4000:])
            raise
    fleet = f"{NODES} kwok nodes x 8 GPUs, all held by cleaning; median of {ROUNDS}"
    rows = []
    for size in SIZES:
        middle, other = (statistics.median(side.seconds[size]) for side in (mine, theirs))
        note = f"{fleet}; slowest {max(mine.seconds[size]):.3f} s, peer {max(theirs.seconds[size]):.3f} s"
        rows.append(Row(f"reclaim_{size}_s", middle, "s", PEER, other, note))
    verified = sum(
        victim.get("outcome") == "Checkpointed" for record in records for victim in record["status"].get("victims", [])
    )
    gone = sum(len(record["spec"].get("victims", [])) for record in records)
    return [
        *rows,
        Row("victims_too_many", mine.too_many, "count", PEER, theirs.too_many, f"of all rounds, {gone} victims"),
        Row(f"fill_{GPUS}_s", mine.fill_s, "s", PEER, theirs.fill_s, "first to last worker running"),
        Row("records", len(records), "count", PEER, 0, "a Reclaim for each, with victims, timings and outcomes"),
        Row("victims_recorded", gone, "count", PEER, 0, "in those that are still kept"),
        Row("checkpoints_acknowledged", verified, "count", PEER, 0, "read back from the keeper, here a stand-in"),
    ]
