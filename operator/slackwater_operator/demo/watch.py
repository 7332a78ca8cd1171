"""What a person sees while the demo runs: a live view on a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from slackwater_operator import view
from slackwater_operator.demo.run import Progress

SPARK_WIDTH = 60
PLAIN_EVERY_S = 5.0
EXPLANATION = (
    "Four slots of this machine. Speech requests of a real traffic trace come first;\n"
    "real recordings are cleaned in every slot that speech leaves idle, and give it\n"
    "back the moment traffic rises."
)


class LiveView:
    """Redraws in place; used as a context manager that gives the watcher."""

    def __init__(self) -> None:
        self._live = Live(Text("starting …"), refresh_per_second=view.REFRESH_HZ, transient=True)

    def __enter__(self) -> "LiveView":
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def __call__(self, progress: Progress) -> None:
        self._live.update(picture(progress))


class PlainLines:
    """A line every few seconds and one for each slot that is taken back."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._next_s = -1e9
        self._stage = ""
        self._reclaims = 0

    def __enter__(self) -> Self:
        self._console.print(EXPLANATION)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def __call__(self, progress: Progress) -> None:
        document = progress.document
        if progress.stage != self._stage:
            self._stage, self._next_s = progress.stage, -1e9
            self._console.print(f"-- {progress.stage}")
        if document is None:
            return
        for reclaim in document["reclaims"][
            -(document["reclaims_total"] - self._reclaims) or len(document["reclaims"]) :
        ]:
            self._console.print(
                f"   {progress.t_s:5.1f} s  taken back for {reclaim['reason']}: {reclaim['uid']} left in "
                f"{reclaim['took_s']:.2f} s, {reclaim['outcome']}, {reclaim['items']} items durable",
                soft_wrap=True,
            )
        self._reclaims = document["reclaims_total"]
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + PLAIN_EVERY_S
            self._console.print(f"   {progress.t_s:5.1f} s  {one_line(progress, document)}", soft_wrap=True)


def picture(progress: Progress) -> RenderableType:
    """The live view: what this is, how far it is, the machine as `slackwater status` shows it, the load so far."""
    parts: list[RenderableType] = [Text(EXPLANATION, style="bright_black"), Text(), headline(progress)]
    if progress.moments:
        load = [float(moment.in_flight + moment.queued) for moment in progress.moments]
        ceiling = max(*load, 1.0, *(float(moment.capacity) for moment in progress.moments))
        every = -(-len(load) // SPARK_WIDTH)  # so that the whole run fits
        spark = view.sparkline(load[::every], SPARK_WIDTH, ceiling)
        parts.append(Text.assemble(("requests  ", "bright_black"), (spark, "blue"), f" {load[-1]:.0f}"))
    if progress.document is not None:
        parts += [Text(), view.render(progress.document)]
    return Group(*parts)


def headline(progress: Progress) -> Text:
    """Stage, time and how many requests are through."""
    line = Text.assemble((progress.stage, "bold"))
    if progress.moments:
        ok = sum(played.outcome == "ok" for played in progress.played)
        line.append(f"  {progress.t_s:.0f} s, {ok} of {progress.requests} requests answered")
        if bad := sum(played.outcome not in ("ok", "refused") for played in progress.played):
            line.append(f", {bad} failed", "bold red")
    return line


def one_line(progress: Progress, document: dict[str, Any]) -> str:
    """The newest state in words."""
    held = [slot["holder"] for slot in document["slots"]]
    traffic = document["traffic"]
    answered = sum(played.outcome == "ok" for played in progress.played)
    return (
        f"{held.count('inference')} speech, {held.count('cleaning')} cleaning, {held.count('free')} free, "
        f"{document['standby']} standing by; {traffic['in_flight'] or 0} streaming, {traffic['queued'] or 0} waiting; "
        f"{answered}/{progress.requests} answered; "
        f"{sum(job.get('items_done', 0) for job in document['jobs'])} items cleaned"
    )
