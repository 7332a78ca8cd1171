"""The report of a demo run: its numbers are the run's, its page is sound, its table fits a terminal."""

import itertools
import json
import re
import resource
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slackwater_operator.core import PermanentError
from slackwater_operator.demo import charts, page, report
from slackwater_operator.demo.result import DemoResult, Eviction, JobResult, Moment, RequestRow, SlotMoment

VOID = {"meta", "br", "hr", "img", "input", "link", "col"}
SERVES = SlotMoment("inference", "running", "voice-0")
CLEANS = SlotMoment("cleaning", "running", "clean-1")
LEAVES = SlotMoment("cleaning", "leaving", "clean-1")
FREE = SlotMoment("free", "", "")


def moment(t_s: float, slot: SlotMoment, *, in_flight: int = 3, queued: int = 0, items_done: int = 0) -> Moment:
    return Moment(t_s, (SERVES, slot), in_flight, queued, 8, items_done)


def request(t_s: float, first_audio_s: float | None = 0.25, outcome: str = "ok", burst: bool = False) -> RequestRow:
    total_s = None if first_audio_s is None else first_audio_s + 2
    return RequestRow(t_s, 40, outcome, first_audio_s, total_s, 0, burst)


PAIRS = [  # (text, ground)
    *itertools.product(("ink", "muted", "bad"), ("paper", "card")),
    *itertools.product(("ink", "good"), ("good-tint",)),
    *itertools.product(("ink", "bad"), ("bad-tint",)),
]
EVICTION = Eviction(1.0, "clean-1", "traffic", 0.47, "checkpointed", True, 17)
RESULT = DemoResult(
    started_at="2025-01-31T12:00:00+00:00",
    wall_s=61.0,
    machine="Linux x86_64, 2 CPUs",
    versions={"slackwater": "0.1.0", "python": "3.11.9"},
    slots=2,
    trace="15 minutes of the conversation trace, ten times faster",
    verdict="",
    useful_ratio=0.84,
    useful_ratio_without_filling=0.35,
    gpu_seconds={"serving": 30.0, "background": 60.0, "free": 10.0, "broken": 0.0},
    jobs=(JobResult("speech", 250, 211, 39, 0, 0, 0),),
    moments=(
        moment(0.0, CLEANS),
        moment(0.5, CLEANS, items_done=1),
        moment(1.0, CLEANS, in_flight=8, queued=5, items_done=2),
        moment(1.25, LEAVES, in_flight=8, queued=5, items_done=3),
        moment(1.5, FREE, in_flight=8, queued=5, items_done=3),
    ),
    requests=(
        request(0.1),
        request(0.2, 0.75),
        request(0.9, 1.3, burst=True),
        request(1.1, 2.4, burst=True),
        request(1.2, None, "refused", burst=True),
    ),
    evictions=(EVICTION,),
    clean_command="slackwater clean verify ledgers/speech",
)
EMPTY = DemoResult("2025-01-31T12:00:00+00:00", 0.0, "", {}, 0, "", "stopped by hand", 0.0, 0.0, {}, (), (), (), ())


