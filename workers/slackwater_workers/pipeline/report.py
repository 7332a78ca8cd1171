"""What a worker says while it works.

Owns its voices: events to a supervisor, one line to a person, the receipt for a kubelet.  Decides nothing.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

from slackwater_workers.core import Progress, Receipt
from slackwater_workers.events import ParentLink
from slackwater_workers.pipeline.receipt import ReceiptFile

_PERSON_EVERY_S = 0.5


class Report(Protocol):
    """Told of every step of a worker."""

    def working(self, progress: Progress) -> None:
        """A shard was claimed."""

    def durable(self, unit: str, receipt: Receipt, audio_s: float) -> None:
        """One more record is on disk.  audio_s: of this record."""

    def idle(self, progress: Progress) -> None:
        """Nothing to claim just now."""

    def leaving(self, reason: str) -> None:
        """A stop was understood."""


class _Totals:
    """This process's own sums, and with them what is said of a record that is durable."""

    def __init__(self) -> None:
        self._items = 0
        self._audio_s = 0.0

    def durable(self, unit: str, receipt: Receipt, audio_s: float) -> dict[str, Any]:
        """The fields of the `durable` event, this record being counted in."""
        self._items += 1
        self._audio_s += audio_s
        return {
            "unit": unit,
            "path": receipt.path,
            "size_bytes": receipt.size_bytes,
            "sha256": receipt.sha256,
            "items": self._items,
            "audio_s": round(self._audio_s, 3),
        }


class SupervisorReport:
    """Events of the contract in operator/README.md."""

    def __init__(self, link: ParentLink, job: str) -> None:
        self._link = link
        self._job = job
        self._totals = _Totals()

    def working(self, progress: Progress) -> None:
        self._link.say("working", job=self._job, **_counts(progress))

    def durable(self, unit: str, receipt: Receipt, audio_s: float) -> None:
        self._link.say("durable", **self._totals.durable(unit, receipt, audio_s))

    def idle(self, progress: Progress) -> None:
        self._link.say("idle", **_counts(progress))

    def leaving(self, reason: str) -> None:
        self._link.say("leaving", reason=reason)


def _counts(progress: Progress) -> dict[str, int | None]:
    return {
        "items_done": progress.items_settled,
        "items_total": progress.items_total,
        "items_open": progress.items_open,
        "shards_open": progress.shards_open,
    }


class ReceiptReport:
    """Says everything to another report, and keeps the newest `durable` in a file that outlives this process.

    worker: the name that this process was given.
    """

    def __init__(self, inner: Report, file: ReceiptFile, worker: str) -> None:
        self._inner = inner
        self._file = file
        self._worker = worker
        self._totals = _Totals()

    def working(self, progress: Progress) -> None:
        self._inner.working(progress)

    def durable(self, unit: str, receipt: Receipt, audio_s: float) -> None:
        self._file.replace({**self._totals.durable(unit, receipt, audio_s), "worker": self._worker})
        self._inner.durable(unit, receipt, audio_s)

    def idle(self, progress: Progress) -> None:
        self._inner.idle(progress)

    def leaving(self, reason: str) -> None:
        self._inner.leaving(reason)


class PersonReport:
    """One line, rewritten on a terminal, repeated elsewhere only when something changes.

    show: writes a line; is_terminal: whether it can be rewritten.
    """

    def __init__(
        self, show: Callable[[str], None], is_terminal: bool, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._show = show
        self._is_terminal = is_terminal
        self._monotonic_s = monotonic_s
        self._started_s = monotonic_s()
        self._shown_s = float("-inf")
        self._audio_s = 0.0
        self._at_claim: Progress | None = None
        self._items_since_claim = 0

    def working(self, progress: Progress) -> None:
        self._at_claim = progress
        self._items_since_claim = 0
        self._line(progress, "cleaning" if progress.items_total is not None else "reading the input")

    def durable(self, unit: str, receipt: Receipt, audio_s: float) -> None:  # noqa: ARG002 - a person needs no proof
        self._items_since_claim += 1
        self._audio_s += audio_s
        if self._monotonic_s() - self._shown_s >= (_PERSON_EVERY_S if self._is_terminal else 10 * _PERSON_EVERY_S):
            assert self._at_claim is not None, "a record needs a claim"
            self._line(self._at_claim, "cleaning")

    def idle(self, progress: Progress) -> None:
        self._line(progress, "idle: other workers hold the rest")

    def leaving(self, reason: str) -> None:
        self._show(f"leaving ({reason}); start again to go on, nothing is lost")

    def _line(self, progress: Progress, doing: str) -> None:
        self._shown_s = self._monotonic_s()
        if progress.items_total is None:
            self._show(f"{doing}: {progress.shards_total - progress.shards_open} of {progress.shards_total} parts")
            return
        elapsed_s = max(self._shown_s - self._started_s, 1e-9)
        speed = f", {self._audio_s / elapsed_s:.0f}x realtime" if self._audio_s else ""
        settled = progress.items_settled + self._items_since_claim
        bad = f", {progress.items_quarantined} quarantined" if progress.items_quarantined else ""
        self._show(f"{doing}: {settled} of {progress.items_total} items{bad}{speed}")
