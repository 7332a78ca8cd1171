"""Rules about how quickly training starts and workers come back.

Pure.  FAST, where a cost names it, is batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=1
with cred_expire=5; all delays were measured with workers that leave 0.1 s after SIGTERM.
"""

from collections.abc import Iterator

from slackwater_slurm.check.facts import Site, with_parameters
from slackwater_slurm.check.finding import Finding, Rule, Severity
from slackwater_slurm.core import SlurmVersion

REQUEUE_DELAY_SINCE = SlurmVersion(25, 11)
_SCHEDULER = "SchedulerParameters"
_CRED_EXPIRE_S = 120  # Slurm's default, and what it takes for anything below 5
_MIN_CRED_EXPIRE_S = 5


def requeue_delay(site: Site) -> Iterator[Finding]:
    has_word = site.version >= REQUEUE_DELAY_SINCE
    given = site.parameter(_SCHEDULER, "requeue_delay")
    if given is not None and not has_word:
        yield _scheduler(
            site,
            "requeue-delay-unknown",
            Severity.NOTE,
            f"requeue_delay={given}",
            f"Slurm {site.version} does not know it (25.11 does) and ignores it without a word",
            {},
            drop="requeue_delay",
        )
    if given is not None and has_word:
        if (_whole(given) or 0) > 5:
            yield _scheduler(
                site,
                "requeue-delay",
                Severity.WARNING,
                f"requeue_delay={given}",
                f"a preempted worker may start again only after {given} s; 1.05 s was measured with 0",
                {"requeue_delay": "0"},
            )
        return
    text = site.parameter("AuthInfo", "cred_expire")
    found_s = _whole(text) if text is not None else _CRED_EXPIRE_S
    if found_s is None or found_s < _MIN_CRED_EXPIRE_S:
        effective_s, note = _CRED_EXPIRE_S, f" (Slurm takes {_CRED_EXPIRE_S} for anything below {_MIN_CRED_EXPIRE_S})"
    else:
        effective_s, note = found_s, ""
    if effective_s <= 15:
        return
    cost = f"a preempted worker comes back after {effective_s + 1} s or more{note}"
    if has_word:
        yield _scheduler(
            site,
            "requeue-delay",
            Severity.WARNING,
            "no requeue_delay",
            f"{cost}; 1.05 s with it",
            {"requeue_delay": "0"},
        )
        return
    yield Finding(
        "requeue-delay",
        Severity.WARNING,
        "slurm.conf",
        f"AuthInfo={site.text('AuthInfo')}" if text is not None else "no cred_expire in AuthInfo",
        f"{cost}; 6 to 7 s with cred_expire=5 and FAST",
        f"AuthInfo={with_parameters(site.text('AuthInfo'), cred_expire=str(_MIN_CRED_EXPIRE_S))}",
    )


def sched_interval(site: Site) -> Iterator[Finding]:
    given = site.parameter(_SCHEDULER, "sched_interval")
    seconds = _whole(given) if given is not None else 60
    if given == "-1":
        cost = "the main scheduler never runs by itself: waiting workers start only by backfill"
        yield _scheduler(site, "sched-interval", Severity.ERROR, "sched_interval=-1", cost, {"sched_interval": "2"})
    elif seconds is None or seconds > 5:
        found = f"sched_interval={given}" if given is not None else "no sched_interval (60 by default)"
        cost = "preempted workers came back after 22 to 28 s, even with cred_expire=5; 6 s with 2"
        yield _scheduler(site, "sched-interval", Severity.WARNING, found, cost, {"sched_interval": "2"})


def batch_sched_delay(site: Site) -> Iterator[Finding]:
    given = site.parameter(_SCHEDULER, "batch_sched_delay")
    seconds = _whole(given) if given is not None else 3
    if seconds is None or seconds > 0:
        found = f"batch_sched_delay={given}" if given is not None else "no batch_sched_delay (3 s by default)"
        cost = f"a submission may wait {3 if seconds is None else seconds} s before anybody looks at it"
        yield _scheduler(site, "batch-sched-delay", Severity.WARNING, found, cost, {"batch_sched_delay": "0"})


def sched_min_interval(site: Site) -> Iterator[Finding]:
    given = site.parameter(_SCHEDULER, "sched_min_interval")
    micros = _whole(given) if given is not None else 2
    if micros is None or micros > 500_000:
        cost = f"the scheduler looks at the queue at most every {(micros or 0) / 1e6:g} s, so SIGTERM waits for that"
        yield _scheduler(
            site,
            "sched-min-interval",
            Severity.WARNING,
            f"sched_min_interval={given}",
            cost,
            {"sched_min_interval": "0"},
        )


def bf_interval(site: Site) -> Iterator[Finding]:
    given = site.parameter(_SCHEDULER, "bf_interval")
    seconds = _whole(given) if given is not None else 30
    if seconds is None or seconds > 10:
        found = f"bf_interval={given}" if given is not None else "no bf_interval (30 s by default)"
        cost = "what only backfill can start waits for its next pass (FAST: workers back in 6.2 s instead of 23 to 27)"
        yield _scheduler(site, "bf-interval", Severity.NOTE, found, cost, {"bf_interval": "1"})


def defer(site: Site) -> Iterator[Finding]:
    for word in ("defer", "defer_batch"):
        if site.parameter(_SCHEDULER, word) is not None:
            cost = "nothing is tried when a job is submitted: training began after 1.9 s instead of 1.1 in one trial"
            yield _scheduler(site, "defer", Severity.NOTE, word, cost, {}, drop=word)


def slurmd_timeout(site: Site) -> Iterator[Finding]:
    found_s = site.seconds("SlurmdTimeout")
    if found_s == 0 or (found_s is not None and found_s > 300):
        waits = "never" if found_s == 0 else f"only after {found_s:g} s"
        yield Finding(
            "slurmd-timeout",
            Severity.NOTE,
            "slurm.conf",
            f"SlurmdTimeout={found_s:g}",
            f"workers of a crashed node are requeued {waits} (25.9 s with SlurmdTimeout=5)",
            "SlurmdTimeout=60",
        )


RULES: tuple[Rule, ...] = (
    requeue_delay,
    sched_interval,
    batch_sched_delay,
    sched_min_interval,
    bf_interval,
    defer,
    slurmd_timeout,
)


def _scheduler(
    site: Site, rule: str, severity: Severity, found: str, cost: str, changes: dict[str, str], drop: str = ""
) -> Finding:
    """A finding whose fix is the site's own SchedulerParameters with `changes` in and `drop` out."""
    kept = ",".join(part for part in site.text(_SCHEDULER).split(",") if part.partition("=")[0].strip() != drop)
    return Finding(rule, severity, "slurm.conf", found, cost, f"{_SCHEDULER}={with_parameters(kept, **changes)}")


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
