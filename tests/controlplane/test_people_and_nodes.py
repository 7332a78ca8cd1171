"""On real nodes with the real worker: what people do with kubectl, a kubelet that is killed, a node that is gone."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from slackwater_controlplane.build import Programs
from slackwater_controlplane.client import Object
from slackwater_controlplane.doubles import Doubles
from slackwater_controlplane.images import Images
from slackwater_controlplane.node.cluster import container_state, why_not
from slackwater_controlplane.site import DATA, GPUS, NODES, SERVING, SOME, Site, site
from slackwater_operator.resources import names
from slackwater_operator.testing.processes import OperatorProcess, wait_until
from slackwater_workers.core import Receipt
from slackwater_workers.ledger.store import PosixStore
from slackwater_workers.ledger.verify import holds

pytestmark = [pytest.mark.controlplane, pytest.mark.long, pytest.mark.timeout(400)]

ALL = GPUS * len(NODES)
GRACE_S = 20.0  # of a worker
PATIENCE_S = 120.0
CLEANING, INFERENCE = names.POD_CLEANING, names.POD_INFERENCE


@pytest.fixture(scope="module")
def shared_place(controlplane_programs: Programs, container_images: Images) -> Iterator[Site]:
    if (reason := why_not(controlplane_programs)) is not None:
        pytest.skip(reason)
    with site(controlplane_programs, container_images) as place:
        yield place


@pytest.fixture
def place(shared_place: Site) -> Iterator[Site]:
    """The site with nothing running."""
    yield shared_place
    shared_place.clean()


@pytest.fixture
def operator(place: Site) -> Iterator[OperatorProcess]:
    with place.operator() as process:
        yield process


def busy(place: Site, workers: int) -> Callable[[], bool]:
    """So many workers run, and each has made an item durable."""
    return lambda: len(place.running(CLEANING)) == workers == len(place.cleaning())


def fill(place: Site, operator: OperatorProcess, replicas: int) -> str:
    """A service with so many engines, and a job that cleans on every other GPU; the job's name."""
    place.add_service(replicas)
    job = place.add_job(ALL)
    wait_until(lambda: len(place.running(INFERENCE)) == replicas, PATIENCE_S, operator.words)
    wait_until(busy(place, ALL - replicas), PATIENCE_S, operator.words)
    return job


def ends_of(place: Site, pod: str, since: str) -> Object:
    """How a pod's worker ended, as a watch saw it last."""
    seen: Object = {}
    for event in place.admin.watch("pods", DATA, since=since, timeout_s=2):
        if event["object"]["metadata"].get("name") == pod:
            seen = dict(container_state(event["object"], names.WORKER_CONTAINER)) or seen
    return dict(seen.get("terminated") or {})


def is_sound(place: Site, job: str) -> None:
    """Every item that the ledger calls done is there once."""
    report = place.verify(job)
    assert (report["items_lost"], report["items_doubled"], report["problems"]) == (0, 0, [])


def test_logs_of_workers_keepers_gateways_and_engines_say_what_they_do(place: Site, operator: OperatorProcess) -> None:
    place.add_service(gateway={"replicas": 1})
    job = place.add_job(2)
    wait_until(busy(place, 2), PATIENCE_S, operator.words)
    wait_until(lambda: len(place.running(names.POD_GATEWAY)) == 1, PATIENCE_S, operator.words)
    worker, engine = place.running(CLEANING)[0], place.running(INFERENCE)[0]
    wait_until(lambda: "realtime" in place.kubectl("logs", worker, "-n", DATA), PATIENCE_S, operator.words)

    said = {
        "worker": place.kubectl("logs", worker, "-n", DATA),
        "keeper": place.kubectl("logs", f"deployment/{job}-keeper", "-n", DATA),
        "gateway": place.kubectl("logs", "deployment/tts-gateway", "-n", SERVING),
        "engine": place.kubectl("logs", engine, "-n", SERVING),
    }
    following = place.follow(worker, DATA)
    place.kubectl("delete", "pod", worker, "-n", DATA)
    last = following.communicate(timeout=30)[0]

    assert re.search(r"cleaning: \d+ of \d+ items, \d+x realtime", said["worker"]), said["worker"]
    assert "keeper of /ledger on" in said["keeper"]
    assert re.search(r"replicas n=1 slots=\d+", said["gateway"]), said["gateway"]
    assert said["engine"] == "serving\n"
    assert last.startswith(said["worker"])
    assert "leaving (preempted)" in last.splitlines()[-1]


