"""Reconciles and memory of the operator with 500 fake nodes of 8 GPUs, 1,000 resources and 5,000 pods.

`make bench NAME=operator_scale` needs the programs of `.setup/controlplane control-plane kwok`.  The operator is the
real process under its own service account; it fills the fleet by itself, and then takes GPUs back, gives them and
fills them again as the traffic of some services swings, all through the measured time.
"""

import asyncio
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from kube_fleet import (
    ACCOUNT,
    MANAGER,
    Pods,
    control_plane,
    each,
    install,
    is_running,
    memory_peak_mb,
    operator,
    operator_kubeconfig,
    pods,
    samples,
    spent_cpu_s,
)
from kube_scale import NUM_POOLS, PRODUCTS, ZONE, Parts, foreign, resources, seats
from run import Row

from slackwater_controlplane.cluster import ControlPlane
from slackwater_controlplane.kwok import Kwok
from slackwater_operator.demo.plan import free_port
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.connection import Connection
from slackwater_operator.kube.types import NAMESPACES, PODS, Object, Resource
from slackwater_operator.resources import names

NODES = int(os.environ.get("SCALE_NODES", "500"))
SERVICES = int(os.environ.get("SCALE_SERVICES", "300"))
RESOURCES = int(os.environ.get("SCALE_RESOURCES", "1000"))
WINDOW_S = float(os.environ.get("SCALE_WINDOW_S", "180"))
GPUS = 8 * NODES
FOREIGN = 2 * NODES
ELSEWHERE = "agents"  # the namespace of what is not ours
PATIENCE_S = 300.0
SETTLE_S = (
    10.0  # without an eviction, and with kwok idle: it goes on for a while with what it saw of thousands of pods,
)
# and a worker that it leaves standing for seconds is given up on, as it should be of a real kubelet
IDLE_RATIO = 0.2  # of a core
SWING_S = 30.0  # the traffic of the services that swing begins anywhere between its least and its most
POLL_S = 0.1  # ticks begin at least so far apart, so that two seldom end between two looks
NICENESS = -10  # of the operator: a real cluster's API server, kubelets and gateways are on other machines
TICK, WRITE = "fleet_reconcile_seconds", "fleet_write_seconds"
EVICTIONS = "fleet_evictions_total"


def say(words: str) -> None:
    sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] {words}\n")


