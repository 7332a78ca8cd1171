"""A burst through the ingress of a real cluster: decided, workers durable and gone, engines serving.

`make bench NAME=operator_e2e` needs root and the programs of `.setup/controlplane control-plane nodes gateway`.  Real
kubelets, engines, workers and Envoy share this machine's cores, so serving waits for the start of an engine's Python.
Decisions and writes are taken from the API server's audit log, the rest from pods as their watch shows them.
"""

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from kube_stage import DATA, GPUS, OPERATORS, SERVING, SLOTS, Stage, is_over, is_ready, recordings, stage, until
from run import Row

from slackwater_operator.demo.plan import free_port
from slackwater_operator.kube.cache import Cache
from slackwater_operator.kube.client import Kube
from slackwater_operator.kube.connection import Connection
from slackwater_operator.kube.types import PODS, Object, custom, name_of
from slackwater_operator.resources import names

ROUNDS = int(os.environ.get("OPERATOR_E2E_ROUNDS", "6"))
COPIES = int(os.environ.get("OPERATOR_E2E_COPIES", "12"))  # so that there is work until the last round
SETTLE_S = 8.0  # a worker that has only begun hears of its end late, and has nothing to lose
TEXT = "It is a quarter past nine, and the water has begun to turn; nobody on the quay has noticed it yet."
RECLAIMS = custom("reclaims", "Reclaim", True)
WRITES = ("create", "update", "patch", "delete")
ACCOUNT = f"system:serviceaccount:{names.OPERATOR_NAMESPACE}:{names.SERVICE_ACCOUNT}"


def say(words: str) -> None:
    sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] {words}\n")


@dataclass(slots=True)
class Seen:
    """Moments of a pod, by the wall clock, as a watch showed them."""

    leaving_s: float = 0.0
    gone_s: float = 0.0  # its containers have ended: the GPU is free
    ready_s: float = 0.0


class Watch:
    """Pods of the operator's, followed in a thread."""

    def __init__(self, connection: Connection) -> None:
        self.pods: dict[str, Seen] = {}
        self._connection = connection
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    async def _run(self) -> None:
        async with Kube(self._connection, user_agent="bench") as kube:
            cache = Cache(kube, PODS, labels=f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}")
            cache.on_change(self._note)
            task = asyncio.create_task(cache.run())
            while not self._stop.is_set():
                await asyncio.sleep(0.1)
            task.cancel()

    def _note(self, change: str, pod: Object) -> None:
        now_s = time.time()
        seen = self.pods.setdefault(f"{pod['metadata']['namespace']}/{name_of(pod)}", Seen())
        if "deletionTimestamp" in pod["metadata"]:
            seen.leaving_s = seen.leaving_s or now_s
        if change == "DELETED" or is_over(pod):
            seen.gone_s = seen.gone_s or now_s
        if is_ready(pod):
            seen.ready_s = seen.ready_s or now_s


@dataclass(slots=True)
class Round:
    """One burst.  Seconds from its first request, but for `freeing_s`: from the decision to the last GPU free."""

    decided_s: float
    durable_s: float
    freeing_s: float
    serving_s: float
    victims: int
    too_many: int  # of one flavor, beyond the engines that came
    writes: Counter[str]  # verb and resource
    answered: int
    failed: int


