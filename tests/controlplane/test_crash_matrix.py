"""What breaks around the operator in the midst of a take-back: its network, the store, its wall clock.

The real process on a real API server, with nodes of kwok and a keeper that verifies.  README.md lists which fault is
tested where.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from glob import glob
from pathlib import Path

import pytest

from slackwater_controlplane.build import Programs
from slackwater_controlplane.doubles import Doubles
from slackwater_controlplane.flags import ETCD
from slackwater_controlplane.keeper import Keeper, worker_notes
from slackwater_controlplane.kwok import PRODUCT
from slackwater_controlplane.link import Link
from slackwater_controlplane.operator_rig import ACCOUNT, FLEET, GROUPS, SLOTS, Object, Rig, all_words, new_rig
from slackwater_operator.kube.types import parse_stamp
from slackwater_operator.resources import names
from slackwater_operator.resources.base import seconds
from slackwater_operator.testing.processes import OperatorProcess, wait_until
from slackwater_operator.testing.resources import a_flavor, a_job, a_pool, a_service

pytestmark = [pytest.mark.controlplane, pytest.mark.long, pytest.mark.timeout(300)]

GPUS = 8
CUT_S = 30.0
FLUSH_S = 5.0  # of a worker: long enough for something to happen meanwhile
FAILOVER_S = 10.0
RECLAIMS = "reclaims.slackwater.dev"


@pytest.fixture(scope="module")
def shared_rig(controlplane_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with new_rig(controlplane_programs, tmp_path_factory.mktemp("crash")) as rig:
        yield rig


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper()
    yield keeper
    keeper.close()


@pytest.fixture
def rig(shared_rig: Rig, keeper: Keeper, tmp_path: Path) -> Iterator[Rig]:
    """Two nodes, a service and a job whose preemptions are verified."""
    rig = shared_rig
    rig.folder = tmp_path
    rig.gateway.say(in_flight=0, queued=0)
    rig.kwok.add_nodes(2, gpus=GPUS // 2)
    rig.admin.create(a_flavor(nodeSelector={PRODUCT: "NVIDIA-H200"}))
    rig.admin.create(a_pool(lending={"lendAfter": "1s"}, reclaim={"deadline": "25s", "retargetAfter": "20s"}))
    variants = [{"flavor": "h200", "slotsPerReplica": SLOTS}]
    service = {"gateway": {"controlURL": rig.gateway.real.url}, "variants": variants, "maxReplicas": 3}
    rig.admin.create(a_service(namespace=FLEET, **service))
    worker = {"name": names.WORKER_CONTAINER, "image": "worker:1"}
    template = {
        "metadata": {"annotations": worker_notes(FLUSH_S)},
        "spec": {"terminationGracePeriodSeconds": 20, "containers": [worker]},
    }
    job = a_job(namespace=FLEET, ledger=None, keeper={"url": keeper.real.url}, maxWorkers=GPUS, template=template)
    rig.admin.create(job)
    yield rig
    rig.clean()


def leave_slowly(rig: Rig) -> None:
    """Workers that are still there when another has begun to lead, which then sees how they end."""
    notes = {"metadata": {"annotations": worker_notes(15.0)}}
    rig.admin.patch("cleaningjobs.slackwater.dev", "podcasts", {"spec": {"template": notes}}, FLEET)


def demand(rig: Rig, replicas: int) -> None:
    """So much traffic that this many replicas are needed, and no more however steeply it rose."""
    rig.admin.patch("inferencedeployments.slackwater.dev", "tts", {"spec": {"maxReplicas": replicas}}, FLEET)
    rig.gateway.say(in_flight=replicas * SLOTS, queued=0, arrivals_total=replicas * SLOTS)


def begin_take_back(rig: Rig, leader: OperatorProcess, other: OperatorProcess) -> None:
    """Cleaning everywhere, the other replica ready to lead; then two workers are told to leave."""
    wait_until(lambda: rig.bound("cleaning") == GPUS - 1, 60, all_words(leader, other))
    wait_until(lambda: other.health()[0] == 200, 60, all_words(other))
    demand(rig, 3)
    wait_until(lambda: len(leaving(rig)) == 2, 30, all_words(leader, other))


def reclaims(rig: Rig) -> list[Object]:
    return rig.admin.list(RECLAIMS, FLEET)


def leaving(rig: Rig) -> list[Object]:
    pods = rig.admin.list("pods", FLEET, labels=f"{names.LABEL_KIND}={names.POD_CLEANING}")
    return [pod for pod in pods if pod["metadata"].get("deletionTimestamp")]


def is_finished(rig: Rig) -> bool:
    """Every record has its last phase."""
    phases = [one.get("status", {}).get("phase") for one in reclaims(rig)]
    return bool(phases) and set(phases) <= {"Serving", "Freed", "Cancelled"}


def victims(rig: Rig) -> list[Object]:
    return [victim for one in reclaims(rig) for victim in (one.get("status") or {}).get("victims", ())]


def outcomes(rig: Rig) -> set[tuple[str, object]]:
    return {(victim["outcome"], victim.get("verified")) for victim in victims(rig)}


def state(rig: Rig, *operators: OperatorProcess) -> Callable[[], str]:
    return lambda: (
        f"{[(one['metadata']['name'], one.get('status')) for one in reclaims(rig)]}\n{all_words(*operators)()}"
    )


def writes_by(rig: Rig, replica: str, since: int) -> list[str]:
    """What a replica changed, but for its Lease and what it says about what was.

    Requests that it gave up on reach the server with their connection's end.  It answers 504, which does not say
    whether it has carried one out; the records tell.
    """
    return [
        f"{event.verb} {event.uri} -> {event.code}"
        for event in rig.plane.audit(since)
        if event.user == ACCOUNT
        and f"({replica}" in event.user_agent
        and event.verb not in ("get", "list", "watch")
        and event.resource not in ("leases", "events")
        and "dryRun=" not in event.uri
        and event.code < 400
    ]


@contextmanager
def behind(rig: Rig, name: str) -> Iterator[tuple[OperatorProcess, Link]]:
    """A replica whose way to the API server can be cut."""
    with Link(rig.plane.url) as link:
        kubeconfig = rig.folder / f"{name}.yaml"
        kubeconfig.write_text(rig.plane.kubeconfig(ACCOUNT, GROUPS).read_text().replace(rig.plane.url, link.url))
        with OperatorProcess(name, kubeconfig, rig.folder, os.environ) as one:
            yield one, link


def test_a_leader_cut_off_for_half_a_minute_in_a_take_back_is_followed_and_writes_nothing_more(rig: Rig) -> None:
    leave_slowly(rig)
    with behind(rig, "one") as (one, link), Doubles(rig.plane) as doubles:
        wait_until(one.leads, 60, all_words(one))
        with rig.operator("two") as two:
            begin_take_back(rig, one, two)

            link.cut()
            cut_s, since = time.monotonic(), rig.plane.audit_position()
            wait_until(two.leads, 30, all_words(one, two))
            led_s = time.monotonic() - cut_s
            wait_until(lambda: rig.bound("inference") == 3 and is_finished(rig), 30, state(rig, one, two))
            time.sleep(max(0.0, CUT_S - (time.monotonic() - cut_s)))
            link.mend()
            wait_until(lambda: one.health()[0] == 200 and not one.leads(), 30, all_words(one))
            time.sleep(5)

            assert led_s <= FAILOVER_S
            assert writes_by(rig, "one", since) == []
            assert two.leads()
            assert doubles.found == set()
            assert doubles.looks > 50
            assert (rig.bound("inference"), rig.bound("cleaning")) == (3, GPUS - 3)
            assert len(victims(rig)) == 2
            assert outcomes(rig) == {("Checkpointed", True)}


@pytest.mark.parametrize(
    "workers",
    [pytest.param(GPUS, id="a take-back that is about to begin"), pytest.param(3, id="starts on idle GPUs")],
)
def test_what_a_leader_sent_into_a_cut_line_does_no_harm_when_it_arrives(rig: Rig, workers: int) -> None:
    rig.admin.patch("cleaningjobs.slackwater.dev", "podcasts", {"spec": {"maxWorkers": workers}}, FLEET)
    filled = min(workers, GPUS - 1)
    with behind(rig, "one") as (one, link), Doubles(rig.plane) as doubles:
        wait_until(one.leads, 60, all_words(one))
        with rig.operator("two") as two:
            wait_until(lambda: rig.bound("cleaning") == filled, 60, all_words(one, two))
            wait_until(lambda: two.health()[0] == 200, 60, all_words(two))
            wait_until(lambda: rig.bound("inference") == 1, 60, all_words(one, two))
            time.sleep(3)

            link.cut()
            cut_s = time.monotonic()
            demand(rig, 3)
            wait_until(lambda: rig.bound("inference") == 3, 45, state(rig, one, two))
            time.sleep(max(0.0, CUT_S - (time.monotonic() - cut_s)))
            since = rig.plane.audit_position()
            link.mend()
            wait_until(lambda: one.health()[0] == 200 and not one.leads(), 30, all_words(one))
            time.sleep(8)

            late = writes_by(rig, "one", since)
            assert doubles.found == set(), late
            assert (rig.bound("inference"), rig.bound("cleaning")) == (3, min(workers, GPUS - 3)), late
            assert len(victims(rig)) == max(0, filled - (GPUS - 3)), late
            assert outcomes(rig) <= {("Checkpointed", True)}


@pytest.mark.parametrize(
    ("stopped_s", "runs_s"),
    [pytest.param(0.15, 0.05, id="slow all the time"), pytest.param(2.0, 1.0, id="stalls of two seconds")],
)
def test_a_take_back_ends_well_on_a_slow_store(rig: Rig, stopped_s: float, runs_s: float) -> None:
    with rig.operator("one") as one, rig.operator("two") as two, Doubles(rig.plane) as doubles:
        both = (one, two)
        wait_until(lambda: rig.bound("cleaning") == GPUS - 1 and rig.bound("inference") == 1, 60, all_words(*both))

        with slow_store(rig, stopped_s, runs_s):
            demand(rig, 3)
            wait_until(lambda: rig.bound("inference") == 3 and is_finished(rig), 90, state(rig, *both))
        time.sleep(5)

        assert doubles.found == set()
        assert doubles.looks > 5
        assert (rig.bound("inference"), rig.bound("cleaning")) == (3, GPUS - 3)
        assert len(victims(rig)) == 2
        # What a worker left behind while nobody led, nobody can say.
        unseen = {("Unverified", None)} if sum(each.words().count(" leading identity=") for each in both) > 1 else set()
        assert outcomes(rig) <= {("Checkpointed", True)} | unseen
        assert [one.leads(), two.leads()].count(True) == 1


@contextmanager
def slow_store(rig: Rig, stopped_s: float, runs_s: float) -> Iterator[None]:
    """etcd stands still again and again."""
    stop, go_on = partial(rig.plane.pause, ETCD), partial(rig.plane.resume, ETCD)
    with again_and_again(stop, stopped_s, go_on, runs_s):
        yield


@contextmanager
def again_and_again(
    break_it: Callable[[], object], for_s: float, mend: Callable[[], object], rest_s: float
) -> Iterator[None]:
    """Something is broken, and mended, and broken: all through the block, and mended at its end."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            break_it()
            over.wait(for_s)
            mend()
            over.wait(rest_s)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


