"""What breaks around the operator in the midst of a take-back: its network and its wall clock.

The real process on a real API server, with nodes of kwok and a keeper that verifies.  test_crash_server.py has
the API server's own faults, README.md lists which fault is tested where.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path

import pytest

from slackwater_controlplane.build import Programs
from slackwater_controlplane.doubles import Doubles
from slackwater_controlplane.keeper import worker_notes
from slackwater_controlplane.link import Link
from slackwater_controlplane.operator_rig import ACCOUNT, FLEET, GROUPS, Rig, all_words, new_rig
from slackwater_controlplane.take_back import (
    FLUSH_S,
    GPUS,
    begin_take_back,
    demand,
    is_finished,
    leaving,
    outcomes,
    prepared,
    reclaims,
    state,
    victims,
)
from slackwater_operator.kube.types import parse_stamp
from slackwater_operator.resources import names
from slackwater_operator.resources.base import seconds
from slackwater_operator.testing.processes import OperatorProcess, wait_until

pytestmark = [pytest.mark.controlplane, pytest.mark.long, pytest.mark.timeout(300)]

CUT_S = 30.0
FAILOVER_S = 10.0


@pytest.fixture(scope="module")
def shared_rig(controlplane_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with new_rig(controlplane_programs, tmp_path_factory.mktemp("crash")) as rig:
        yield rig


@pytest.fixture
def rig(shared_rig: Rig, tmp_path: Path) -> Iterator[Rig]:
    with prepared(shared_rig, tmp_path) as rig:
        yield rig


def leave_slowly(rig: Rig) -> None:
    """Workers that are still there when another has begun to lead, which then sees how they end."""
    notes = {"metadata": {"annotations": worker_notes(15.0)}}
    rig.admin.patch("cleaningjobs.slackwater.dev", "podcasts", {"spec": {"template": notes}}, FLEET)


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