@dataclass(slots=True)
class Doubles:
    """GPUs that two living pods held at once, looked for all the time."""

    found: set[str] = field(default_factory=set)
    looks: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def watching(self, on: Stage) -> Iterator[None]:
        thread = threading.Thread(target=self._look, args=(on,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(10)

    def _look(self, on: Stage) -> None:
        """A device's holder may only change to another after the first one's containers have ended."""
        before: dict[str, tuple[str, str]] = {}
        while not self._stop.is_set():
            with contextlib.suppress(Exception):  # a kubelet that is busy answers the next time
                now = on.holders()
                self.looks += 1
                for device, pod in now.items():
                    old = before.get(device)
                    if old is not None and old != pod:
                        left = on.admin.find("pods", old[1], old[0])
                        if left is not None and not is_over(left):
                            self.found.add(f"{device}: {old} and {pod}")
                before = now
            self._stop.wait(0.3)


class Burst:
    """Listeners who each ask for one text after another, until it ends."""

    def __init__(self, url: str, listeners: int) -> None:
        self.began_s = time.time()
        self.answered = self.failed = 0
        self._url = url
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._listen, daemon=True) for _ in range(listeners)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Let each listener hear its text to the end."""
        self._over.set()
        for thread in self._threads:
            thread.join(120)

    def _listen(self) -> None:
        with httpx.Client(timeout=120, trust_env=False) as client:
            while not self._over.is_set():
                try:
                    answer = client.post(f"{self._url}/v1/tts", json={"text": TEXT, "format": "wav"})
                    is_good = answer.status_code == 200 and len(answer.content) > 10_000
                except httpx.HTTPError:
                    is_good = False
                with self._lock:
                    self.answered += is_good
                    self.failed += not is_good
                if not is_good:
                    time.sleep(0.5)


def play(on: Stage, watch: Watch, listeners: int) -> Round:
    """One burst, from quiet to quiet."""
    admin = on.admin
    known = {name_of(one) for one in admin.list("reclaims.slackwater.dev", SERVING)}
    engines = {name_of(pod) for pod in on.pods(SERVING, names.POD_INFERENCE)}
    position = on.cluster.plane.audit_position()
    burst = Burst(on.url, listeners)

    def new_reclaims() -> list[Object]:
        return [one for one in admin.list("reclaims.slackwater.dev", SERVING) if name_of(one) not in known]

    try:
        until(lambda: bool(new_reclaims()), "a reclaim")
        until(
            lambda: all(one.get("status", {}).get("phase") in ("Serving", "Cancelled") for one in new_reclaims()),
            "the new engines serve",
        )
        time.sleep(1.0)
    finally:
        burst.end()
    reclaims = new_reclaims()
    victims = [victim["pod"] for one in reclaims for victim in one["spec"]["victims"]]
    events = [
        event
        for event in on.cluster.plane.audit(position)
        if event.user == ACCOUNT and event.verb in WRITES and "dryRun=All" not in event.uri
    ]
    created = [event for event in events if event.resource == "reclaims" and event.verb == "create"]
    first_s = min(event.received_s for event in created)
    named = {victim.partition("/")[2] for victim in victims}
    started = {pod for pod, seen in watch.pods.items() if pod.startswith(f"{SERVING}/tts") and seen.ready_s > first_s}
    started -= {f"{SERVING}/{name}" for name in engines}
    of_reclaims = {name.partition("/")[2] for name in started} | named | {name_of(one) for one in reclaims}
    writes = [event for event in events if event.resource in ("pods", "reclaims") and event.name in of_reclaims]
    writes += [event for event in created if event.name not in of_reclaims]
    free_s = [watch.pods[victim].gone_s for victim in victims]
    released = [file.stat().st_mtime for file in on.ledger.glob("released/*/*") if file.stat().st_mtime > first_s]
    return Round(
        decided_s=first_s - burst.began_s,
        durable_s=max((at_s for at_s in released if at_s <= max(free_s)), default=first_s) - burst.began_s,
        freeing_s=max(free_s) - first_s,
        serving_s=min(watch.pods[pod].ready_s for pod in started) - burst.began_s,
        victims=len(victims),
        too_many=max(0, len(victims) - len(started)),
        writes=Counter(f"{event.verb} {event.resource} {event.subresource}".strip() for event in writes),
        answered=burst.answered,
        failed=burst.failed,
    )


def calm(on: Stage) -> None:
    """One engine, and cleaning on every other GPU."""
    until(lambda: len(on.pods(SERVING, names.POD_INFERENCE)) == 1, "one engine is left")
    until(lambda: sum(map(is_ready, on.pods(DATA, names.POD_CLEANING))) == GPUS - 1, "cleaning is back")
    time.sleep(SETTLE_S)


@contextlib.contextmanager
def prometheus(on: Stage, folder: Path) -> Iterator[str]:
    """A real one that scrapes the cluster's pods; yields its address."""
    # In a folder of their own: Prometheus looks at everything in it again whenever a file there changes, its log too.
    port, targets = free_port(), folder / "targets" / "targets.json"
    targets.parent.mkdir()
    config = {
        "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
        "rule_files": [str(Path(__file__).parents[2] / "manifests/monitoring/rules.yaml")],
        "scrape_configs": [{"job_name": "slackwater", "file_sd_configs": [{"files": [str(targets)]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    targets.write_text(yaml.safe_dump([{"targets": on.targets()}]))
    stop = threading.Event()

    def follow() -> None:
        while not stop.wait(2.0):
            with contextlib.suppress(Exception):
                new = folder / "targets.new"
                new.write_text(yaml.safe_dump([{"targets": on.targets()}], default_flow_style=True))
                new.replace(targets)

    command = ["prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        stop.set()
        process.terminate()
        process.wait(20)


def answered_queries(url: str) -> tuple[int, int, int]:
    """(asked, answered without an error, answered with numbers): every query of the dashboard."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "manifests/tools"))
    from slackwater_manifests.queries import MACROS
    from slackwater_manifests.rows import ROWS

    asked = good = full = 0
    for query in (query for row in ROWS for panel in row.panels for query in panel.queries):
        expr = query.expr.replace("$pool", ".*").replace("$flavor", ".*")
        for macro, value in MACROS.items():
            expr = expr.replace(macro, value)
        answer = httpx.get(f"{url}/api/v1/query", params={"query": expr}, timeout=30).json()
        asked += 1
        good += answer["status"] == "success"
        full += bool(answer.get("data", {}).get("result"))
    return asked, good, full


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def perform(on: Stage, folder: Path) -> dict[str, Any]:
    connection = Connection.from_kubeconfig(on.cluster.plane.kubeconfig())
    doubles = Doubles()
    rounds: list[Round] = []
    with Watch(connection) as watch, prometheus(on, folder) as url, doubles.watching(on):
        calm(on)
        say(f"a first burst, for the page cache: {play(on, watch, SLOTS * 2)}")
        calm(on)
        position = on.cluster.plane.audit_position()
        for number in range(ROUNDS):
            rounds.append(play(on, watch, SLOTS * 3 if number % 2 else SLOTS * 2))
            say(f"round {number + 1} of {ROUNDS}: {rounds[-1]}")
            calm(on)
        lists = sum(event.user == ACCOUNT and event.verb == "list" for event in on.cluster.plane.audit(position))
        queries = answered_queries(url)
    on.cluster.kubectl("delete", "cleaningjobs", "-n", DATA, "podcasts", "--wait=true")
    until(lambda: not on.pods(DATA, names.POD_CLEANING), "the workers are gone")
    report = on.verify()
    return {"rounds": rounds, "lists": lists, "queries": queries, "doubles": doubles, "report": report}


def measure() -> list[Row]:
    cache = Path(os.environ.get("RECORDINGS", str(Path.home() / ".cache/slackwater/recordings")))
    with tempfile.TemporaryDirectory(prefix="e2e-", dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "input").mkdir()
        recordings(folder / "input", cache, COPIES)
        say("recordings are there")
        with stage(folder, say) as on:
            try:
                found = perform(on, folder)
            except BaseException:
                logs = on.cluster.kubectl("logs", "-n", names.OPERATOR_NAMESPACE, "-l", OPERATORS, "--tail=40")
                sys.stderr.write(logs.stdout[-3000:])
                raise
    rounds: list[Round] = found["rounds"]
    report, (asked, good, full), doubles = found["report"], found["queries"], found["doubles"]
    decided = [one.decided_s for one in rounds]
    victims = sum(one.victims for one in rounds)
    where = f"{ROUNDS} bursts through Envoy; 2 kubelets with {GPUS} GPUs, real engines and workers on one machine"
    slowest = "of so few rounds the slowest"
    freeing, serving = [one.freeing_s for one in rounds], [one.serving_s for one in rounds]
    kubelets = f"by the kubelets' account, {doubles.looks} looks"
    return [
        Row("spike_to_decision_p50_s", statistics.median(decided), "s", note=f"first request to Reclaim; {where}"),
        Row("spike_to_decision_p99_s", percentile(decided, 0.99), "s", note=slowest),
        Row("spike_to_durable_p99_s", percentile([one.durable_s for one in rounds], 0.99), "s", note="leases released"),
        Row("decision_to_free_p50_s", statistics.median(freeing), "s", note="the last victim"),
        Row("decision_to_free_p99_s", percentile(freeing, 0.99), "s", note=slowest),
        Row(
            "spike_to_serving_p50_s",
            statistics.median(serving),
            "s",
            note="a new engine ready",
        ),
        Row("spike_to_serving_p99_s", percentile(serving, 0.99), "s", note=slowest),
        Row("workers_reclaimed", victims, "count"),
        Row("over_eviction_max", max(one.too_many for one in rounds), "count", note="in one burst"),
        Row("units_lost", report["items_lost"], "count", note="every byte of the ledger read"),
        Row("units_doubled", report["items_doubled"], "count"),
        Row("units_done", report["items_done"], "count"),
        Row(
            "gpus_doubly_allocated",
            len(doubles.found),
            "count",
            note=kubelets,
        ),
        Row(
            "api_writes_per_worker",
            sum(one.writes.total() for one in rounds) / victims,
            "writes",
            note="pods and Reclaims",
        ),
        Row("lists_in_steady_state", found["lists"], "count", note="by the operator, all rounds"),
        Row("requests_answered", sum(one.answered for one in rounds), "count"),
        Row("requests_failed", sum(one.failed for one in rounds), "count"),
        Row("dashboard_queries_answered", good, "count", note=f"of {asked}, by a real Prometheus; {full} with numbers"),
    ]