def test_the_logs_of_a_worker_that_failed_can_be_read_and_the_next_leader_goes_on_from_its_counts(place: Site) -> None:
    def why_failed() -> str:
        found = {one["type"]: one for one in place.status(job).get("conditions", ())}
        return str(found["Failed"]["message"]) if found.get("Failed", {}).get("status") == "True" else ""

    def spent_s() -> float:
        return float(place.status(job).get("gpuSeconds") or 0.0)

    with place.operator() as first:
        job = place.add_job(2, args=["clean", "run", "/nothing", "--output", "/ledger", "--job", "a", "--worker", "b"])
        wait_until(why_failed, PATIENCE_S, first.words)
        wait_until(spent_s, PATIENCE_S, first.words)
        before_s = spent_s()
    with place.operator():
        time.sleep(20.0)  # it has written each status by then, and whoever wants to look at logs needs longer too

        [pod] = place.admin.list("pods", DATA, labels=f"{names.LABEL_OWNER}={job},{names.LABEL_KIND}={CLEANING}")
        said = place.kubectl("logs", pod["metadata"]["name"], "-n", DATA)

        assert "/nothing" in said
        assert why_failed() in said
        assert spent_s() >= before_s


def test_a_deleted_worker_checkpoints_within_its_grace_and_another_takes_its_place(
    place: Site, operator: OperatorProcess
) -> None:
    job = place.add_job(ALL)
    wait_until(busy(place, ALL), PATIENCE_S, operator.words)
    before = place.running(CLEANING)
    since = place.admin.list_whole("pods", DATA)["metadata"]["resourceVersion"]

    began_s = time.monotonic()
    place.kubectl("delete", "pod", before[0], "-n", DATA)
    took_s = time.monotonic() - began_s
    wait_until(lambda: len(place.running(CLEANING)) == ALL, PATIENCE_S, operator.words)

    ended = ends_of(place, before[0], since)
    assert took_s < GRACE_S
    assert ended["exitCode"] == 75
    receipt = json.loads(ended["message"])
    wanted: dict[str, Any] = {key: receipt[key] for key in ("path", "size_bytes", "sha256")}
    assert holds(PosixStore(place.ledger(job)), Receipt(**wanted))
    assert len(set(place.running(CLEANING)) - set(before)) == 1
    assert place.status(job)["workers"]["running"] == ALL
    assert "backoff" not in operator.words()
    is_sound(place, job)


def test_a_deleted_engine_is_replaced_and_cleaning_gives_nothing_more_for_it(
    place: Site, operator: OperatorProcess
) -> None:
    job = fill(place, operator, 2)
    engine, other = place.running(INFERENCE)
    uid = f"{SERVING}/{engine}"
    wait_until(lambda: uid in (place.gateway.real.told or {}), 30, operator.words)

    place.kubectl("delete", "pod", engine, "-n", SERVING, "--wait=false")
    wait_until(lambda: uid not in (place.gateway.real.told or {}), 10, operator.words)
    wait_until(lambda: len(place.running(INFERENCE)) == 2, PATIENCE_S, operator.words)
    wait_until(lambda: len(place.running(CLEANING)) == ALL - 2, PATIENCE_S, operator.words)

    assert other in place.running(INFERENCE)
    assert sum(len(one["spec"]["victims"]) for one in place.reclaims()) <= 1
    is_sound(place, job)