def test_a_take_back_ends_well_though_the_server_is_full_again_and_again(rig: Rig) -> None:
    with rig.operator("one") as one, Doubles(rig.plane) as doubles:
        wait_until(lambda: rig.bound("cleaning") == GPUS - 1 and rig.bound("inference") == 1, 60, all_words(one))
        since = rig.plane.audit_position()

        with full_server(rig, full_s=4.0, free_s=1.5):
            time.sleep(2)  # until the server knows
            demand(rig, 3)
            wait_until(lambda: rig.bound("inference") == 3 and is_finished(rig), 90, state(rig, one))
        time.sleep(5)

        refused = [event for event in rig.plane.audit(since) if event.user == ACCOUNT and event.code == 429]
        assert {event.resource for event in refused} & {"pods", "reclaims"}
        assert doubles.found == set()
        assert len(victims(rig)) == 2
        assert outcomes(rig) == {("Checkpointed", True)}
        assert (rig.bound("inference"), rig.bound("cleaning")) == (3, GPUS - 3)
        assert one.words().count(" leading identity=") == 1


@contextmanager
def full_server(rig: Rig, full_s: float, free_s: float) -> Iterator[None]:
    """Again and again the API server has no seat for what the operator writes, its Lease apart, and answers 429."""
    level = {
        "apiVersion": "flowcontrol.apiserver.k8s.io/v1",
        "kind": "PriorityLevelConfiguration",
        "metadata": {"name": "full"},
        "spec": {
            "type": "Limited",
            "limited": {
                "nominalConcurrencyShares": 0,
                "borrowingLimitPercent": 0,
                "limitResponse": {"type": "Reject"},
            },
        },
    }
    account = {"name": ACCOUNT.rsplit(":", 1)[1], "namespace": ACCOUNT.rsplit(":", 2)[1]}
    writes = {
        "verbs": ["create", "patch", "delete", "update"],
        "apiGroups": ["", names.GROUP],
        "resources": ["*"],
        "namespaces": ["*"],
        "clusterScope": True,
    }
    schema = {
        "apiVersion": "flowcontrol.apiserver.k8s.io/v1",
        "kind": "FlowSchema",
        "metadata": {"name": "full"},
        "spec": {
            "priorityLevelConfiguration": {"name": "full"},
            "matchingPrecedence": 2,
            "rules": [{"subjects": [{"kind": "ServiceAccount", "serviceAccount": account}], "resourceRules": [writes]}],
        },
    }
    free = partial(rig.admin.delete, "flowschemas.flowcontrol.apiserver.k8s.io", "full")
    rig.admin.create(level)
    try:
        with again_and_again(partial(rig.admin.create, schema), full_s, free, free_s):
            yield
    finally:
        rig.admin.delete("prioritylevelconfigurations.flowcontrol.apiserver.k8s.io", "full")


