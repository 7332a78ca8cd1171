"""How far a cleaning job is, asked of the workers' room through its command line.

Owns the question (`slackwater clean status LEDGER --json` in a process of its own, so that a file system that
hangs costs an answer and not the controller) and the reading of the answer.  Called by `service`.
"""

import json
import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

ANSWER_S = 60.0  # a ledger of thousands of open shards on a slow file system


@dataclass(frozen=True, slots=True)
class Progress:
    """items_total: None while the input is still being read, or when the ledger could not be asked."""

    items_total: int | None = None
    items_done: int = 0
    items_quarantined: int = 0
    shards_open: int = 0

    @property
    def items_settled(self) -> int:
        return self.items_done + self.items_quarantined

    @property
    def is_finished(self) -> bool:
        return self.items_total is not None and self.items_settled >= self.items_total and self.shards_open == 0


class LedgerWatch:
    """Asks one ledger again and again, without ever waiting for it."""

    def __init__(self, ledger: Path, every_s: float) -> None:
        self._ledger = ledger
        self._every_s = every_s
        self._child: subprocess.Popen[str] | None = None
        self._asked_s: float | None = None
        self._said = ""
        self.progress: Progress | None = None  # None until the first answer
        self.answers = 0

    def poll(self, now_s: float) -> None:
        """Take an answer that is there, ask when it is time.  now_s: of a monotonic clock."""
        if self._child is not None and self._asked_s is not None:
            if self._child.poll() is None and now_s - self._asked_s < ANSWER_S:
                return
            self._take(self._child)
            self._child = None
        if self._asked_s is None or now_s - self._asked_s >= self._every_s:
            self._asked_s = now_s
            self._child = subprocess.Popen(
                [sys.executable, "-m", "slackwater_operator", "clean", "status", str(self._ledger), "--json"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

    def ask_soon(self) -> None:
        """Something happened: do not wait until it is time."""
        if self._child is None:
            self._asked_s = None

    def close(self) -> None:
        """End a question that is still open."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def _take(self, child: "subprocess.Popen[str]") -> None:
        if child.poll() is None:
            child.kill()
            child.communicate()
            self._complain(f"no answer within {ANSWER_S:g} s")
        else:
            out, complaint = child.communicate()
            try:
                self.progress = parse(out) if child.returncode == 0 else Progress()
            except ValueError as error:
                self._complain(str(error))
            if child.returncode != 0 and "clean run" not in complaint:  # that there is no ledger yet is no problem
                self._complain(" ".join(complaint.split()) or f"exit code {child.returncode}")
        self.progress = self.progress or Progress()
        self.answers += 1

    def _complain(self, message: str) -> None:
        if message != self._said:
            logger.warning("the ledger %s cannot be asked how far it is: %s", self._ledger, message)
        self._said = message


def parse(answer: str) -> Progress:
    """Read the answer of `slackwater clean status --json`.  Raises ValueError for anything else."""
    try:
        fields = json.loads(answer)
        return Progress(
            items_total=fields["items_total"],
            items_done=int(fields["items_done"]),
            items_quarantined=int(fields["items_quarantined"]),
            shards_open=int(fields["shards_open"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the answer of `clean status --json` was expected, got {answer[:80]!r}") from error
