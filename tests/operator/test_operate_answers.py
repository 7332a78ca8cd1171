"""Dry runs: how long a question waits for the traffic that it is about, and what its conditions say then."""

from typing import Any

import pytest

from slackwater_operator.core import Snapshot, Variant
from slackwater_operator.kube.types import Object
from slackwater_operator.operate.statuses.answers import answer, is_open
from slackwater_operator.resources import Reclaim, parse
from slackwater_operator.testing import cases
from slackwater_operator.testing.resources import a_question, a_reclaim

ASKED = "2026-11-30T10:00:00Z"
SOON = "2026-11-30T10:00:03Z"
LATE = "2026-11-30T10:00:30Z"
VARIANT = Variant("default/tts/east/h200", "east/h200", 4, 2.0)


def fleet(*, stale: bool = False, free: int = 0, services: bool = True) -> Snapshot:
    service = cases.service(cases.load(4.0, stale=stale), name="default/tts", variants=(VARIANT,), least=1)
    replica = cases.replica("default/tts-1", owner="default/tts", flavor="east/h200", running=4)
    workers = [
        cases.worker(f"default/w-{at}", unsafe_s=float(at), owner="default/clean", flavor="east/h200")
        for at in range(4)
    ]
    return cases.snapshot(
        [cases.node(5 + free, free, flavor="east/h200")],
        [replica, *workers],
        [service] if services else [],
        [cases.job("default/clean", flavors=("east/h200",), checkpoint_s=8.0)],
    )


def status_of(snapshot: Snapshot, now: str = SOON, **given: Any) -> Object:
    obj = a_question(**given)
    obj["metadata"] |= {"creationTimestamp": ASKED, "generation": 1}
    status = answer(obj, parse(Reclaim, obj), snapshot, now, lambda *_: None)
    assert parse(Reclaim, {**obj, "status": status}).status.phase == status.get("phase")
    return status


def condition(status: Object, type_: str) -> tuple[str, str, str]:
    [one] = [one for one in status["conditions"] if one["type"] == type_]
    return one["status"], one["reason"], one["message"]


def test_known_traffic_is_answered_at_once() -> None:
    status = status_of(fleet())

    assert status["phase"] == "Answered"
    assert [worker["pod"] for worker in status["answer"]["workers"]] == ["default/w-0", "default/w-1"]
    assert condition(status, "Answered")[:2] == ("True", "Answered")


@pytest.mark.parametrize(
    ("snapshot", "awaited"),
    [
        (fleet(stale=True), "the gateway of default/tts has not said how much traffic there is"),
        (fleet(services=False), "there is no service default/tts yet"),
    ],
    ids=["a silent gateway", "no service"],
)
def test_what_is_not_known_yet_is_waited_for_and_named(snapshot: Snapshot, awaited: str) -> None:
    status = status_of(snapshot)

    assert "phase" not in status
    said = f"{awaited}; the answer waits for it until 10:00:30 UTC at the latest"
    assert condition(status, "Answered") == ("Unknown", "NotSeen", said)
    assert is_open({**a_question(), "status": status})


def test_the_wait_has_an_end() -> None:
    guessed = status_of(fleet(stale=True), LATE)
    failed = status_of(fleet(services=False), LATE)

    assert guessed["phase"] == "Answered"
    said = condition(guessed, "Answered")[2]
    assert said.endswith("no traffic was known within 30 s, so every replica was taken for full")
    assert failed["phase"] == "Failed"
    assert condition(failed, "Answered")[:2] == ("False", "CannotAnswer")


def test_every_condition_of_a_dry_run_says_something() -> None:
    status = status_of(fleet())

    assert condition(status, "InTime")[2].endswith("the slowest worker would be gone in 8s")
    assert condition(status, "Lossless")[1:] == (
        "NotVerified",
        "a dry run: nobody was asked to leave; 1 GPU-seconds would be worked again, and what is durable stays",
    )


def test_a_dry_run_that_stops_nobody_says_so() -> None:
    status = status_of(fleet(free=4))

    assert status["answer"]["workers"] == []
    assert condition(status, "InTime")[2] == "a dry run, and no worker would have to leave"


@pytest.mark.parametrize(
    ("obj", "expected"),
    [
        (a_question(), True),
        (a_question() | {"status": {"phase": "Answered"}}, False),
        (a_reclaim(), False),
    ],
    ids=["asked", "answered", "a take-back"],
)
def test_a_question_is_open_until_it_has_a_phase(obj: Object, expected: bool) -> None:
    assert is_open(obj) is expected