@pytest.mark.parametrize("by_s", [pytest.param(3600, id="an hour ahead"), pytest.param(-3600, id="an hour back")])
def test_a_wall_clock_that_is_set_in_a_take_back_moves_nobody(rig: Rig, by_s: int) -> None:
    with wrong_clock(rig, "one") as (one, set_clock), Doubles(rig.plane) as doubles:
        wait_until(one.leads, 60, all_words(one))
        with rig.operator("two") as two:
            begin_take_back(rig, one, two)

            set_clock(by_s)
            took_s = wait_until(lambda: rig.bound("inference") == 3 and is_finished(rig), 60, state(rig, one, two))
            demand(rig, 4)
            wait_until(lambda: rig.bound("inference") == 4 and is_finished(rig), 60, state(rig, one, two))
            time.sleep(2 * FAILOVER_S)

            assert took_s < 2 * FLUSH_S
            assert (one.leads(), two.leads()) == (True, False)
            assert abs(lease_age_s(rig) - by_s) < 60
            assert doubles.found == set()
            assert len(victims(rig)) == 3
            assert outcomes(rig) == {("Checkpointed", True)}
            assert {rig.condition(record, "InTime")["status"] for record in reclaims(rig)} == {"True"}
            assert (rig.bound("inference"), rig.bound("cleaning")) == (4, GPUS - 4)


