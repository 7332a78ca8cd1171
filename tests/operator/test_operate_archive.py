"""Which records of take-backs are old enough to be deleted."""

from datetime import UTC, datetime

from slackwater_operator.kube.types import Object
from slackwater_operator.operate.archive import KEEP_COUNT, KEEP_S, YOUNG_S, outdated
from slackwater_operator.testing.resources import a_question, a_reclaim

DAY_S = 1_796_032_800.0


def record(name: str, age_s: float, phase: str, *, asks: bool = False) -> Object:
    made = a_question(name) if asks else a_reclaim(name)
    made["metadata"]["creationTimestamp"] = datetime.fromtimestamp(DAY_S - age_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    made["status"] = {"phase": phase}
    return made


def test_records_are_kept_for_a_day_and_one_that_is_not_over_for_ever() -> None:
    listed = [
        record("old", KEEP_S + 1, "Serving"),
        record("older", KEEP_S + 2, "Freed"),
        record("open", KEEP_S + 3, "Signalled"),
        record("new", 10.0, "Serving"),
        record("question", KEEP_S + 4, "Answered", asks=True),
    ]

    assert [one["metadata"]["name"] for one in outdated(listed, DAY_S)] == ["question", "older", "old"]


def test_of_very_many_records_the_oldest_go_once_they_are_an_hour_old() -> None:
    listed = [record(f"r-{index}", YOUNG_S + index, "Serving") for index in range(KEEP_COUNT + 2)]
    fresh = [record(f"f-{index}", 1.0 + index, "Serving") for index in range(KEEP_COUNT)]

    assert len(outdated(listed, DAY_S)) == 2
    assert outdated(fresh + fresh, DAY_S) == []
