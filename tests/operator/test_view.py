"""What a person sees in a terminal: the status, the demo's live view and its plain lines."""

from typing import Any

import pytest
from rich.console import Console

from slackwater_operator import view
from slackwater_operator.demo.player import Outcome, Played
from slackwater_operator.demo.result import Recording
from slackwater_operator.demo.run import Progress
from slackwater_operator.demo.watch import PlainLines, picture

RECLAIM = {
    "uid": "speech-24k-12",
    "reason": "traffic",
    "decided_s": 90.0,
    "freed_s": 90.4,
    "took_s": 0.4,
    "outcome": "checkpointed",
    "verified": True,
    "items": 1234,
    "lost_s": 0.0,
}


def document(**changes: Any) -> dict[str, Any]:
    """A busy machine's status."""
    return {
        "t_s": 100.0,
        "slots": [
            {
                "slot": 0,
                "flavor": "cpu",
                "holder": "inference",
                "uid": "tts-1",
                "phase": "running",
                "since_s": 61.2,
                "decode_slots": 4,
                "doing": "3/4 streams",
            },
            {
                "slot": 1,
                "flavor": "cpu",
                "holder": "cleaning",
                "uid": "speech-24k-13",
                "phase": "leaving",
                "since_s": 3599.0,
                "doing": "leaving for traffic: 12345 items, 98765 s of audio",
            },
            {"slot": 2, "flavor": "cpu", "holder": "free"},
        ],
        "standby": 1,
        "traffic": {"in_flight": 3, "queued": 2, "first_audio_p95_s": 0.254, "arrival_rps": 12.34},
        "need_replicas": {"tts": 2},
        "conditions": [],
        "jobs": [
            {"name": "speech-24k", "state": "open", "message": "", "items_done": 1200, "items_total": 2400},
            {"name": "speech-16k", "state": "failed", "message": "no space left on the ledger's disk"},
        ],
        "reclaims": [RECLAIM],
        "reclaims_total": 1,
        "accounts": {"useful_ratio": 0.734, "useful_ratio_without_filling": 0.341},
        "running": True,
    } | changes


def shown(what: Any, width: int = 80) -> str:
    console = Console(width=width, force_terminal=False, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(what)
    return console.export_text()


def progress(*, played: int = 0, failed: int = 0, **changes: Any) -> Progress:
    recording = Recording()
    recording.add(document(), 5.0)
    answers = [
        Played(0.0, 100, 0.0, 0.2, 1.0, 9000, 200, Outcome.FAILED if number < failed else Outcome.OK, 0)
        for number in range(played)
    ]
    return Progress("traffic", 5.0, document(**changes), recording.moments, answers, 86)


def test_every_line_fits_80_columns() -> None:
    lines = [*shown(view.render(document())).splitlines(), *shown(picture(progress(played=3))).splitlines()]

    assert max(len(line.rstrip()) for line in lines) <= 80


def test_the_headline_says_who_holds_the_slots_and_how_useful_they_are() -> None:
    said = shown(view.headline(document()))

    assert "3 slots: 1 speech, 1 cleaning, 1 free" in said
    assert "useful 73% (speech alone 34%)" in said
    assert "not running" not in shown(view.render(document()))


def test_a_supervisor_that_ended_is_said_to_have_ended() -> None:
    assert "The supervisor is not running" in shown(view.render(document(running=False)))


def test_conditions_are_shown_by_name() -> None:
    assert "SignalsStale" in shown(view.traffic(document(conditions=["SignalsStale"])))


def test_before_the_first_signal_no_traffic_is_invented() -> None:
    quiet = {"in_flight": None, "queued": None, "first_audio_p95_s": None, "arrival_rps": 0.0}

    assert "no gateway yet" in shown(view.traffic(document(traffic=quiet)))


def test_a_failed_job_shows_why_and_an_open_one_how_far_it_is() -> None:
    said = shown(view.jobs(document()))

    assert "no space left" in said
    assert "50%" in said


@pytest.mark.parametrize(
    ("values", "bars"),
    [([0, 4, 8], "▁▅█"), ([], ""), ([1.0] * 5, "▂▂▂"), ([99.0], "█")],
    ids=["rise", "none", "cut", "over"],
)
def test_a_sparkline_is_cut_to_the_newest_and_capped(values: list[float], bars: str) -> None:
    assert view.sparkline(values, 3, 8.0) == bars


def test_plain_lines_tell_each_eviction_once() -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    lines = PlainLines(console)

    lines(progress())
    lines(progress(reclaims=[RECLAIM, RECLAIM | {"uid": "speech-24k-14"}], reclaims_total=2))
    lines(progress(reclaims=[RECLAIM, RECLAIM | {"uid": "speech-24k-14"}], reclaims_total=2))

    said = console.export_text()
    assert said.count("speech-24k-12 left in 0.40 s") == 1
    assert said.count("speech-24k-14 left in 0.40 s") == 1


def test_the_load_line_shows_the_whole_run_from_its_first_moment() -> None:
    recording = Recording()
    for number in range(100):
        busy = document()["traffic"] | {"in_flight": 8 if number == 0 else 0, "queued": 0}
        recording.add(document(traffic=busy), number / 4)

    said = shown(picture(Progress("traffic", 25.0, document(), recording.moments, [], 86)))

    assert "requests  █▁" in said


def test_failures_stand_in_the_live_view() -> None:
    said = shown(picture(progress(played=5, failed=2)))

    assert "3 of 86 requests answered" in said
    assert "2 failed" in said