@pytest.mark.parametrize("by_s", [pytest.param(3600, id="an hour ahead"), pytest.param(-3600, id="an hour back")])
def test_a_new_leader_whose_wall_clock_is_wrong_finishes_what_the_last_one_began(rig: Rig, by_s: int) -> None:
    leave_slowly(rig)
    with rig.operator("one") as one, Doubles(rig.plane) as doubles:
        wait_until(one.leads, 60, all_words(one))
        with wrong_clock(rig, "two", by_s) as (two, _):
            begin_take_back(rig, one, two)

            one.kill()
            wait_until(two.leads, 15, all_words(one, two))
            led_with = len(leaving(rig))
            wait_until(lambda: rig.bound("inference") == 3 and is_finished(rig), 60, state(rig, one, two))
            time.sleep(5)

            assert led_with == 2, "the new leader was there before the workers were gone"
            assert doubles.found == set()
            assert [record["status"]["phase"] for record in reclaims(rig)] == ["Serving"]
            assert len(victims(rig)) == 2
            assert outcomes(rig) == {("Checkpointed", True)}
            assert {rig.condition(record, "InTime")["status"] for record in reclaims(rig)} == {"True"}
            assert 10 < seconds(reclaims(rig)[0]["status"]["took"]) < 25
            assert (rig.bound("inference"), rig.bound("cleaning")) == (3, GPUS - 3)


def lease_age_s(rig: Rig) -> float:
    """How far ahead of the real time the leader's clock is, by what it writes: the jump has reached it."""
    lease = rig.admin.get("leases.coordination.k8s.io", names.LEASE, names.OPERATOR_NAMESPACE)
    return parse_stamp(lease["spec"]["renewTime"]) - time.time()


@contextmanager
def wrong_clock(rig: Rig, name: str, by_s: int = 0) -> Iterator[tuple[OperatorProcess, Callable[[int], None]]]:
    """A replica whose wall clock can be set, and how; its monotonic clock goes on as it should."""
    if (library := next(iter(glob("/usr/lib/*/faketime/libfaketimeMT.so.1")), None)) is None:
        pytest.skip("needs libfaketime: apt-get install faketime")
    file = rig.folder / f"{name}.clock"
    faked = {
        "LD_PRELOAD": library,
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }

    def set_clock(seconds: int) -> None:
        # In one step: it is read at each look at the clock.
        fresh = file.with_suffix(".new")
        fresh.write_text(f"{seconds:+d}\n")
        fresh.replace(file)

    set_clock(by_s)
    kubeconfig = rig.plane.kubeconfig(ACCOUNT, GROUPS)
    with OperatorProcess(name, kubeconfig, rig.folder, {**os.environ, **faked}) as one:
        yield one, set_clock
