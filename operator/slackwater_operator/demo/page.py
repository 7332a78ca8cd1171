"""The page demo-report.html: one file that needs no script, no network and no second file.

Owns the page's order and words; `charts` draws, report.css colours.  Everything that came from the
run is escaped here or in `charts`.  Called by `report`.
"""

import base64
from collections.abc import Iterable
from html import escape
from importlib import resources

from slackwater_operator.demo import charts
from slackwater_operator.demo.charts import Lane
from slackwater_operator.demo.result import DemoResult
from slackwater_operator.demo.wording import counted, headline, percent, quotient, seconds, share

# state of `accounts`: (class, name, what it means)
STATES = {
    "serving": ("speech", "Serving speech", "decode slots that a request held"),
    "training": ("training", "Training", ""),
    "background": ("cleaning", "Cleaning", "workers that ran"),
    "serving_headroom": ("speech-tint", "Ready for speech", "decode slots of replicas that waited for requests"),
    "starting": ("striped-other", "Starting", "processes that held a slot and were not ready yet"),
    "draining": ("striped-speech", "Draining and leaving", "told to go, not gone yet"),
    "free": ("free", "Free", "nobody held the slot"),
    "broken": ("broken", "Broken", ""),
}
VOICE = (
    "The engine is the real one in miniature, with seeded weights that were never trained: it hums rather than speaks. "
    "Scheduling, streaming, cache and codec are what is shown; the sound is not."
)
TRACE = (
    "Azure LLM inference trace 2023, conversation; Microsoft, CC-BY-4.0; published with P. Patel et al., "
    "“Splitwise: Efficient Generative LLM Inference Using Phase Splitting”, ISCA 2024."
)
USEFUL = (
    "Useful is the time of slots that served speech, by the share of their decode slots in use, plus the cleaning "
    "seconds whose results were made durable, over the time of all slots. Without filling counts the same run’s "
    "speech alone, as if nobody had been lent an idle slot."
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; media-src data:"  # a second lock behind the escaping


def render(result: DemoResult) -> str:
    """The whole document."""
    css = resources.files("slackwater_operator.demo").joinpath("report.css").read_text("utf-8")
    body = "\n".join(
        (
            _header(result),
            _cards(result),
            _timeline(result),
            _evictions(result),
            _jobs(result),
            _seconds(result),
            _about(result),
        )
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Slackwater demo report</title>
<style>
{css}</style>
</head>
<body>
{charts.DEFINITIONS}
<main>
{body}
</main>
</body>
</html>
"""


def _header(result: DemoResult) -> str:
    verdict, sentence = headline(result)
    kind = "bad" if result.verdict else "good"
    facts = (counted(result.slots, "slot"), counted(round(result.wall_s), "second"), _started(result))
    return f"""<header>
<p class="brand">Slackwater</p>
<h1>Speech first. Cleaning in the seconds between.</h1>
<p class="verdict {kind}"><strong>{verdict}</strong> {escape(sentence)}</p>
<p class="facts">{escape(" · ".join(facts))}</p>
</header>"""


def _started(result: DemoResult) -> str:
    return result.started_at.replace("T", " ")


def _cards(result: DemoResult) -> str:
    figures = result.figures()
    alone = result.useful_ratio_without_filling
    ratios = "".join(
        f'<div class="ratio"><span>{name}</span><span class="track">'
        f'<span class="speech" style="width:{100 * alone:.1f}%"></span>'
        f'<span class="cleaning" style="width:{100 * (ratio - alone):.1f}%"></span></span><b>{percent(ratio)}</b></div>'
        for name, ratio in (("with cleaning", result.useful_ratio), ("speech alone", alone))
    )
    after_refusal = sum(r.outcome == "ok" and r.retries > 0 for r in result.requests)
    cards = (
        _card(
            "Slot taken back in",
            seconds(figures["reclaim_p50_s"]),
            (f"median; p99 {seconds(figures['reclaim_p99_s'])}", False),
            (
                f"{counted(figures['evictions'], 'eviction')} for traffic, {figures['evictions_verified']:,} read back",
                figures["evictions_verified"] < figures["evictions"],
            ),
        ),
        _card(
            "Items cleaned",
            f"{figures['items_done']:,}",
            (
                f"{figures['items_lost']:,} lost, {figures['items_doubled']:,} doubled",
                figures["items_lost"] + figures["items_doubled"] > 0,
            ),
            (f"in {counted(len(result.jobs), 'job')}, checked after the run", False),
        ),
        _card(
            "Requests answered",
            f"{figures['requests_answered']:,} <small>of {figures['requests']:,}</small>",
            (
                f"{figures['requests_refused']:,} refused, {figures['requests_failed']:,} failed",
                figures["requests_failed"] > 0,
            ),
            (f"{after_refusal:,} only after a refusal", False),
        ),
        _card(
            "First audio",
            seconds(figures["first_audio_quiet_p50_s"]),
            (f"median when quiet; p99 {seconds(figures['first_audio_quiet_p99_s'])}", False),
            (
                f"in the burst {seconds(figures['first_audio_burst_p50_s'])}; "
                f"p99 {seconds(figures['first_audio_burst_p99_s'])}",
                False,
            ),
        ),
    )
    compared = (
        "what speech alone would have made of the same slots" if alone > 0 else "there was no speech to compare with"
    )
    return f"""<section class="cards" aria-label="Headline figures">
<div class="card hero"><h2>Useful slot time</h2><p class="figure">{quotient(result)}</p><p>{compared}</p>{ratios}</div>
{"".join(cards)}</section>"""


def _card(name: str, figure: str, *lines: tuple[str, bool]) -> str:
    """lines: (words, whether they are bad news)."""
    words = "".join(f"<p{' class=alarm' if bad else ''}>{line}</p>" for line, bad in lines)
    return f'<div class="card"><h2>{name}</h2><p class="figure">{figure}</p>{words}</div>\n'


def _timeline(result: DemoResult) -> str:
    if not result.moments and not result.requests:
        return _section("The run, second by second", "<p>Nothing was recorded.</p>")
    unverified = any(not eviction.verified for eviction in result.evictions)
    x = charts.time_axis(result)
    ticks = "".join(
        f'<span{"" if number % 2 == 0 else " class=odd"} style="left:{x.at(tick):.3f}%">{tick:g}</span>'
        for number, tick in enumerate(x.ticks)
    )
    lanes = (
        _lane(
            "Load",
            "requests, against the decode slots that serve",
            charts.load(result, x),
            _key("speech", "in flight"),
            _key("queued", "queued"),
            _key("capacity", "serving capacity"),
        ),
        _lane(
            "Slots",
            "who holds each",
            charts.holders(result, x),
            _key("speech", "speech"),
            _key("cleaning", "cleaning"),
            _key("striped-other", "starting, draining or leaving"),
            _key("free", "free"),
            _glyph("▼", "eviction"),
            *([_glyph("✕", "eviction not read back", "alarm")] if unverified else ()),
        ),
        _lane("Items cleaned", "durable, all jobs together", charts.items(result, x)),
        _lane(
            "First audio",
            "seconds from sending a request to its first sound",
            charts.first_audio(result, x),
            _key("dot quiet", "quiet"),
            _key("dot busy", "in the burst"),
            _glyph("△", "refused"),
            _glyph("✕", "failed", "alarm"),
        ),
    )
    return f"""<section class="timeline">
<h2>The run, second by second</h2>
<p class="lead">One time axis for all four charts. Shaded: more than one replica was needed.</p>
{"".join(lanes)}
<div class="x" aria-hidden="true">{ticks}</div>
<p class="axis">seconds since the start of the traffic</p>
</section>"""


def _lane(name: str, what: str, lane: Lane, *keys: str) -> str:
    labels = "".join(f'<span style="bottom:{at:.2f}%">{escape(text)}</span>' for text, at in lane.labels)
    legend = f'<ul class="legend">{"".join(keys)}</ul>' if keys else ""
    return f"""<figure>
<figcaption><h3>{name}</h3><span class="what">{what}</span>{legend}</figcaption>
<div class="plot" style="height:{lane.height}px"><div class="y" aria-hidden="true">{labels}</div>{lane.svg}</div>
</figure>
"""


def _key(kind: str, words: str) -> str:
    return f'<li><span class="key {kind}"></span>{words}</li>'


def _glyph(sign: str, words: str, kind: str = "") -> str:
    return f'<li><span class="glyph {kind}" aria-hidden="true">{sign}</span>{words}</li>'


def _evictions(result: DemoResult) -> str:
    if not result.evictions:
        return _section("Evictions", "<p>No slot was taken back.</p>")
    rows = (
        (
            f"{eviction.t_s:.1f} s",
            escape(eviction.uid),
            escape(eviction.reason),
            seconds(eviction.took_s),
            f"{escape(eviction.outcome)}, {counted(eviction.items, 'item')}",
            "yes" if eviction.verified else "<strong>no</strong>",
        )
        for eviction in sorted(result.evictions, key=lambda eviction: eviction.t_s)
    )
    heads = ("At", "Workload", "Why", "Took", "Outcome", "Read back")
    lead = (
        "A worker is told to go, makes its record durable and leaves. “Read back” means that its last receipt was then "
        "found on disk with the right digest; only that counts as lossless."
    )
    return _section("Evictions", f'<p class="lead">{lead}</p>{_table(heads, rows, "swsntt")}')


def _jobs(result: DemoResult) -> str:
    if not result.jobs:
        return _section("Cleaning jobs", "<p>No cleaning job was part of this run.</p>")
    rows = (
        (
            escape(job.name),
            *(f"{count:,}" for count in (job.items_total, job.items_done, job.items_open)),
            *(
                f"<strong>{count:,}</strong>" if count else "0"
                for count in (job.items_lost, job.items_doubled, job.items_quarantined)
            ),
        )
        for job in result.jobs
    )
    heads = ("Job", "Items", "Done", "Open", "Lost", "Doubled", "Quaran&shy;tined")
    lead = (
        "Counted after the run from the ledgers themselves, by a check that anyone can repeat. Quarantined items could "
        "not be read and were set aside with the reason."
    )
    command = f"<p>Look at them: <code>{escape(result.clean_command)}</code></p>" if result.clean_command else ""
    return _section("Cleaning jobs", f'<p class="lead">{lead}</p>{_table(heads, rows, "wnnnnnn")}{command}')


def _seconds(result: DemoResult) -> str:
    whole_s = sum(result.gpu_seconds.values())
    spent = {state: spent_s for state, spent_s in result.gpu_seconds.items() if spent_s > 0}
    parts, rows = [], []
    for state in sorted(
        spent, key=lambda state: (list(STATES).index(state) if state in STATES else len(STATES), state)
    ):
        kind, name, meaning = STATES.get(state, ("other", state, ""))
        parts.append((kind, f"{name} {share(spent[state], whole_s)}", spent[state]))
        words = f'<span class="key {kind}"></span>{escape(name)}'
        words += f' <span class="what">{meaning}</span>' if meaning else ""
        rows.append((words, f"{spent[state]:,.1f}", share(spent[state], whole_s)))
    body = "<p>No slot time was recorded.</p>"
    if rows:
        rows.append(("<strong>All slots</strong>", f"<strong>{whole_s:,.1f}</strong>", share(whole_s, whole_s)))
        bar = f'<div class="stacked">{charts.stacked(parts)}</div>'
        body = bar + _table(("Went to", "Slot seconds", "Share"), rows, "tnn")
    return _section("Where every slot second went", f'<p class="lead">{USEFUL}</p>{body}')


def _about(result: DemoResult) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result.versions.items()))
    facts = (
        ("Traffic", result.trace),
        ("Trace", TRACE),
        ("Voice", VOICE),
        ("Machine", result.machine),
        ("Versions", versions),
        ("Started", f"{_started(result)}, {result.wall_s:,.1f} s from start to end"),
    )
    rows = "".join(f"<dt>{name}</dt><dd>{escape(words)}</dd>" for name, words in facts if words)
    return _section("What this is", f"<dl>{rows}</dl>{_speech(result)}")


def _speech(result: DemoResult) -> str:
    """A player with the sound in it, so that the page stays one file."""
    if not result.speech:
        return ""
    sound = base64.b64encode(result.speech).decode()
    lead = "What the API streamed as MP3 when the traffic was over:"
    return f'<p>{lead}</p><audio controls preload="metadata" src="data:audio/mpeg;base64,{sound}"></audio>'


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{body}\n</section>"


def _table(heads: Iterable[str], rows: Iterable[tuple[str, ...]], kinds: str) -> str:
    """Heads and cells are HTML already.

    kinds: one letter a column; n = number, t = text, s = short text that stays on one line, w = a name that may break.
    """
    names = {"n": ' class="n"', "t": "", "s": ' class="short"', "w": ' class="name"'}
    head = "".join(f'<th scope="col"{names[kind]}>{name}</th>' for name, kind in zip(heads, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{names[kind]}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>\n"
        for row in rows
    )
    return f'<div class="table"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
