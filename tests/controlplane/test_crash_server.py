"""What the API server and its store do in the midst of a take-back: stand still, be full, be written to by others.

The real process on a real API server, as in test_crash_matrix.py.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from slackwater_controlplane.build import Programs
from slackwater_controlplane.client import ApiError
from slackwater_controlplane.doubles import Doubles
from slackwater_controlplane.flags import ETCD
from slackwater_controlplane.operator_rig import ACCOUNT, FLEET, Rig, all_words, new_rig
from slackwater_controlplane.take_back import (
    GPUS,
    RECLAIMS,
    demand,
    is_finished,
    outcomes,
    prepared,
    reclaims,
    state,
    victims,
)
from slackwater_operator.resources import names
from slackwater_operator.testing.processes import wait_until

pytestmark = [pytest.mark.controlplane, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def shared_rig(controlplane_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with new_rig(controlplane_programs, tmp_path_factory.mktemp("crash")) as rig:
        yield rig


@pytest.fixture
def rig(shared_rig: Rig, tmp_path: Path) -> Iterator[Rig]:
    with prepared(shared_rig, tmp_path) as rig:
        yield rig


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


def test_take_backs_end_well_though_others_write_to_their_records_and_workers_all_the_time(rig: Rig) -> None:
    with rig.operator("one") as one, Doubles(rig.plane) as doubles:
        wait_until(lambda: rig.bound("cleaning") == GPUS - 1 and rig.bound("inference") == 1, 60, all_words(one))
        since = rig.plane.audit_position()

        with others_write(rig):
            for replicas in (3, 5, 7):
                demand(rig, replicas)
                wait_until(lambda n=replicas: rig.bound("inference") == n and is_finished(rig), 60, state(rig, one))
        time.sleep(5)

        conflicts = [event for event in rig.plane.audit(since) if event.user == ACCOUNT and event.code == 409]
        assert "reclaims" in {event.resource for event in conflicts}
        assert doubles.found == set()
        assert len(victims(rig)) == 6
        assert outcomes(rig) == {("Checkpointed", True)}
        assert all("example.com/seen-by" in record["metadata"]["annotations"] for record in reclaims(rig))
        assert (rig.bound("inference"), rig.bound("cleaning")) == (7, GPUS - 7)
        assert one.words().count(" leading identity=") == 1


@contextmanager
def others_write(rig: Rig) -> Iterator[None]:
    """Other programs note something on each Reclaim and each worker as fast as the API server lets them.

    On workers until they are told to go: kwok begins to wait anew at each change of a pod.
    """
    over = threading.Event()

    def annotate(resource: str) -> None:
        turn = 0
        while not over.is_set():
            for one in rig.admin.list(resource, FLEET):
                if "deletionTimestamp" in one["metadata"]:
                    continue
                turn += 1
                note = {"metadata": {"annotations": {"example.com/seen-by": f"{threading.get_ident()}-{turn}"}}}
                with suppress(ApiError):  # it went meanwhile
                    rig.admin.patch(resource, one["metadata"]["name"], note, FLEET)

    # Mostly on records: what the operator has seen of one must be old by the time that it writes there.
    busy = (RECLAIMS, RECLAIMS, RECLAIMS, "pods")
    running = [threading.Thread(target=annotate, args=(resource,), daemon=True) for resource in busy]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in running:
            thread.join(10)
