"""What a PromQL query reads.

Owns replacing Grafana's macros by values, and finding metric names and labels in an expression.  Called by
tests and by whoever sends a panel's query to a Prometheus.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser

MACROS = {"$__rate_interval": "1m", "$__interval": "15s", "$__range": "1h"}
"""What Grafana puts in, and what it may well be."""


@dataclass(frozen=True, slots=True)
class Selector:
    """One metric in an expression, with the labels that are matched."""

    name: str
    labels: frozenset[str]


def filled(expr: str) -> str:
    """The expression as Grafana would send it with every variable at All."""
    for macro, value in MACROS.items():
        expr = expr.replace(macro, value)
    return re.sub(r"\$\w+|\$\{\w+\}", ".*", expr)


def selectors(expr: str) -> tuple[Selector, ...]:
    """Every metric that the expression reads.  Raises ValueError when it is not PromQL."""
    return tuple(_walk(promql_parser.parse(filled(expr))))


def _walk(node: Any) -> Iterator[Selector]:
    if isinstance(node, promql_parser.MatrixSelector):
        node = node.vector_selector
    if isinstance(node, promql_parser.VectorSelector):
        if not node.name:
            raise ValueError(f"a selector must name its metric: {node.prettify()}")
        yield Selector(node.name, frozenset(matcher.name for matcher in node.matchers.matchers))
        return
    for inner in _parts(node):
        yield from _walk(inner)


def grouped(expr: str) -> tuple[tuple[str, frozenset[str]], ...]:
    """Each label that an aggregation groups by, with the metrics below it.  Raises ValueError when it is not PromQL."""
    return tuple(_groups(promql_parser.parse(filled(expr))))


def _groups(node: Any) -> Iterator[tuple[str, frozenset[str]]]:
    if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
        names = frozenset(selector.name for selector in _walk(node.expr))
        for label in node.modifier.labels:
            yield label, names
    for inner in _parts(node):
        yield from _groups(inner)


def _parts(node: Any) -> list[Any]:
    if isinstance(node, promql_parser.Call):
        return list(node.args)
    inner = (getattr(node, part, None) for part in ("expr", "lhs", "rhs", "param"))
    return [one for one in inner if one is not None and not isinstance(one, str)]
