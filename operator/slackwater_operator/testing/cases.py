"""The policy's inputs in a few words: each builder makes one value of `core`, plain where a test says nothing.

`rest` sets any other field of the value.  Flavors are "h200", nodes "a" and the service "tts" unless told;
the moment is NOW_S.  Called by the tests of the policy alone.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from slackwater_operator.core import (
    CleaningJob,
    Kind,
    Limits,
    Load,
    Node,
    Phase,
    Plan,
    Service,
    Snapshot,
    Variant,
    Workload,
)
from slackwater_operator.policy import check_budget, plan

NOW_S = 1000.0


def load(
    slots: float = 0.0, *, slope: float = 0.0, peak: float | None = None, rise: float = 0.0, stale: bool = False
) -> Load:
    """A steady demand; `peak` is the maximum over the scale-down window, by default the demand itself."""
    return Load(slots, slots, slots, slope, slots if peak is None else peak, rise, 1.0, 99.0 if stale else 0.5, stale)


def service(
    demand: Load,
    *,
    least: int = 0,
    most: int = 99,
    slots: int = 4,
    lead_s: float = 2.0,
    name: str = "tts",
    variants: tuple[Variant, ...] | None = None,
    **rest: Any,
) -> Service:
    """A service; `slots` and `lead_s` are those of its one variant, unless `variants` says more."""
    if variants is None:
        variants = (Variant("tts/h200", "h200", slots, lead_s),)
    return Service(name, least, most, variants, demand, **rest)


def node(
    gpus: int, free: int = 0, name: str = "a", *, flavor: str = "h200", idle_s: float = 100.0, **rest: Any
) -> Node:
    """A node of which `free` GPUs are seen free, and have been for `idle_s`."""
    return Node(name, flavor, gpus, idle_since_s=(NOW_S - idle_s,) * free, **rest)


def replica(uid: str, *, phase: Phase = Phase.RUNNING, running: int = 0, **rest: Any) -> Workload:
    """A replica with `running` slots in use."""
    made = Workload(uid, Kind.INFERENCE, "tts", "h200", "a", phase, 0.0, running_slots=running)
    return replace(made, **rest)


def worker(uid: str, *, phase: Phase = Phase.RUNNING, unsafe_s: float = 0.0, **rest: Any) -> Workload:
    """A cleaning worker whose newest `unsafe_s` seconds of work are not durable."""
    made = Workload(
        uid, Kind.CLEANING, "clean", "h200", "a", phase, 500.0, preemptible=True, durable_s=NOW_S - unsafe_s
    )
    return replace(made, **rest)


def training(uid: str, *, phase: Phase = Phase.RUNNING, **rest: Any) -> Workload:
    """A training job; on no node while it is pending."""
    made = Workload(uid, Kind.TRAINING, uid, "h200", "" if phase is Phase.PENDING else "a", phase, 0.0)
    return replace(made, **rest)


def job(
    uid: str = "clean",
    *,
    least: int = 0,
    most: int = 99,
    work: int = 99,
    flavors: tuple[str, ...] = ("h200",),
    **rest: Any,
) -> CleaningJob:
    """A cleaning job with `work` open units."""
    return CleaningJob(uid, least, most, work, flavors, **rest)


def snapshot(
    nodes: Iterable[Node],
    workloads: Iterable[Workload] = (),
    services: Iterable[Service] = (),
    jobs: Iterable[CleaningJob] = (),
    **limits: Any,
) -> Snapshot:
    """The pool at NOW_S; `limits` are fields of `Limits`."""
    return Snapshot(NOW_S, tuple(nodes), tuple(workloads), tuple(services), tuple(jobs), limits=Limits(**limits))


def acts(made: Plan) -> list[tuple[object, ...]]:
    """The actions as short tuples; counts of one are left out."""
    return [(a.verb, a.uid, a.reason) if a.count == 1 else (a.verb, a.uid, a.count, a.reason) for a in made.actions]


def checked(seen: Snapshot) -> Plan:
    """The policy's plan, after it has passed the budget.  Raises BudgetExceeded as `check_budget` does."""
    made = plan(seen)
    check_budget(seen, made)
    return made
