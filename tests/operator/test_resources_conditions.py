"""Conditions come from closed sets, and their transition time says since when."""

from datetime import UTC, datetime, timedelta

import pytest

from slackwater_operator.core import Condition as PlanCondition
from slackwater_operator.resources import names
from slackwater_operator.resources.base import Condition
from slackwater_operator.resources.conditions import CONDITIONS, EventReason, complete, set_condition, status_of

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
LATER = NOON + timedelta(minutes=5)
JOB = names.CLEANING_JOB


def progressing(reason: str, now: datetime, before: tuple[Condition, ...] = ()) -> tuple[Condition, ...]:
    return set_condition(JOB, before, "Progressing", reason, "3 workers", now=now, generation=2)


def test_the_reason_decides_the_status() -> None:
    [condition] = progressing("WorkersRunning", NOON)

    assert (condition.status, condition.reason, condition.message) == ("True", "WorkersRunning", "3 workers")
    assert (condition.last_transition_time, condition.observed_generation) == (NOON, 2)


def test_another_reason_of_the_same_status_is_no_transition() -> None:
    [condition] = progressing("WorkersStarting", LATER, progressing("WorkersRunning", NOON))

    assert (condition.reason, condition.last_transition_time) == ("WorkersStarting", NOON)


def test_another_status_is_a_transition() -> None:
    [condition] = progressing("Suspended", LATER, progressing("WorkersRunning", NOON))

    assert (condition.status, condition.last_transition_time) == ("False", LATER)


def test_the_other_conditions_stay_in_their_places() -> None:
    every = complete(JOB, (), now=NOON, generation=1)

    changed = set_condition(JOB, every, "Failed", "BadConfiguration", now=LATER, generation=1)

    assert [one.type for one in changed] == [one.type for one in every]
    assert [one for one in changed if one.type != "Failed"] == [one for one in every if one.type != "Failed"]


def test_every_condition_stands_there_from_the_first_look() -> None:
    known = progressing("WorkersRunning", NOON)

    every = complete(JOB, known, now=LATER, generation=2)

    assert {one.type for one in every} == CONDITIONS["CleaningJob"].keys()
    assert {one.status for one in every if one.type != "Progressing"} == {"Unknown"}
    assert known[0] in every


def test_a_reason_or_type_outside_the_closed_set_is_our_own_fault() -> None:
    with pytest.raises(ValueError, match="CleaningJob Progressing has no reason Tired"):
        status_of(JOB, "Progressing", "Tired")
    with pytest.raises(ValueError, match="CleaningJob has no condition Happy"):
        status_of(JOB, "Happy", "Tired")


def test_each_kind_has_a_set_and_each_condition_a_good_state() -> None:
    assert CONDITIONS.keys() == {kind.kind for kind in names.KINDS}
    for types in CONDITIONS.values():
        for reasons in types.values():
            assert "True" in reasons.values()


def test_conditions_of_a_plan_are_reasons_under_the_same_name() -> None:
    reasons = {reason for types in CONDITIONS.values() for one in types.values() for reason in one}

    assert {condition.value for condition in PlanCondition} <= reasons


def test_a_condition_that_an_event_announces_has_the_same_reason() -> None:
    reasons = {reason for types in CONDITIONS.values() for one in types.values() for reason in one}

    shared = {EventReason.REFUSED, EventReason.RECLAIM_DEADLINE_EXCEEDED, EventReason.SIGNALS_STALE}
    shared |= {EventReason.UNMET_NEED, EventReason.GATE_FAILED, EventReason.WORK_LOST, EventReason.FAILED}

    assert {reason.value for reason in shared} <= reasons


@pytest.mark.parametrize("uid", ["serving/tts", "serving/tts-x7k2p"])
def test_only_the_uid_of_a_variant_has_four_parts(uid: str) -> None:
    assert names.split_variant_uid(uid) is None
    assert names.split_variant_uid(names.variant_uid("serving", "tts", "east", "h200")) == (
        "serving",
        "tts",
        "east",
        "h200",
    )
