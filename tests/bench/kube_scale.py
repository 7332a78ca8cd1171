"""A large installation on fake nodes: flavors, pools, services and jobs by the hundred, and what their parts would say.

Owns the resources of the scale bench and one stand-in that answers as every service's gateway and every job's keeper,
each below a path of its own.  The traffic is made up here: most services have a steady one, some swing.
"""

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from kube_fleet import DATA, FLAVORS, JOBS, POOLS, RECEIPT, SERVICES, SERVING, listening, ours

from slackwater_controlplane import stages
from slackwater_operator.kube.types import Object, Resource

ZONE = "topology.kubernetes.io/region"
PRODUCT = "nvidia.com/gpu.product"
PRODUCTS = {
    "h200": "NVIDIA-H200",
    "b200": "NVIDIA-B200",
    "rtxpro6000": "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
    "rtx5090": "NVIDIA-GeForce-RTX-5090",
}
NUM_POOLS = 8
SLOTS = 4  # requests that one replica decodes at once
REQUEST_S = 10.0  # how long one is decoded
SWINGING = 10  # one service in so many swings
DURABLE_S = 10.0  # between two durable points of a worker
LOOK_S = 0.25  # how soon a gateway sees that requests wait


def pool(number: int) -> str:
    """A data centre."""
    return f"dc-{number % NUM_POOLS}"


def seats(num_nodes: int) -> Iterator[tuple[str, str, int]]:
    """(pool, flavor, number of nodes): every pool has some of every flavor."""
    kinds = [(pool(number), flavor) for number in range(NUM_POOLS) for flavor in PRODUCTS]
    least, more = divmod(num_nodes, len(kinds))
    for place, (name, flavor) in enumerate(kinds):
        if count := least + (place < more):
            yield name, flavor, count


def resources(gateway: str, num_services: int, num_jobs: int) -> Iterator[tuple[Resource, Object]]:
    """All of them, in the order to create them.  gateway: the stand-in's address."""
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    for name, product in PRODUCTS.items():
        yield FLAVORS, ours("GPUFlavor", name, {"nodeSelector": {PRODUCT: product}, "tolerations": tolerations})
    for number in range(NUM_POOLS):
        spec = {
            "nodeSelector": {ZONE: pool(number)},
            "flavors": [{"name": name} for name in PRODUCTS],
            "lending": {"lendAfter": "2s"},
            "queues": [{"name": "asr-clean", "weight": 3}, {"name": "dedup"}],
        }
        yield POOLS, ours("CapacityPool", pool(number), spec)
    for number in range(num_services):
        yield SERVICES, service(number, gateway)
    for number in range(num_jobs):
        yield JOBS, job(number, gateway)


def service(number: int, gateway: str) -> Object:
    """A service of two data centres on two GPU types."""
    kinds = [*PRODUCTS]
    name = service_name(number)
    pod = _pod("engine", 64, ["engine", "serve", "/models/s2-pro", "--slots", str(SLOTS)])
    pod["volumes"].append({"name": "models", "persistentVolumeClaim": {"claimName": "models"}})
    pod["containers"][0]["volumeMounts"].append({"name": "models", "mountPath": "/models", "readOnly": True})
    spec = {
        "model": "s2-pro",
        "pools": [pool(number), pool(number + 1)],
        "minReplicas": 1,
        "maxReplicas": 16,
        "variants": [
            {"flavor": kinds[number % 4], "slotsPerReplica": SLOTS, "preference": 2},
            {"flavor": kinds[(number + 1) % 4], "slotsPerReplica": SLOTS, "preference": 1},
        ],
        "gateway": {"controlURL": f"{gateway}/gateways/{name}"},
        "autoscaling": {"scaleDown": {"window": "15s", "deadband": 0}, "stableWindow": "20s"},
        "template": {"metadata": {"labels": {"team": f"team-{number % 20}"}}, "spec": pod},
    }
    return ours("InferenceDeployment", name, spec, SERVING)


def job(number: int, keeper: str) -> Object:
    """A job with a ledger, of two data centres, whose workers may run on any GPU type."""
    kinds = [*PRODUCTS]
    name = f"clean-{number}"
    pod = _pod("worker", 12, ["clean", "run", "/input", "--ledger", "/ledger"])
    # What kwok says for a worker that is told to leave.
    receipt = RECEIPT | {"unit": "u1", "worker": "w", "items": 1, "audio_s": 1.0}
    notes = {stages.MESSAGE: web.json_response(receipt).text}
    spec = {
        "pools": [pool(number), pool(number + 3)],
        "flavors": kinds[number % 4 :] + kinds[: number % 4],
        "maxWorkers": 40,
        "ledger": {"claimName": f"{name}-ledger"},
        "input": {"claimName": "recordings"},
        "keeper": {"url": f"{keeper}/keepers/{name}"},
        "template": {"metadata": {"annotations": notes}, "spec": pod},
    }
    if number % 3:
        spec["queue"] = ("asr-clean", "dedup")[number % 2]
    return ours("CleaningJob", name, spec, DATA)


def foreign(number: int, node: str, namespace: str) -> Object:
    """A pod of somebody else that wants no GPU, as each node has some."""
    pod = _pod("agent", 30, ["agent", "--node", node])
    pod |= {"nodeName": node, "tolerations": [{"operator": "Exists"}]}
    return {"metadata": {"name": f"agent-{number}", "namespace": namespace, "labels": {"app": "agent"}}, "spec": pod}


