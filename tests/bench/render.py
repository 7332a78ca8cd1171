"""Renders the tables of figures in the pages from tests/bench/results; a test fails when they differ."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "kernels/README.md", ROOT / "operator/README.md")
RESULTS = ROOT / "tests/bench/results"
BLOCK = re.compile(r"(<!-- bench:(?P<name>[a-z0-9_]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(page: str) -> str:
    """The page with each `<!-- bench:NAME -->` block filled from NAME's result."""

    def fill(found: re.Match[str]) -> str:
        result = RESULTS / f"{found['name']}.json"
        return (
            found[1] + (table(json.loads(result.read_text())) if result.exists() else "Not measured yet.\n") + found[3]
        )

    return BLOCK.sub(fill, page)


def table(document: dict[str, Any]) -> str:
    """A Markdown table with its source below."""
    rows = document["rows"]
    with_peer = any(row["peer"] for row in rows)
    head = ["what", "measured"] + (["held against"] if with_peer else [])
    lines = ["| " + " | ".join(head) + " |", "| --- | --: |" + (" --- |" if with_peer else "")]
    for row in rows:
        cells = [label(row["what"]), figure(row["value"], row["unit"])]
        if with_peer:
            cells.append(f"{row['peer']}: {figure(row['peer_value'], row['unit'])}" if row["peer"] else "")
        lines.append("| " + " | ".join(cells) + " |")
    source = f"`{document['command']}` on {document['machine']}; commit {document['commit']}."
    return "\n".join([*lines, "", source, ""])


def label(what: str) -> str:
    """A row's name in words; the unit stands with the figure, and `_c16` means 16 at once."""
    name, comma, case = what.partition(",")
    name, _, at_once = re.sub(r"_c(\d+)$", r"|\1", name).partition("|")
    words = re.sub(r"(?<!_per)_(s|mib|us)$", "", name).replace("_", " ")
    return words + (f", {at_once} at once" if at_once else "") + comma + case


def figure(value: float | None, unit: str) -> str:
    """A value as a person reads it."""
    if value is None:
        return "–"
    if unit == "ratio":
        return f"{100 * value:.1f} %"
    if unit == "count":
        return f"{value:,.0f}"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def main() -> None:
    for page in PAGES:
        page.write_text(rendered(page.read_text()))


if __name__ == "__main__":
    main()
