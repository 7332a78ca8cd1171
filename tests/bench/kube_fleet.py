"""A fleet of fake nodes on a real control plane, with the real operator before it, for the Kubernetes benches.

Owns the control plane, kwok's nodes, the installation as `manifests/overlays/test` has it, the operator's process under
its own service account, and a stand-in for gateway and keeper: no fake node can run those.
"""

import asyncio
import base64
import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from slackwater_controlplane.build import Programs, cache_folder
from slackwater_controlplane.cluster import ControlPlane
from slackwater_controlplane.fixtures import new_control_plane
from slackwater_controlplane.kwok import Kwok
from slackwater_operator.demo.plan import free_port
from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.types import PODS, Object, custom, key_of
from slackwater_operator.resources import names

ROOT = Path(__file__).parents[2]
FLAVORS = custom("gpuflavors", "GPUFlavor", False)
POOLS = custom("capacitypools", "CapacityPool", False)
SERVICES = custom("inferencedeployments", "InferenceDeployment", True)
JOBS = custom("cleaningjobs", "CleaningJob", True)
RECLAIMS = custom("reclaims", "Reclaim", True)
MANAGER = "bench"
ACCOUNT = f"system:serviceaccount:{names.OPERATOR_NAMESPACE}:{names.SERVICE_ACCOUNT}"  # as the audit log names it
AT_ONCE = 64  # requests of ours
SERVING, DATA = "slackwater-inference", "slackwater-workers"  # the namespaces of the installation
OVERLAY = ROOT / "manifests/overlays/test"
RECEIPT = {"path": "part/s0000/1", "size_bytes": 1, "sha256": "0" * 64}  # what a worker of a fake node leaves behind


@asynccontextmanager
async def listening(routes: Iterable[web.RouteDef]) -> AsyncIterator[str]:
    """A server on a free port of loopback, for as long as the block lasts; its address."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class StandIn:
    """Answers as a gateway's control port and as a job's keeper do, on one address of loopback.

    asked_s: when the newest demand could first be read, monotonic.
    """

    def __init__(self) -> None:
        self._queued = 0
        self._backlogs = 0
        self._arrivals = 0
        self._news = asyncio.Event()
        self._boot = secrets.token_hex(4)
        self.asked_s = 0.0
        self.url = ""
        self.verified = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["StandIn"]:
        routes = [
            web.get("/signals", self._signals),
            web.put("/replicas", self._replicas),
            web.get("/progress", self._progress),
            web.post("/verify", self._verify),
        ]
        async with listening(routes) as self.url:
            yield self

    def ask(self, requests: int) -> None:
        """So many requests wait from now on."""
        if requests > self._queued:
            self._arrivals += requests - self._queued
            self._backlogs += 1
        self._queued = requests
        self.asked_s = time.monotonic()
        self._news.set()
        self._news = asyncio.Event()

    async def _signals(self, request: web.Request) -> web.Response:
        if int(request.query.get("seen", self._backlogs)) >= self._backlogs:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), float(request.query.get("wait", 0)))
        totals = {"rejected_total": 0, "failed_total": 0, "oldest_queued_s": 0.0, "first_audio_p95_s": None}
        return web.json_response(
            totals
            | {"in_flight": 0, "queued": self._queued, "arrivals_total": self._arrivals, "replicas": {}}
            | {"backlogs": self._backlogs, "boot": self._boot}
        )

    async def _replicas(self, request: web.Request) -> web.Response:
        await request.read()
        return web.Response(status=204)

    async def _progress(self, request: web.Request) -> web.Response:
        items = {"items_total": 10**7, "items_done": 0, "items_quarantined": 0, "items_open": 10**7}
        return web.json_response(items | {"job": "bench", "shards_open": 10**6, "audio_s": 0.0, "workers": {}})

    async def _verify(self, request: web.Request) -> web.Response:
        self.verified += 1
        return web.json_response({"holds": (await request.json())["receipt"]["sha256"] == RECEIPT["sha256"]})


class Pods:
    """What the API server says of the pods of one kind of ours, as it comes."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._changed = asyncio.Event()
        cache.on_change(self._note)

        self.on_change = cache.on_change

    def _note(self, change: str, pod: Object) -> None:
        self._changed.set()

    def counting(self, is_so: Callable[[Object], bool]) -> Callable[[], int]:
        """How many are so, kept from change to change: to look at thousands each time takes a seventh of two cores."""
        those = {key_of(pod) for pod in self._cache.values() if is_so(pod)}

        def note(change: str, pod: Object) -> None:
            if change != "DELETED" and is_so(pod):
                those.add(key_of(pod))
            else:
                those.discard(key_of(pod))

        self.on_change(note)
        return lambda: len(those)

    def count(self, is_so: Callable[[Object], bool]) -> int:
        return sum(is_so(pod) for pod in self._cache.values())

    async def until(self, is_so: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Wait; returns the moment, monotonic.  Raises TimeoutError that says what was waited for."""
        end_s = time.monotonic() + timeout_s
        while not is_so():
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, end_s - time.monotonic()))
            except TimeoutError:
                raise TimeoutError(f"not within {timeout_s:g} s: {what}") from None
        return time.monotonic()


def is_bound(pod: Object) -> bool:
    return bool(pod["spec"].get("nodeName")) and not is_leaving(pod)


def is_running(pod: Object) -> bool:
    return is_bound(pod) and pod.get("status", {}).get("phase") == "Running"


def is_leaving(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"] or pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


@contextmanager
def pods(kube: Kube, labels: str) -> Iterator[tuple[Pods, asyncio.Task[None]]]:
    """Watch the pods that match, while the block lasts."""
    cache = Cache(kube, PODS, labels=labels)
    task = asyncio.get_running_loop().create_task(cache.run())
    try:
        yield Pods(cache), task
    finally:
        task.cancel()


async def each(calls: Iterable[Awaitable[Any]]) -> None:
    """Await them all, some at once."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(call: Awaitable[Any]) -> None:
        async with gate:
            await call

    await asyncio.gather(*(one(call) for call in calls))


@contextmanager
def control_plane() -> Iterator[tuple[ControlPlane, Programs]]:
    """A control plane from this machine's cache.  Raises RuntimeError that says what to build first."""
    cache = cache_folder(os.environ)
    programs = Programs(cache, os.environ)
    if why := programs.why_not("control-plane", "kwok"):
        raise RuntimeError(why)
    with new_control_plane(programs, cache) as cluster:
        yield cluster, programs


def install(cluster: ControlPlane, programs: Programs) -> None:
    """Our resources, RBAC and priority classes, as a person installs them."""
    command = [str(programs.path("kubectl")), "--kubeconfig", str(cluster.kubeconfig()), "apply", "--server-side"]
    for attempt in range(5):  # a custom resource's kind is known some moments after its definition
        done = subprocess.run([*command, "-k", str(OVERLAY)], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        time.sleep(1 + attempt)
    raise RuntimeError(f"kubectl apply -k {OVERLAY}: {done.stderr}")


def operator_kubeconfig(cluster: ControlPlane, folder: Path) -> Path:
    """A kubeconfig with a token of the operator's own service account."""
    path = f"/api/v1/namespaces/{names.OPERATOR_NAMESPACE}/serviceaccounts/{names.SERVICE_ACCOUNT}/token"
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 7200}}
    answer = cluster.admin.raw("POST", path, body)
    authority = base64.b64encode(cluster.ca_file.read_bytes()).decode()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "bench",
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "operator"}}],
        "clusters": [{"name": "bench", "cluster": {"server": cluster.url, "certificate-authority-data": authority}}],
        "users": [{"name": "operator", "user": {"token": answer.json()["status"]["token"]}}],
    }
    file = folder / "operator.kubeconfig"
    file.touch(mode=0o600)
    file.write_text(json.dumps(config))
    return file


