"""The report's pictures: axes, and the SVG of each lane of the timeline.

Owns shapes only: an outer SVG in percent and pixels, so that dots stay round and stripes even at
any width, with a stretched inner one for areas and lines; all text stands outside, in HTML, and
does not shrink with the page.  Colours are classes of report.css.  Called by `page`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from slackwater_operator.demo.result import DemoResult, Eviction, Moment, RequestRow
from slackwater_operator.demo.wording import counted, seconds

GAP_S = 2.0  # moments come four a second; a longer silence is drawn as one
STRETCH = 1000  # units of the inner SVG in both directions
TALL = 150  # px
STRIP = 14  # px above the first-audio plot, for requests that never had audio
DEFINITIONS = (
    '<svg class="definitions" width="0" height="0" aria-hidden="true"><defs>'
    + "".join(
        f'<pattern id="striped-{name}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect class="{name}-tint" width="6" height="6"/>'
        f'<rect class="{name}" width="3" height="6"/></pattern>'
        for name in ("speech", "cleaning", "other")
    )
    + "</defs></svg>"
)


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear scale with its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """Where a value lies, in percent of the axis."""
        return 100 * (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Lane:
    """One chart of the timeline.  labels: (text, percent from the bottom) of its left edge."""

    svg: str
    height: int  # px
    labels: tuple[tuple[str, float], ...]


def time_axis(result: DemoResult) -> Axis:
    """From the first moment to the end of all that was recorded; at least one second long."""
    known = [0.0, *(moment.t_s for moment in result.moments), *(e.t_s for e in result.evictions)]
    known += [request.t_s for request in result.requests]
    low, high = min(known), max(*known, min(known) + 1)
    step = tick_step(high - low, 10)
    return Axis(low, high, tuple(step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)))


def value_axis(top: float, least_step: float = 0.0) -> Axis:
    """From zero to the first tick at or above `top`."""
    step = max(least_step, tick_step(top if top > 0 else 1.0, 3))
    count = max(1, math.ceil(top / step - 1e-9))
    return Axis(0.0, step * count, tuple(step * i for i in range(count + 1)))


def tick_step(span: float, most: int) -> float:
    """The smallest of 1, 2, 5, 10, 20 … that cuts `span` into at most `most` parts."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power * most >= span * (1 - 1e-9))


def load(result: DemoResult, x: Axis) -> Lane:
    """Requests in flight and queued, against what the serving replicas can hold."""
    moments = result.moments
    peak = max(moments, key=lambda m: m.in_flight + m.queued, default=None)
    y = value_axis(max((max(m.in_flight + m.queued, m.capacity) for m in moments), default=0), least_step=1)
    shapes = [
        *(_area(run, lambda m: m.in_flight + m.queued, x, y, "queued") for run in runs(moments)),
        *(_area(run, lambda m: m.in_flight, x, y, "speech") for run in runs(moments)),
        *(_line(run, lambda m: m.capacity, x, y, "capacity") for run in runs(moments)),
    ]
    desc = "No moment was recorded."
    if peak is not None:
        desc = (
            f"Load peaked at {peak.in_flight + peak.queued} requests, {peak.t_s:.0f} s in; the replicas that serve "
            f"held between {min(m.capacity for m in moments)} and {max(m.capacity for m in moments)} decode slots."
        )
    body = _grid(x, y) + _stretched(shapes)
    return Lane(_svg("load", "Requests against serving capacity", desc, bands(result, x) + body), TALL, _labels(y))


