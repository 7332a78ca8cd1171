"""What the demo makes of its run: the books, the verdict, the configuration."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slackwater_operator.config import Config
from slackwater_operator.demo.plan import SLOTS, Work, configuration
from slackwater_operator.demo.result import DemoResult, Eviction, JobResult, RequestRow, quantile
from slackwater_operator.demo.run import Books, ending
from slackwater_operator.demo.verdict import verdict

EVICTION = Eviction(1.0, "job-1", "traffic", 0.3, "checkpointed", True, 10)
ANSWERED = RequestRow(1.0, 100, "ok", 0.2, 1.0, 0, False)
JOB = JobResult("job", 100, 40, 60, 0, 0, 0)


def result(**changes: Any) -> DemoResult:
    """A run in which all holds."""
    held = DemoResult(
        started_at="2026-01-01T00:00:00+00:00",
        wall_s=90.0,
        machine="Linux",
        versions={},
        slots=4,
        trace="",
        verdict="",
        useful_ratio=0.7,
        useful_ratio_without_filling=0.35,
        gpu_seconds={},
        jobs=(JOB,),
        moments=(),
        requests=(ANSWERED,),
        evictions=(EVICTION,) * 3,
    )
    return replace(held, **changes)


def test_the_books_count_only_what_passed_between_the_two_moments() -> None:
    first = {"seconds": {"serving": 10.0, "background": 5.0, "free": 5.0}, "committed_s": 4.0}
    last = {"seconds": {"serving": 40.0, "background": 55.0, "free": 25.0}, "committed_s": 44.0}

    books = Books.between(first, last)

    assert books.useful_ratio == pytest.approx((30 + 40) / 100)
    assert books.useful_ratio_without_filling == pytest.approx(30 / 100)


def test_a_run_that_never_began_has_no_ratio() -> None:
    assert Books({}, 0.0).useful_ratio == 0.0


def test_a_run_in_which_all_holds_has_no_verdict() -> None:
    assert verdict(result(), filling=True) == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"verdict": "the supervisor ended"}, "the supervisor ended", id="earlier trouble"),
        pytest.param({"jobs": (replace(JOB, items_lost=1),)}, "1 items lost", id="lost"),
        pytest.param({"jobs": (replace(JOB, items_doubled=2),)}, "2 doubled", id="doubled"),
        pytest.param({"requests": (replace(ANSWERED, outcome="broken"),)}, "1 of 1 requests failed", id="broken"),
        pytest.param({"evictions": (EVICTION,) * 2}, "Only 2 slots", id="few evictions"),
        pytest.param({"evictions": (replace(EVICTION, reason="idle"),) * 3}, "Only 0 slots", id="other reasons"),
        pytest.param({"useful_ratio": 0.55}, "only 1.57 times", id="little gain"),
    ],
)
def test_the_verdict_names_what_does_not_hold(changes: dict[str, Any], said: str) -> None:
    assert said in verdict(result(**changes), filling=True)


def test_an_honest_refusal_is_no_failure() -> None:
    assert verdict(result(requests=(replace(ANSWERED, outcome="refused"),)), filling=True) == ""


def test_without_filling_no_eviction_is_expected() -> None:
    assert verdict(result(evictions=(), useful_ratio=0.35), filling=False) == ""


@pytest.mark.parametrize("filling", [True, False])
def test_the_configuration_is_one_that_slackwater_up_takes(tmp_path: Path, filling: bool) -> None:
    config = Config.model_validate(configuration(Work(tmp_path, tmp_path, 8080), filling=filling))

    assert config.slots.count == SLOTS
    assert bool(config.cleaning) == filling


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([3.0], 0.99, 3.0),
        ([1.0, 2.0, 3.0, 4.0], 0.5, 2.0),
        ([float(n) for n in range(1, 101)], 0.99, 99.0),
    ],
)
def test_a_quantile_is_a_value_that_was_measured(values: list[float], share: float, expected: float | None) -> None:
    assert quantile(values, share) == expected


def test_an_ending_is_said_in_words() -> None:
    assert (ending(-9), ending(2)) == ("signal SIGKILL", "exit code 2")


def test_the_report_holds_the_promised_figures_as_numbers() -> None:
    document = result().as_json()

    promised = {
        "items_done": 40,
        "items_lost": 0,
        "items_doubled": 0,
        "evictions": 3,
        "requests": 1,
        "requests_failed": 0,
        "useful_ratio": 0.7,
        "useful_ratio_without_filling": 0.35,
        "reclaim_p99_s": 0.3,
        "first_audio_p99_s": 0.2,
    }
    assert {name: document[name] for name in promised} == promised
    assert len(document["run"]["requests"]) == 1