@contextmanager
def operator(kubeconfig: Path, folder: Path, *options: str, niceness: int = 0) -> Iterator["subprocess.Popen[bytes]"]:
    """`slackwater operator run`, ended with the block; its log is folder/operator.log.

    niceness: of the process and of its session, as far as the system allows it.
    """
    command = [sys.executable, "-m", "slackwater_operator", "operator", "run", "--kubeconfig", str(kubeconfig)]
    command += ["--host", "127.0.0.1", "--metrics-port", "0", "--probes-port", str(free_port())]
    with (folder / "operator.log").open("ab") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log, start_new_session=True)
    if niceness:
        # Linux shares the CPU out among sessions first, where it has autogroups, and then within each.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
        with suppress(OSError):
            Path(f"/proc/{process.pid}/autogroup").write_text(str(niceness))
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def samples(
    session: aiohttp.ClientSession, url: str, only: Mapping[str, list[str]] | None = None
) -> dict[str, float]:
    """What a Prometheus endpoint says, by name with labels.  only: as its query may ask for some names alone."""
    pairs = [(key, value) for key, values in (only or {}).items() for value in values]
    async with session.get(url, params=pairs) as answer:
        lines = (await answer.text()).splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def memory_peak_mb(pid: int) -> float:
    """The most memory that a process has held so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024 / 1e6


def spent_cpu_s(pid: int) -> float:
    """CPU time of a process so far, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def add_fleet(kwok: Kwok, num_nodes: int, gpus: int = 8) -> None:
    """Fake nodes with H200s."""
    kwok.add_nodes(num_nodes, prefix="n", product="NVIDIA-H200", gpus=gpus)


def flavor_and_pool(**pool: Any) -> list[tuple[Any, Object]]:
    """One GPU type and one pool over all nodes of it."""
    spec = {"flavors": [{"name": "h200"}], "lending": {"lendAfter": "0s"}, "reclaim": {"maxParallel": 512}} | pool
    tolerations = [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]
    flavor = {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"}, "tolerations": tolerations}
    return [(FLAVORS, ours("GPUFlavor", "h200", flavor)), (POOLS, ours("CapacityPool", "east", spec))]


def service(name: str, gateway: str, most: int) -> Object:
    """A service with one request a replica, which gives up what nobody asks for within seconds."""
    return ours(
        "InferenceDeployment",
        name,
        {
            "model": "tiny",
            "pools": ["east"],
            "minReplicas": 0,
            "maxReplicas": most,
            "variants": [{"flavor": "h200", "slotsPerReplica": 1}],
            "gateway": {"controlURL": gateway},
            "autoscaling": {"scaleDown": {"window": "1s", "deadband": 0}},
            "template": {"spec": {"containers": [{"name": "engine", "image": "engine:1"}]}},
        },
        SERVING,
    )


def job(name: str, keeper: str, most: int, annotations: Mapping[str, str]) -> Object:
    """A cleaning job whose fake workers leave at once, with a receipt."""
    template = {
        "metadata": {"annotations": dict(annotations)},
        "spec": {"terminationGracePeriodSeconds": 20, "containers": [{"name": "worker", "image": "worker:1"}]},
    }
    spec = {"pools": ["east"], "flavors": ["h200"], "maxWorkers": most, "keeper": {"url": keeper}}
    return ours("CleaningJob", name, spec | {"template": template}, DATA)


def ours(kind: str, name: str, spec: Object, namespace: str = "") -> Object:
    metadata = {"name": name, "namespace": namespace} if namespace else {"name": name}
    return {"apiVersion": names.API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}