@dataclass(slots=True)
class Ticks:
    """How long each reconcile took, from the operator's own count and sum, looked at faster than they come.

    merged: looks that found several; their sum stands as one, so that no percentile is flattered.
    """

    seconds: list[float] = field(default_factory=list)
    count: int = 0
    merged: int = 0

    async def follow(self, session: aiohttp.ClientSession, url: str) -> None:
        """Until cancelled."""
        only = {"name[]": [f"{TICK}_count", f"{TICK}_sum"]}
        before = await samples(session, url, only)
        while True:
            await asyncio.sleep(POLL_S)
            now = await samples(session, url, only)
            more = round(now[f"{TICK}_count"] - before[f"{TICK}_count"])
            if more:
                self.seconds.append(now[f"{TICK}_sum"] - before[f"{TICK}_sum"])
                self.count += more
                self.merged += more > 1
            before = now

    def quantile(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Measured:
    """One run.  before, after: all of the operator's metrics.   requests: (verb, resource) in the audit log."""

    fill_s: float
    ticks: Ticks
    took_s: float
    cpu_s: float
    peak_mb: float
    before: dict[str, float]
    after: dict[str, float]
    requests: Counter[tuple[str, str]]
    fewest_held: int
    num_pods: int
    num_accepted: int

    def grown(self, prefix: str) -> float:
        """By how much the counters whose names begin so have grown."""
        return sum(value - self.before.get(name, 0.0) for name, value in self.after.items() if name.startswith(prefix))

    def more(self, prefix: str) -> int:
        """The same of what is counted."""
        return round(self.grown(prefix))


class Crew:
    """The names of each job's workers, as their pods come and go."""

    def __init__(self) -> None:
        self._names: dict[str, dict[str, None]] = {}

    def note(self, change: str, pod: Object) -> None:
        metadata = pod["metadata"]
        labels = metadata["labels"]
        if labels[names.LABEL_KIND] != names.POD_CLEANING:
            return
        there = self._names.setdefault(labels[names.LABEL_OWNER], {})
        if change == "DELETED" or not is_running(pod):
            there.pop(metadata["name"], None)
        else:
            there[metadata["name"]] = None

    def of(self, job: str) -> list[str]:
        return [*self._names.get(job, ())]


async def build(kube: Kube, wanted: list[tuple[Resource, Object]], nodes: list[str]) -> None:
    """What is there before the operator."""
    await create_all(kube, wanted)
    await kube.create(NAMESPACES, {"metadata": {"name": ELSEWHERE}}, manager=MANAGER)
    others = (foreign(number, nodes[number % len(nodes)], ELSEWHERE) for number in range(FOREIGN))
    await create_all(kube, ((PODS, pod) for pod in others))
    say(f"{len(wanted)} resources and {FOREIGN} pods of others are there")


async def create_all(kube: Kube, bodies: Iterable[tuple[Resource, Object]]) -> None:
    await each([kube.create(resource, body, manager=MANAGER) for resource, body in bodies])


async def watched(
    cluster: ControlPlane,
    kube: Kube,
    parts: Parts,
    wanted: list[tuple[Resource, Object]],
    held: Pods,
    folder: Path,
    kubelets: int,
) -> Measured:
    """The operator's turn.   kubelets: kwok's process."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    kubeconfig = operator_kubeconfig(cluster, folder)
    async with aiohttp.ClientSession() as session:
        with operator(kubeconfig, folder, "--metrics-port", str(port), niceness=NICENESS) as process:
            began_s = time.monotonic()
            full_s = await held.until(lambda: held.count(is_running) >= GPUS, PATIENCE_S, f"{GPUS} GPUs held")
            say(f"{GPUS} GPUs held after {full_s - began_s:.1f} s, {memory_peak_mb(process.pid):.0f} MB")
            say(f"settled after {await settled(session, url, kubelets):.0f} s more")
            parts.swing()
            await asyncio.sleep(SWING_S)
            position, cpu_s, from_s = cluster.audit_position(), spent_cpu_s(process.pid), time.monotonic()
            before, ticks = await samples(session, url), Ticks()
            following = asyncio.create_task(ticks.follow(session, url))
            counts = []
            while not following.done() and (left_s := from_s + WINDOW_S - time.monotonic()) > 0:
                counts.append(held.count(is_running))
                await asyncio.sleep(min(5.0, left_s))
            following.cancel()
            await asyncio.wait([following])
            if not following.cancelled():
                following.result()
            after, took_s = await samples(session, url), time.monotonic() - from_s
            return Measured(
                fill_s=full_s - began_s,
                ticks=ticks,
                took_s=took_s,
                cpu_s=spent_cpu_s(process.pid) - cpu_s,
                peak_mb=memory_peak_mb(process.pid),
                before=before,
                after=after,
                requests=Counter(
                    (event.verb, event.resource)
                    for event in cluster.audit(position)
                    # A watch is counted when it begins.
                    if event.user == ACCOUNT
                    and event.stage == ("ResponseStarted" if event.verb == "watch" else "ResponseComplete")
                ),
                fewest_held=min(counts),
                num_pods=len((await kube.list(PODS))[0]),
                num_accepted=await accepted(kube, wanted),
            )


async def settled(session: aiohttp.ClientSession, url: str, kubelets: int) -> float:
    """Seconds until it was quiet for SETTLE_S.   kubelets: kwok's process."""
    began_s = quiet_s = time.monotonic()
    total, spent_s = -1.0, spent_cpu_s(kubelets)
    while time.monotonic() - quiet_s < SETTLE_S:
        if time.monotonic() - began_s > PATIENCE_S:
            raise TimeoutError(f"after {PATIENCE_S:.0f} s the fleet is still busy")
        await asyncio.sleep(2.0)
        evicted = sum((await samples(session, url, {"name[]": [EVICTIONS]})).values())
        now_spent_s = spent_cpu_s(kubelets)
        if evicted != total or now_spent_s - spent_s > 2.0 * IDLE_RATIO:
            quiet_s = time.monotonic()
        total, spent_s = evicted, now_spent_s
    return time.monotonic() - began_s


async def accepted(kube: Kube, wanted: list[tuple[Resource, Object]]) -> int:
    """How many of the resources have a status of their newest generation, and were refused by nobody."""
    found = 0
    for resource in {resource for resource, _ in wanted}:
        for obj in (await kube.list(resource))[0]:
            status = obj.get("status") or {}
            is_refused = any(
                (one["type"], one["status"]) == ("Accepted", "False") or one["reason"] == "SpecRefused"
                for one in status.get("conditions", ())
            )
            found += status.get("observedGeneration") == obj["metadata"]["generation"] and not is_refused
    return found


async def play(cluster: ControlPlane, nodes: list[str], folder: Path, kubelets: int) -> Measured:
    connection = Connection.from_kubeconfig(cluster.kubeconfig())
    async with Kube(connection, user_agent="bench") as kube:
        with pods(kube, f"{names.LABEL_KIND} in ({names.POD_CLEANING}, {names.POD_INFERENCE})") as (held, _):
            crew = Crew()
            held.on_change(crew.note)
            async with Parts(SERVICES, crew.of).serving() as parts:
                num_jobs = RESOURCES - SERVICES - len(PRODUCTS) - NUM_POOLS
                wanted = [*resources(parts.url, SERVICES, num_jobs)]
                await build(kube, wanted, nodes)
                return await watched(cluster, kube, parts, wanted, held, folder, kubelets)


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as name, control_plane() as (cluster, programs), Kwok(cluster) as kwok:
        folder = Path(name)
        install(cluster, programs)
        nodes = [
            node
            for place, flavor, count in seats(NODES)
            for node in kwok.add_nodes(
                count, prefix=f"{place}-{flavor}", product=PRODUCTS[flavor], labels={ZONE: place}
            )
        ]
        say(f"{len(nodes)} nodes are there")
        assert kwok.server.pid is not None, "it has just been started"
        try:
            found = asyncio.run(play(cluster, nodes, folder, kwok.server.pid))
        except BaseException:
            sys.stderr.write((folder / "operator.log").read_text()[-4000:])
            raise
    return rows(found)


def share(found: Measured, histogram: str, bound_s: str) -> float:
    """Of what a histogram has seen, how much was within one of its buckets."""
    return found.more(f'{histogram}_bucket{{le="{bound_s}"}}') / max(1, found.more(f"{histogram}_count"))


def rows(found: Measured) -> list[Row]:
    ticks, took_s = found.ticks, found.took_s
    fleet = f"{NODES} kwok nodes x 8 GPUs, all held; {took_s:.0f} s, {found.cpu_s / took_s:.2f} of a core"
    taken = found.more(EVICTIONS)
    total = found.requests.total()
    writes = sum(
        count for (verb, _), count in found.requests.items() if verb in ("create", "patch", "delete", "update")
    )
    most = ", ".join(f"{verb} {what} {count}" for (verb, what), count in found.requests.most_common(5))
    return [
        Row("reconcile_p99_s", ticks.quantile(0.99), "s", note=f"{fleet}; longest {max(ticks.seconds):.3f} s"),
        Row(
            "reconcile_p50_s",
            ticks.quantile(0.5),
            "s",
            note=f"{share(found, TICK, '0.25'):.2%} within 0.25 s by the operator's buckets",
        ),
        Row(
            "writes_mean_s",
            found.grown(f"{WRITE}_sum") / max(1.0, found.grown(f"{WRITE}_count")),
            "s",
            note=f"from a plan until all its writes are answered; {found.more(f'{WRITE}_count')} plans, "
            f"{share(found, WRITE, '0.5'):.1%} within 0.5 s",
        ),
        Row("rss_mb", found.peak_mb, "MB", note=f"the peak, the fill of {found.fill_s:.0f} s included"),
        Row("ticks", ticks.count, "count", note=f"{ticks.merged} times two ended between two looks and count as one"),
        Row("lists_in_steady_state", sum(n for (verb, _), n in found.requests.items() if verb == "list"), "count"),
        Row("requests_per_s", total / took_s, "1/s", note=f"{writes / took_s:.1f} of them writes; {most}"),
        Row("victims", taken, "count", note=f"taken back, {found.more('fleet_reclaims_total')} take-backs"),
        Row("pods", found.num_pods, "count", note=f"at the end; never fewer than {found.fewest_held} GPUs held"),
        Row("resources", found.num_accepted, "count", note="accepted, with a status of their newest generation"),
    ]
