"""A status document as a person sees it in a terminal, at 80 columns and wider.

Colours repeat what the words say: blue serves, yellow cleans, grey is free.
"""

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

STYLES = {"inference": "bold blue", "cleaning": "yellow", "free": "bright_black"}
BARS = "▁▂▃▄▅▆▇█"
REFRESH_HZ = 4


def show(document: dict[str, Any]) -> None:
    """Print once."""
    Console().print(render(document))


def watch(read: Callable[[], dict[str, Any]]) -> None:
    """Refresh in place until Ctrl-C."""
    with Live(render(read()), refresh_per_second=REFRESH_HZ, screen=False) as live:
        while True:
            time.sleep(1 / REFRESH_HZ)
            live.update(render(read()))


def render(document: dict[str, Any]) -> RenderableType:
    """Everything of a document: headline, traffic, slots, jobs, take-backs."""
    parts: list[RenderableType] = [headline(document), traffic(document), Text(), slots(document)]
    if not document["running"]:
        parts.insert(0, Text("The supervisor is not running; this is its last word.", "bold red"))
    if document["jobs"]:
        parts += [Text(), jobs(document)]
    if document["reclaims"]:
        parts += [Text(), reclaims(document)]
    return Group(*parts)


def headline(document: dict[str, Any]) -> Text:
    """One line of truth: what the slots do and how much of it is useful."""
    held = [slot["holder"] for slot in document["slots"]]
    accounts = document["accounts"]
    return Text.assemble(
        (f"{len(held)} slots: ", "bold"),
        (f"{held.count('inference')} speech", STYLES["inference"]),
        ", ",
        (f"{held.count('cleaning')} cleaning", STYLES["cleaning"]),
        ", ",
        (f"{held.count('free')} free", STYLES["free"]),
        f"  useful {accounts['useful_ratio']:.0%} (speech alone {accounts['useful_ratio_without_filling']:.0%})",
    )


def traffic(document: dict[str, Any]) -> Text:
    """What the gateway sees and what the policy makes of it."""
    seen = document["traffic"]
    first_audio_s = seen["first_audio_p95_s"]
    line = Text("traffic: ")
    if seen["in_flight"] is None:
        line.append("no gateway yet", "bright_black")
    else:
        line.append(f"{seen['in_flight']} streaming, {seen['queued']} waiting, {seen['arrival_rps']:.1f}/s")
        line.append(f", first audio p95 {first_audio_s:.2f} s" if first_audio_s is not None else "")
        for service, replicas in document["need_replicas"].items():
            line.append(f"; {service} needs {replicas}")
    for condition in document["conditions"]:
        line.append(f"  {condition}", "bold red")
    return line


def slots(document: dict[str, Any]) -> Table:
    """Who holds each slot."""
    table = plain_table(("SLOT", "right"), ("HOLDER", "left"), ("PHASE", "left"), ("SINCE", "right"), ("DOING", "left"))
    for slot in document["slots"]:
        style = STYLES.get(slot["holder"], "")
        if slot["holder"] == "free":
            table.add_row(str(slot["slot"]), "free", "", "", "", style=style)
        else:
            table.add_row(
                str(slot["slot"]), slot["uid"], slot["phase"], f"{slot['since_s']:.0f} s", slot["doing"], style=style
            )
    return table


def jobs(document: dict[str, Any]) -> Table:
    """How far each cleaning job is."""
    table = plain_table(("JOB", "left"), ("STATE", "left"), ("DONE", "right"), ("OF", "right"), ("", "left"))
    for job in document["jobs"]:
        done, total = job.get("items_done", 0), job.get("items_total")
        share = done / total if total else 0.0
        filled = round(20 * share)
        table.add_row(
            job["name"],
            job["state"],
            str(done),
            str(total if total is not None else "?"),
            job["message"] or f"{'█' * filled}{'░' * (20 - filled)} {share:.0%}",
        )
    return table


def reclaims(document: dict[str, Any]) -> Table:
    """The newest slots taken back, newest first."""
    table = plain_table(("TAKEN BACK", "left"), ("WHY", "left"), ("TOOK", "right"), ("WORK", "left"), ("AGO", "right"))
    for reclaim in reversed(document["reclaims"][-4:]):
        work = f"{reclaim['outcome']}, {reclaim['items']} items" + (" read back" if reclaim["verified"] else "")
        table.add_row(
            reclaim["uid"],
            reclaim["reason"],
            f"{reclaim['took_s']:.2f} s",
            work,
            f"{document['t_s'] - reclaim['freed_s']:.0f} s",
        )
    return table


def sparkline(values: list[float], width: int, ceiling: float) -> str:
    """The newest `width` values as bars of eight heights, `ceiling` being the highest."""
    newest = values[-width:]
    top = max(ceiling, 1e-9)
    return "".join(BARS[min(len(BARS) - 1, int(len(BARS) * max(0.0, value) / top))] for value in newest)


def plain_table(*columns: tuple[str, str]) -> Table:
    """A table without lines, that never wraps."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    for title, justify in columns:
        table.add_column(title, justify="right" if justify == "right" else "left", no_wrap=True, overflow="ellipsis")
    return table