def holders(result: DemoResult, x: Axis) -> Lane:
    """Who holds each slot, one row a slot, with a mark for each eviction."""
    num_slots = max([result.slots, *(len(moment.slots) for moment in result.moments)])
    row = max(8, min(28, 280 // max(1, num_slots)))  # px; many slots get thin rows
    shapes = [_grid(x, None)]
    for index in range(num_slots):
        shapes += [_bar(*bar, index, row, x) for bar in bars(result.moments, index)]
    shapes += [_marker(eviction, slot_of(eviction, result.moments), row, x) for eviction in result.evictions]
    every = math.ceil(14 / row)  # a label is 14 px high
    labels = tuple(
        (f"slot {index}", 100 * (1 - (index + 0.5) / num_slots)) for index in range(num_slots) if index % every == 0
    )
    desc = f"{counted(num_slots, 'slot')} and {counted(len(result.evictions), 'eviction')}, listed in the table below."
    svg = _svg("holders", "Who holds each slot", desc, bands(result, x) + "".join(shapes))
    return Lane(svg, row * num_slots, labels)


def items(result: DemoResult, x: Axis) -> Lane:
    """Items whose cleaning is finished and durable."""
    top = max((moment.items_done for moment in result.moments), default=0)
    y = value_axis(top, least_step=1)
    shapes = [_area(run, lambda m: m.items_done, x, y, "cleaning-soft") for run in runs(result.moments)]
    shapes += [_line(run, lambda m: m.items_done, x, y, "cleaning-line") for run in runs(result.moments)]
    body = bands(result, x) + _grid(x, y) + _stretched(shapes)
    desc = f"{counted(top, 'item')} done by the last moment recorded."
    return Lane(_svg("items", "Items cleaned", desc, body), 110, _labels(y))


def first_audio(result: DemoResult, x: Axis) -> Lane:
    """One mark a request, at the moment it was sent; those without audio stand in a strip on top."""
    y = value_axis(max((r.first_audio_s for r in result.requests if r.first_audio_s is not None), default=0.0))
    heard = sum(r.first_audio_s is not None for r in result.requests)
    desc = f"{counted(len(result.requests), 'request')}, {heard:,} of them with audio."
    plot = _grid(x, y) + "".join(_dot(r, x, y) for r in result.requests if r.first_audio_s is not None)
    strip = "".join(_dot(r, x, y) for r in result.requests if r.first_audio_s is None)
    body = f'{bands(result, x)}<svg y="{STRIP}" height="{TALL}" overflow="visible">{plot}</svg>{strip}'
    height = TALL + STRIP
    labels = tuple((text, at * TALL / height) for text, at in _labels(y))
    return Lane(_svg("first-audio", "Time to first audio of each request", desc, body), height, labels)


def stacked(parts: Sequence[tuple[str, str, float]]) -> str:
    """A single bar.  parts: (class, words, size), at least one; the sizes may sum to anything."""
    whole = sum(size for _, _, size in parts)
    shapes, start = [], 0.0
    for name, words, size in parts:
        width = 100 * size / whole
        shapes.append(
            f'<rect class="{name}" x="{start:.3f}%" width="{width:.3f}%" height="100%">'
            f"<title>{escape(words)}</title></rect>"
        )
        start += width
    desc = "; ".join(words for _, words, _ in parts)
    return _svg("seconds", "Slot time by what it went to", desc, "".join(shapes))


def runs(moments: Sequence[Moment]) -> list[list[Moment]]:
    """The moments, cut where nothing was recorded for longer than GAP_S."""
    cut: list[list[Moment]] = []
    for moment in moments:
        if not cut or moment.t_s - cut[-1][-1].t_s > GAP_S:
            cut.append([])
        cut[-1].append(moment)
    return cut


def bars(moments: Sequence[Moment], index: int) -> list[tuple[str, str, str, float, float]]:
    """(holder, phase, uid, from, to) of one slot: equal neighbours merged, gaps left out."""
    merged: list[tuple[str, str, str, float, float]] = []
    for run in runs(moments):
        for moment, after in zip(run, [*run[1:], run[-1]], strict=True):
            if index >= len(moment.slots):
                continue
            slot = moment.slots[index]
            state = (slot.holder, slot.phase, slot.uid)
            if merged and merged[-1][:3] == state and merged[-1][4] == moment.t_s:
                merged[-1] = (*state, merged[-1][3], after.t_s)
            else:
                merged.append((*state, moment.t_s, after.t_s))
    return merged


def slot_of(eviction: Eviction, moments: Sequence[Moment]) -> int | None:
    """The slot that the evicted workload held last; None when no moment shows it."""
    for moment in reversed(moments):
        if moment.t_s <= eviction.t_s + eviction.took_s:
            for index, slot in enumerate(moment.slots):
                if slot.uid == eviction.uid:
                    return index
    return None


def bands(result: DemoResult, x: Axis) -> str:
    """Shades the time in which the requests sent say that one replica was not enough."""
    shades, since_s = [], None
    ordered = sorted(result.requests, key=lambda request: request.t_s)
    for request in ordered:
        if request.burst and since_s is None:
            since_s = request.t_s
        elif not request.burst and since_s is not None:
            shades.append((since_s, request.t_s))
            since_s = None
    if since_s is not None:
        shades.append((since_s, ordered[-1].t_s))
    return "".join(
        f'<rect class="burst" x="{x.at(start):.3f}%" width="{x.at(end) - x.at(start):.3f}%" height="100%"/>'
        for start, end in shades
    )


def _svg(name: str, title: str, desc: str, body: str) -> str:
    return (
        f'<svg role="img" aria-labelledby="{name}-title {name}-desc" width="100%" height="100%">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(desc)}</desc>{body}</svg>'
    )


def _stretched(shapes: Iterable[str]) -> str:
    inner = "".join(shapes)
    return (
        f'<svg viewBox="0 0 {STRETCH} {STRETCH}" preserveAspectRatio="none" width="100%" height="100%" '
        f'overflow="visible">{inner}</svg>'
    )


def _grid(x: Axis, y: Axis | None) -> str:
    upright = "".join(
        f'<line class="{"start" if tick == 0 else "grid"}" x1="{x.at(tick):.3f}%" x2="{x.at(tick):.3f}%" y2="100%"/>'
        for tick in x.ticks
    )
    level = "".join(
        f'<line class="grid" x2="100%" y1="{100 - y.at(tick):.3f}%" y2="{100 - y.at(tick):.3f}%"/>' for tick in y.ticks
    ) if y else ""  # fmt: skip
    return upright + level


def _labels(y: Axis) -> tuple[tuple[str, float], ...]:
    return tuple((f"{tick:,g}", y.at(tick)) for tick in y.ticks)


def _steps(run: Sequence[Moment], value: Callable[[Moment], float], x: Axis, y: Axis) -> str:
    """A path that holds each value until the next moment."""
    unit = STRETCH / 100
    path = f"M{x.at(run[0].t_s) * unit:.1f} {STRETCH - y.at(value(run[0])) * unit:.1f}"
    for before, moment in pairwise(run):
        if value(moment) != value(before):
            path += f"H{x.at(moment.t_s) * unit:.1f}V{STRETCH - y.at(value(moment)) * unit:.1f}"
    return path + f"H{x.at(run[-1].t_s) * unit:.1f}"


def _line(run: Sequence[Moment], value: Callable[[Moment], float], x: Axis, y: Axis, name: str) -> str:
    return f'<path class="{name}" d="{_steps(run, value, x, y)}"/>'


def _area(run: Sequence[Moment], value: Callable[[Moment], float], x: Axis, y: Axis, name: str) -> str:
    start = x.at(run[0].t_s) * STRETCH / 100
    return f'<path class="{name}" d="{_steps(run, value, x, y)}V{STRETCH}H{start:.1f}Z"/>'


def _bar(holder: str, phase: str, uid: str, start_s: float, end_s: float, index: int, row: int, x: Axis) -> str:
    name = {"inference": "speech", "cleaning": "cleaning", "free": "free"}.get(holder, "other")
    if name != "free" and phase != "running":
        name = f"striped-{name}"
    words = f"slot {index}: {' '.join(part for part in (uid or holder, phase) if part)}, {start_s:.1f} to {end_s:.1f} s"
    return (
        f'<rect class="{name}" x="{x.at(start_s):.3f}%" width="{x.at(end_s) - x.at(start_s):.3f}%" '
        f'y="{index * row + 2}" height="{row - 4}"><title>{escape(words)}</title></rect>'
    )


def _marker(eviction: Eviction, index: int | None, row: int, x: Axis) -> str:
    """A triangle that points at the bar that ends, a cross when no receipt was read back.

    It stands on top of all rows when no row shows the workload.
    """
    kept = "read back" if eviction.verified else "not read back"
    words = (
        f"{eviction.uid} told to go for {eviction.reason} at {eviction.t_s:.1f} s, slot free after "
        f"{seconds(eviction.took_s)}, {eviction.outcome}, {kept}"
    )
    title = f"<title>{escape(words)}</title>"
    place = f'x="{x.at(eviction.t_s):.3f}%" y="{(index or 0) * row}" overflow="visible"'
    if eviction.verified:
        return f'<svg class="marker" {place}><path d="M-6 -4H6L0 8Z">{title}</path></svg>'
    cross = "M-5 -4L5 6M-5 6L5 -4"
    return f'<svg class="unverified" {place}><path class="halo" d="{cross}"/><path d="{cross}">{title}</path></svg>'


def _dot(request: RequestRow, x: Axis, y: Axis) -> str:
    """A ring when quiet, a disc in the burst, an open triangle when refused, a cross when it went wrong."""
    first = f"first audio after {seconds(request.first_audio_s)}" if request.first_audio_s is not None else "no audio"
    words = f"{request.outcome}, {first}, sent at {request.t_s:.1f} s"
    where = f"{x.at(request.t_s):.3f}%"
    height = f"{100 - y.at(request.first_audio_s):.3f}%" if request.first_audio_s is not None else f"{STRIP / 2:g}"
    title = f"<title>{escape(words)}</title>"
    if request.outcome == "ok":
        return (
            f'<circle class="{"busy" if request.burst else "quiet"}" cx="{where}" cy="{height}" r="3">{title}</circle>'
        )
    name, path = ("refused", "M-4 4L0 -4L4 4Z") if request.outcome == "refused" else ("failed", "M-4 -4L4 4M-4 4L4 -4")
    return f'<svg class="{name}" x="{where}" y="{height}" overflow="visible"><path d="{path}">{title}</path></svg>'