class Sound(HTMLParser):
    """Checks that every element is closed in order; keeps tags, attributes, ids and the text outside of drawings."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(document)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "svg"} & set(self.open):
            self.text += data


def printed(result: DemoResult) -> list[str]:
    console = Console(width=80, record=True, file=None, quiet=False, color_system=None)
    with console.capture() as capture:
        console.print(report.table(result))
    return capture.get().splitlines()


CHANGES = [
    pytest.param(lambda r: replace(r, useful_ratio=0.91), "2.4×", "2.6×", id="quotient"),
    pytest.param(lambda r: replace(r, useful_ratio=0.91), "84%", "91%", id="useful ratio"),
    pytest.param(lambda r: replace(r, evictions=(replace(EVICTION, took_s=0.93),)), "0.47 s", "0.93 s", id="reclaim"),
    pytest.param(lambda r: replace(r, jobs=(replace(r.jobs[0], items_done=198),)), "211", "198", id="items done"),
    pytest.param(lambda r: replace(r, jobs=(replace(r.jobs[0], items_lost=7),)), "0 lost", "7 lost", id="items lost"),
    pytest.param(
        lambda r: replace(r, jobs=(replace(r.jobs[0], items_doubled=6),)), "0 doubled", "6 doubled", id="items doubled"
    ),
    pytest.param(
        lambda r: replace(r, requests=(*r.requests, request(2, None, "broken"))), "0 failed", "1 failed", id="failed"
    ),
    pytest.param(lambda r: replace(r, requests=r.requests[:4]), "1 refused", "0 refused", id="refused"),
    pytest.param(
        lambda r: replace(r, requests=(request(0.1, 0.31), *r.requests[1:])), "0.25 s", "0.31 s", id="quiet first audio"
    ),
    pytest.param(
        lambda r: replace(r, requests=(*r.requests[:2], request(0.9, 1.7, burst=True), *r.requests[3:])),
        "1.30 s",
        "1.70 s",
        id="burst first audio",
    ),
]


@pytest.mark.parametrize(("change", "before", "after"), CHANGES)
def test_a_changed_figure_changes_on_the_page_and_in_the_table(
    change: Callable[[DemoResult], DemoResult], before: str, after: str
) -> None:
    changed = change(RESULT)

    for old, new in (
        (Sound(page.render(RESULT)).text, Sound(page.render(changed)).text),
        ("\n".join(printed(RESULT)), "\n".join(printed(changed))),
    ):
        assert before in old
        assert after not in old
        assert after in new


def test_cards_give_median_and_p99_apart() -> None:
    evictions = (EVICTION, replace(EVICTION, took_s=0.81), replace(EVICTION, took_s=9.5, reason="node"))

    document = page.render(replace(RESULT, evictions=evictions))

    assert (
        '<p class="figure">0.47 s</p><p>median; p99 0.81 s</p><p>2 evictions for traffic, 2 read back</p>' in document
    )
    assert '<p class="figure">4 <small>of 5</small></p><p>1 refused, 0 failed</p>' in document
    assert (
        '<p class="figure">0.25 s</p><p>median when quiet; p99 0.75 s</p><p>in the burst 1.30 s; p99 2.40 s</p>'
        in document
    )


def test_shares_of_slot_time_are_those_of_the_run_and_empty_states_are_left_out() -> None:
    text = Sound(page.render(RESULT)).text

    assert "30.0%" in text
    assert "60.0%" in text
    assert "10.0%" in text
    assert "Broken" not in text


def test_says_what_does_not_hold_in_the_words_of_the_verdict() -> None:
    good, bad = page.render(RESULT), page.render(replace(RESULT, verdict="3 items lost"))

    assert '<p class="verdict good"><strong>Everything held.</strong>' in good
    assert '<p class="verdict bad"><strong>Not everything held.</strong> 3 items lost.</p>' in bad


@pytest.mark.parametrize(
    "result",
    [
        pytest.param(RESULT, id="a run"),
        pytest.param(EMPTY, id="nothing at all"),
        pytest.param(replace(RESULT, requests=()), id="no requests"),
        pytest.param(replace(RESULT, evictions=()), id="no evictions"),
        pytest.param(replace(RESULT, moments=()), id="no moments"),
        pytest.param(replace(RESULT, moments=RESULT.moments[:1]), id="one moment"),
        pytest.param(replace(RESULT, jobs=(), gpu_seconds={"serving": 0.0}), id="no jobs and no time"),
        pytest.param(replace(RESULT, evictions=(replace(EVICTION, uid="unseen"),)), id="an unseen worker evicted"),
        pytest.param(replace(RESULT, slots=64), id="more slots than the moments show"),
    ],
)
def test_page_is_sound_html_with_unique_ids_and_nothing_to_fetch(result: DemoResult) -> None:
    document = page.render(result)

    sound = Sound(document)
    assert len(sound.ids) == len(set(sound.ids))
    assert not {"script", "link", "img", "iframe", "object", "a"} & set(sound.tags)
    assert not {"src", "href", "xlink:href", "srcset"} & {name for name, _ in sound.attributes}
    assert "@import" not in document
    assert "://" not in document
    assert set(re.findall(r"url\(([^)]*)\)", document)) <= {f"#{identity}" for identity in sound.ids}
    assert not re.search(r'"-?(nan|inf)', document)


def test_every_shape_stays_inside_the_drawing() -> None:
    sound = Sound(page.render(RESULT))

    percents = [float(v[:-1]) for name, v in sound.attributes if name in ("x", "cx", "width", "y1") and v.endswith("%")]
    assert len(percents) > 20
    assert all(-0.01 <= percent <= 100.01 for percent in percents)


def test_hostile_words_from_the_run_stay_words() -> None:
    hostile = "</title><script>alert('1')</script>\"&\udcff"
    result = replace(
        RESULT,
        started_at=hostile,
        machine=hostile,
        trace=hostile,
        verdict=hostile,
        clean_command=hostile,
        versions={hostile: hostile},
        gpu_seconds={hostile: 1.0},
        jobs=(replace(RESULT.jobs[0], name=hostile),),
        moments=tuple(replace(m, slots=(SlotMoment(hostile, hostile, hostile), FREE)) for m in RESULT.moments),
        requests=(request(0.5, 0.2, hostile),),
        evictions=(Eviction(1.0, hostile, hostile, 0.4, hostile, False, 3),),
    )

    document = page.render(result)

    plain = Sound(page.render(RESULT))
    assert "script" not in Sound(document).tags
    assert {name for name, _ in Sound(document).attributes} <= {name for name, _ in plain.attributes} | {"d"}
    assert Sound(document).text.count("<script>alert('1')</script>") >= 12


def test_page_writes_out_each_eviction_and_marks_the_ones_not_read_back() -> None:
    unproven = replace(EVICTION, uid="clean-9", verified=False, outcome="timeout", t_s=1.4)

    good = page.render(RESULT)
    both = page.render(replace(RESULT, evictions=(EVICTION, unproven)))

    assert "clean-1 told to go for traffic at 1.0 s, slot free after 0.47 s, checkpointed, read back" in good
    assert "eviction not read back" not in good
    assert "clean-9 told to go for traffic at 1.4 s, slot free after 0.47 s, timeout, not read back" in both
    assert "eviction not read back" in both
    assert "<td>timeout, 17 items</td><td><strong>no</strong></td>" in both


def test_equal_neighbours_make_one_bar() -> None:
    assert charts.bars(RESULT.moments, 1) == [
        ("cleaning", "running", "clean-1", 0.0, 1.25),
        ("cleaning", "leaving", "clean-1", 1.25, 1.5),
        ("free", "", "", 1.5, 1.5),
    ]


def test_a_silence_of_the_recorder_is_not_drawn_as_work() -> None:
    moments = (moment(0.0, CLEANS), moment(1.0, CLEANS), moment(9.0, CLEANS), moment(9.5, CLEANS))

    held = charts.bars(moments, 1)

    assert [(start_s, end_s) for *_, start_s, end_s in held] == [(0.0, 1.0), (9.0, 9.5)]


def test_finds_the_slot_that_an_evicted_worker_held_last() -> None:
    moved = (*RESULT.moments, Moment(3.0, (CLEANS, FREE), 0, 0, 0, 3))

    assert charts.slot_of(EVICTION, moved) == 1
    assert charts.slot_of(replace(EVICTION, t_s=3.0), moved) == 0
    assert charts.slot_of(replace(EVICTION, uid="unseen"), moved) is None


@pytest.mark.parametrize(
    ("top", "ticks"),
    [
        pytest.param(0, (0, 1), id="nothing"),
        pytest.param(1, (0, 1), id="one"),
        pytest.param(7, (0, 5, 10), id="a few"),
        pytest.param(24, (0, 10, 20, 30), id="some"),
        pytest.param(600, (0, 200, 400, 600), id="many"),
    ],
)
def test_value_axis_ends_on_a_round_tick_above_all_values(top: int, ticks: tuple[int, ...]) -> None:
    assert charts.value_axis(top, least_step=1).ticks == ticks


def test_time_axis_covers_all_that_was_recorded() -> None:
    result = replace(RESULT, moments=(moment(-3.2, FREE), *RESULT.moments), requests=(request(58.4),))

    axis = charts.time_axis(result)

    assert (axis.low, axis.high) == (-3.2, 58.4)
    assert axis.ticks == (0, 10, 20, 30, 40, 50)
    assert axis.at(58.4) == pytest.approx(100)


@pytest.mark.parametrize("result", [pytest.param(RESULT, id="small"), pytest.param(EMPTY, id="empty")])
def test_table_fits_80_columns(result: DemoResult) -> None:
    assert max(len(line) for line in printed(result)) <= 80


def test_table_of_a_long_run_fits_80_columns_without_losing_a_word() -> None:
    jobs = tuple(JobResult(f"job-{n}", 9_000_000, 8_123_456, 0, 1_234, 5_678, 9_012) for n in range(3))
    requests = tuple(request(float(n), 12_345.6, "ok" if n % 2 else "failed", bool(n % 3)) for n in range(3_000))

    lines = printed(replace(RESULT, jobs=jobs, requests=requests, useful_ratio_without_filling=0.001))

    assert max(len(line) for line in lines) <= 80
    assert "17,034 doubled" in " ".join(" ".join(lines).split())
    assert "…" not in "".join(lines)


def test_writes_both_files_and_the_json_holds_figures_and_sources(tmp_path: Path) -> None:
    data, html = report.write(RESULT, tmp_path / "new" / "folder")

    document: dict[str, Any] = json.loads(data.read_text())
    assert (data.name, html.name) == ("demo-report.json", "demo-report.html")
    assert document["items_done"] == 211
    assert document["reclaim_p99_s"] == 0.47
    assert len(document["run"]["moments"]) == len(RESULT.moments)
    assert html.read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in html.parent.iterdir()) == ["demo-report.html", "demo-report.json"]


def test_the_speech_is_a_file_and_a_player_on_the_page_but_not_in_the_json(tmp_path: Path) -> None:
    data, html, speech = report.write(replace(RESULT, speech=b"\xff\xfbsound"), tmp_path)

    assert (speech.name, speech.read_bytes()) == ("demo-speech.mp3", b"\xff\xfbsound")
    assert 'src="data:audio/mpeg;base64,//tzb3VuZA=="' in html.read_text()
    assert "speech" not in json.loads(data.read_text())["run"]


def test_a_name_that_is_no_unicode_does_not_cost_the_report(tmp_path: Path) -> None:
    data, html = report.write(replace(RESULT, trace="odd \udcff name"), tmp_path)

    assert json.loads(data.read_text())["run"]["trace"] == "odd \udcff name"
    assert "odd ? name" in html.read_text()


def test_a_disk_that_fills_up_keeps_the_older_pair_and_says_what_to_do(tmp_path: Path) -> None:
    paths = report.write(RESULT, tmp_path)
    older = [path.read_bytes() for path in paths]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(older[0]) + 100, limits[1]))  # the page is longer than the JSON

    try:
        with pytest.raises(PermanentError) as refused:
            report.write(RESULT, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert len(older[1]) > len(older[0]) + 100
    assert [path.read_bytes() for path in paths] == older
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert "free some space there or name another folder" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_that_is_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")

    with pytest.raises(PermanentError, match="taken"):
        report.write(RESULT, tmp_path / "taken")


def test_text_has_enough_contrast_in_light_and_in_dark() -> None:
    css = resources.files("slackwater_operator.demo").joinpath("report.css").read_text("utf-8")
    palettes = [
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", block)) for block in re.findall(r":root \{([^}]*)\}", css)
    ]

    assert len(palettes) == 2
    for colours, (text, ground) in itertools.product(palettes, PAIRS):
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)  # WCAG 2, level AA


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