def service_name(number: int) -> str:
    return f"tts-{number}"


def _pod(name: str, grace_s: int, command: list[str]) -> Object:
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
    container = {
        "name": name,
        "image": f"slackwater/{name}:0.1.0",
        "args": command,
        "env": [{"name": f"SETTING_{number}", "value": f"value-{number}"} for number in range(6)],
        "resources": {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "8Gi"}},
        "securityContext": security,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    return {
        "terminationGracePeriodSeconds": grace_s,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }


@dataclass(slots=True)
class Stream:
    """The requests of one service.  slots: asked for at once, the least; swing: more at the height of each period."""

    slots: float
    swing: float
    period_s: float
    phase_s: float
    capacity: dict[str, int] = field(default_factory=dict)  # replica -> its slots
    arrivals: float = 0.0
    backlogs: int = 0
    waits: bool = False
    at_s: float = 0.0
    wanted: int = 0

    def move(self, now_s: float, swung_s: float | None) -> None:
        """On to this moment.  swung_s: for how long the swinging goes on; None = not yet."""
        phase = 0.0 if swung_s is None else (swung_s / self.period_s + self.phase_s) % 1.0
        wanted = self.slots if swung_s is None else self.slots + self.swing * (1 - math.cos(2 * math.pi * phase)) / 2
        more = max(0.0, round(wanted) - self.wanted) if self.at_s else wanted
        self.arrivals += more + self.wanted * (now_s - (self.at_s or now_s)) / REQUEST_S
        self.at_s, self.wanted = now_s, round(wanted)
        waits = self.wanted > sum(self.capacity.values())
        self.backlogs += waits and not self.waits
        self.waits = waits

    def words(self, boot: str) -> Object:
        """As a gateway says it."""
        left = min(self.wanted, sum(self.capacity.values()))
        queued, replicas = self.wanted - left, dict[str, int]()
        for position, (uid, slots) in enumerate(self.capacity.items()):
            share = min(slots, math.ceil(left / (len(self.capacity) - position)))
            replicas[uid], left = share, left - share
        return {
            "in_flight": self.wanted - queued,
            "queued": queued,
            "arrivals_total": int(self.arrivals),
            "rejected_total": 0,
            "failed_total": 0,
            "oldest_queued_s": 0.0,
            "first_audio_p95_s": 0.18,
            "replicas": replicas,
            "backlogs": self.backlogs,
            "boot": boot,
        }


class Parts:
    """All gateways and keepers, on one address of loopback.

    workers: the names of a job's living workers.
    """

    def __init__(self, num_services: int, workers: Callable[[str], Iterable[str]]) -> None:
        self._streams = {service_name(number): _stream(number) for number in range(num_services)}
        self._workers = workers
        self._boot = secrets.token_hex(4)
        self._swings_s: float | None = None
        self.url = ""
        self.answers = 0
        self.verified = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Parts"]:
        routes = [
            web.get("/gateways/{name}/signals", self._signals),
            web.put("/gateways/{name}/replicas", self._replicas),
            web.get("/keepers/{name}/progress", self._progress),
            web.post("/keepers/{name}/verify", self._verify),
        ]
        async with listening(routes) as self.url:
            yield self

    def swing(self) -> None:
        """From now on the traffic of some services rises and falls."""
        self._swings_s = time.monotonic()

    async def _signals(self, request: web.Request) -> web.Response:
        stream = self._streams[request.match_info["name"]]
        end_s = time.monotonic() + float(request.query.get("wait", 0))
        seen = int(request.query.get("seen", 0))
        self._move(stream)
        while stream.backlogs <= seen and (left_s := end_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, LOOK_S) if stream.swing else left_s)
            self._move(stream)
        self.answers += 1
        return web.json_response(stream.words(self._boot))

    def _move(self, stream: Stream) -> None:
        now_s = time.monotonic()
        stream.move(now_s, None if self._swings_s is None else now_s - self._swings_s)

    async def _replicas(self, request: web.Request) -> web.Response:
        told = await request.json()
        stream = self._streams[request.match_info["name"]]
        stream.capacity = {one["uid"]: one["slots"] for one in told["replicas"]}
        return web.Response(status=204)

    async def _progress(self, request: web.Request) -> web.Response:
        name, now_s = request.match_info["name"], time.monotonic()
        workers = {
            worker: {"durable_age_s": (now_s + hash(worker) % 100) % DURABLE_S, "items": 1, "shard": "s0000"}
            for worker in self._workers(name)
        }
        items = {"items_total": 10**7, "items_done": 0, "items_quarantined": 0, "items_open": 10**7}
        self.answers += 1
        return web.json_response(items | {"job": name, "shards_open": 10**6, "audio_s": 0.0, "workers": workers})

    async def _verify(self, request: web.Request) -> web.Response:
        self.verified += 1
        return web.json_response({"holds": (await request.json())["receipt"]["sha256"] == RECEIPT["sha256"]})


def _stream(number: int) -> Stream:
    swing = 8.0 if number % SWINGING == 0 else 0.0
    return Stream(4.0 + number % 3 * 2, swing, 80.0 + number % 7 * 10, number * 0.37 % 1.0)
