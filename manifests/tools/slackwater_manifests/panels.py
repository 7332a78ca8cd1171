"""What a panel is, before anything is drawn.

Owns the types that the rows of the dashboard are written in.  Owns nothing of Grafana (`dashboard`).
"""

from dataclasses import dataclass
from enum import StrEnum


class Draw(StrEnum):
    """How a panel shows its numbers."""

    LINES = "lines"
    STACK = "stack"  # areas upon each other: the sum is the point
    STAT = "stat"  # one large number each
    BARS = "bars"  # a bar each
    TABLE = "table"
    HEAT = "heat"  # a histogram's buckets over time


@dataclass(frozen=True, slots=True)
class Query:
    """legend: Grafana's format, {{label}} is filled in; the column's name in a table."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """unit: Grafana's id of it.  warn, bad: thresholds; bad below warn means that low is bad.  width: of 24."""

    title: str
    text: str
    draw: Draw
    unit: str
    queries: tuple[Query, ...]
    width: int = 8
    height: int = 8
    warn: float | None = None
    bad: float | None = None
    highest: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """folded: its panels are read only when somebody opens it."""

    title: str
    panels: tuple[Panel, ...]
    folded: bool = False


def lines(title: str, text: str, unit: str, *queries: Query, width: int = 8, highest: float | None = None) -> Panel:
    """A panel of lines."""
    return Panel(title, text, Draw.LINES, unit, queries, width, highest=highest)


def stack(title: str, text: str, unit: str, *queries: Query, width: int = 8) -> Panel:
    """A panel of stacked areas."""
    return Panel(title, text, Draw.STACK, unit, queries, width)


def heat(title: str, text: str, unit: str, histogram: str, width: int = 8) -> Panel:
    """A panel of a histogram's buckets."""
    query = Query(f"sum by (le) (increase({histogram}[$__rate_interval]))", "{{le}}")
    return Panel(title, text, Draw.HEAT, unit, (query,), width)


def quantiles(histogram: str, matchers: str = "", *, legend: str = "") -> tuple[Query, ...]:
    """p50, p95 and p99 of a histogram."""
    return tuple(
        Query(
            f"histogram_quantile({q}, sum by (le) (rate({histogram}_bucket{matchers}[$__rate_interval])))",
            f"{legend} p{round(q * 100)}".strip(),
        )
        for q in (0.5, 0.95, 0.99)
    )
