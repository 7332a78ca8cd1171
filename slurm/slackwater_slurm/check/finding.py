"""What a rule says: how bad, what was found, what it costs, the line to set.

Owns the form, not the rules.  Imported by every module of `check`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from slackwater_slurm.check.facts import Site


class Severity(StrEnum):
    """ERROR: preemption does not happen, or loses work.  WARNING: it is slow, or GPUs stay idle.

    NOTE: worth knowing; does not make the check fail.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    cost: what it does to a job, measured where a number stands.
    fix: the line to set, whole, in the site's own names; or the command to give.
    """

    rule: str
    severity: Severity
    where: str  # slurm.conf, partition cleaning, gres.conf, or a script's name
    found: str
    cost: str
    fix: str


Rule = Callable[[Site], Iterator[Finding]]
