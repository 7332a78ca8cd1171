"""How the figures of a demo run are written out, so that page and terminal say the same.

Owns the words and the rounding; computes nothing beyond a quotient.  Called by `report` and `page`.
"""

from slackwater_operator.demo.result import DemoResult

NONE = "–"  # a figure that this run has nothing for


def seconds(value_s: float | None) -> str:
    """Two digits below ten seconds, where a reclaim or a first audio lies; one digit above."""
    if value_s is None:
        return NONE
    return f"{value_s:.2f} s" if abs(value_s) < 10 else f"{value_s:,.1f} s"


def percent(ratio: float) -> str:
    """A ratio to the whole percent."""
    return f"{ratio:.0%}"


def share(part: float, whole: float) -> str:
    """A part of a sum, to a tenth of a percent."""
    return f"{part / whole:.1%}" if whole > 0 else NONE


def quotient(result: DemoResult) -> str:
    """The useful ratio over the one without filling; a run without speech has none."""
    if result.useful_ratio_without_filling <= 0:
        return NONE
    return f"{result.useful_ratio / result.useful_ratio_without_filling:.1f}×"


def counted(count: int, noun: str) -> str:
    """ "1 slot", "3 slots", "1,204 slots"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def headline(result: DemoResult) -> tuple[str, str]:
    """The verdict in two or three words, and the sentence that it rests on."""
    if result.verdict:
        words = result.verdict[0].upper() + result.verdict[1:]
        return "Not everything held.", words if words.endswith(".") else f"{words}."
    figures = result.figures()
    lost, doubled, evictions = figures["items_lost"], figures["items_doubled"], figures["evictions"]
    times = quotient(result)
    parts = [f"{percent(result.useful_ratio)} of all slot time was useful"]
    if times != NONE:
        parts[0] += f", {times} what speech alone would have made of it"
    if evictions:
        parts.append(f"{counted(evictions, 'time')} a cleaning worker handed its slot back to traffic")
    parts.append(f"{lost:,} lost, {doubled:,} doubled items" if lost or doubled else "no item was lost or doubled")
    return "Everything held.", f"{'; '.join(parts)}."