def test_a_drained_node_is_empty_in_good_time_and_gets_nothing_before_it_is_uncordoned(
    place: Site, operator: OperatorProcess
) -> None:
    job = fill(place, operator, 1)
    node = place.pods(INFERENCE)[0]["spec"]["nodeName"]
    since = place.admin.list_whole("pods", DATA)["metadata"]["resourceVersion"]
    workers = place.running(CLEANING, node=node)

    began_s = time.monotonic()
    place.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s")
    took_s = time.monotonic() - began_s
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        assert [place.pods(kind, node=node, leaving=True) for kind in (CLEANING, INFERENCE)] == [[], []]
        time.sleep(0.2)
    ended = [ends_of(place, worker, since) for worker in workers]
    served = [place.running(INFERENCE), place.status(job)["workers"]["running"]]

    place.kubectl("uncordon", node)
    wait_until(lambda: len(place.running(CLEANING, node=node)) > 0, PATIENCE_S, operator.words)
    wait_until(lambda: len(place.running(CLEANING)) == ALL - 1, PATIENCE_S, operator.words)

    assert took_s < 60
    assert len(served[0]) == 1
    assert served[1] == ALL - GPUS - 1
    assert [one["exitCode"] for one in ended] == [75] * len(workers)
    is_sound(place, job)


def test_a_deleted_job_and_a_deleted_service_leave_nothing_behind(place: Site, operator: OperatorProcess) -> None:
    place.add_service(1, gateway={"replicas": 1})
    job = place.add_job(ALL)
    wait_until(busy(place, ALL - 1), PATIENCE_S, operator.words)
    since = place.admin.list_whole("pods", DATA)["metadata"]["resourceVersion"]
    workers = place.running(CLEANING)

    place.kubectl("delete", "cleaningjob", job, "-n", DATA)
    wait_until(lambda: left_of(place, job, DATA) == [], PATIENCE_S, lambda: str(left_of(place, job, DATA)))
    ended = [ends_of(place, worker, since) for worker in workers]
    place.kubectl("delete", "inferencedeployment", "tts", "-n", SERVING)
    wait_until(lambda: left_of(place, "tts", SERVING) == [], PATIENCE_S, lambda: str(left_of(place, "tts", SERVING)))

    assert [one["exitCode"] for one in ended] == [75] * len(workers)
    assert place.holders() == {}
    is_sound(place, job)


def left_of(place: Site, owner: str, namespace: str) -> list[str]:
    """What is still there of what we made for an owner."""
    kinds = (
        *("pods", "services", "deployments.apps", "replicasets.apps", "jobs.batch"),
        *("controllerrevisions.apps", "endpointslices.discovery.k8s.io"),
    )
    return [
        f"{kind} {one['metadata']['name']}"
        for kind in kinds
        for one in place.admin.list(kind, namespace)
        if one["metadata"]["name"].startswith(owner)
    ]


def test_a_take_back_is_finished_though_the_kubelet_of_its_victims_was_killed(
    place: Site, operator: OperatorProcess
) -> None:
    job = fill(place, operator, 1)

    with Doubles(place.cluster.plane) as doubles:
        place.want(3)
        node = place.cluster.nodes[node_of_a_victim(place, operator)]
        node.kill_kubelet()
        time.sleep(10)
        node.restart_kubelet()
        wait_until(lambda: len(place.running(INFERENCE)) == 3, PATIENCE_S, operator.words)
        # Of two victims for one GPU, the one in the place of the other may be the later to go: it is lent again.
        ended = {"Serving", "Freed"}
        wait_until(lambda: phases(place) <= ended, PATIENCE_S, lambda: f"{place.reclaims()}{operator.words()}")
        wait_until(lambda: len(place.running(CLEANING)) == ALL - 3, PATIENCE_S, operator.words)
        wait_until(lambda: "Leaving" not in {one["outcome"] for one in victims(place)}, PATIENCE_S, operator.words)
        place.cluster.wait_ready(node.spec.name)

    assert doubles.found == set()
    assert len(set(place.holders().values())) == len(place.holders()) == ALL
    assert "Serving" in phases(place)
    assert {one["outcome"] for one in victims(place)} <= {"Checkpointed", "Unverified"}
    is_sound(place, job)


def test_what_a_node_that_is_gone_held_is_written_off_and_done_by_others(
    place: Site, operator: OperatorProcess
) -> None:
    # The node that goes has the job's keeper too, and a victim in any case: two of the three workers are on it.
    job = place.add_job(ALL, items="some", suspend=True)
    wait_until(lambda: place.running(names.POD_KEEPER), PATIENCE_S, operator.words)
    gone = place.pods(names.POD_KEEPER)[0]["spec"]["nodeName"]
    serving, spare = (node for node in place.cluster.nodes if node != gone)
    with ExitStack() as after:
        after.callback(place.kubectl, "uncordon", gone, spare)
        place.kubectl("cordon", gone, spare)
        place.add_service(1)
        wait_until(lambda: len(place.running(INFERENCE, node=serving)) == 1, PATIENCE_S, operator.words)
        place.kubectl("uncordon", gone)
        place.admin.patch("cleaningjobs.slackwater.dev", job, {"spec": {"suspend": False}}, DATA)
        wait_until(busy(place, 3), PATIENCE_S, operator.words)

        with Doubles(place.cluster.plane) as doubles:
            place.want(3)
            assert node_of_a_victim(place, operator, other_than=serving) == gone
            after.callback(bring_back, place, gone)
            place.cluster.nodes[gone].stop()
            wait_until(lambda: len(place.running(INFERENCE, node=serving)) == 2, PATIENCE_S, operator.words)
            place.kubectl("uncordon", spare)
            wait_until(lambda: place.running(INFERENCE, node=spare), PATIENCE_S, operator.words)
            wait_until(
                lambda: not any(place.pods(kind, node=gone, leaving=True) for kind in (CLEANING, INFERENCE)),
                PATIENCE_S,
                operator.words,
            )
            wait_until(lambda: phases(place) <= {"Serving", "Freed"}, PATIENCE_S, lambda: str(place.reclaims()))
            place.want(1)
            wait_until(lambda: (place.status(job).get("items") or {}).get("done") == SOME, 240, operator.words)
            # The new keeper is asked about the others, and what it says is written.
            wait_until(lambda: all(one["outcome"] != "Leaving" for one in victims(place)), PATIENCE_S, operator.words)

        outcomes = {one["pod"]: one["outcome"] for one in victims(place)}
        on_it = {one["pod"] for record in place.reclaims() for one in record["spec"]["victims"] if one["node"] == gone}
        assert doubles.found == set()
        assert on_it
        assert {outcomes[pod] for pod in on_it} == {"Unverified"}
        assert set(outcomes) - on_it, "another one went instead"
        assert {outcomes[pod] for pod in set(outcomes) - on_it} == {"Checkpointed"}
        report = place.verify(job)
        assert (report["items_done"], report["items_lost"], report["items_doubled"]) == (SOME, 0, 0)


def bring_back(place: Site, node: str) -> None:
    place.cluster.nodes[node].start()
    place.cluster.wait_ready(node)


def node_of_a_victim(place: Site, operator: OperatorProcess, *, other_than: str = "") -> str:
    """Where a worker has been told to go, at the moment at which that is known."""
    found: list[str] = []

    def is_known() -> bool:
        told = [victim["node"] for record in place.reclaims() for victim in record["spec"]["victims"]]
        found.extend(node for node in told if node != other_than)
        return bool(found)

    wait_until(is_known, PATIENCE_S, operator.words)
    return found[0]


def phases(place: Site) -> set[str]:
    return {(record.get("status") or {}).get("phase", "?") for record in place.reclaims()}


def victims(place: Site) -> list[Object]:
    return [one for record in place.reclaims() for one in (record.get("status") or {}).get("victims", ())]
