"""The status of Reclaims, and those that are over.

Owns when it is written: once at the end, and in between only of a take-back that lasts, so that a burst costs the API
server little.  Owns the timings; called by `tending`.
"""

import logging
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from slackwater_operator.cluster.kube.evictions import drop
from slackwater_operator.cluster.kube.ports import ReclaimView, VictimView
from slackwater_operator.cluster.kube.state import RECLAIMS, State, together
from slackwater_operator.cluster.kube.takes import Take
from slackwater_operator.core import SlackwaterError
from slackwater_operator.kube.errors import NotFound
from slackwater_operator.kube.types import Object
from slackwater_operator.resources import names
from slackwater_operator.resources.base import Condition
from slackwater_operator.resources.conditions import EventReason, set_condition

logger = logging.getLogger(__name__)

LASTING_S = 1.0  # a take-back that is over sooner is written once
SLOW_S = 3.0  # one whose victims take longer is written while they are leaving
GIVE_UP_S = 30.0  # after deadline and grace: victims that are still there are not waited for
START_FOR_S = 5.0  # replicas that no plan has started by then are not needed any more
SERVE_FOR_S = 1800.0  # replicas that are not ready by then are not waited for


@dataclass(slots=True)
class Records:
    """Writes what became of take-backs."""

    state: State
    _tried_s: dict[tuple[str, str], float] = field(default_factory=dict)

    async def write(self, now_s: float) -> None:
        """Write what is worth writing now."""
        due: list[tuple[Take, str, bool]] = []
        for take in list(self.state.takes.values()):
            if take.is_planned or take.in_doubt:
                continue
            phase, is_over = self._phase(take, now_s)
            is_news = phase != take.written or take.is_late != take.is_late_written
            lasts = is_news and now_s - take.decided_s > (SLOW_S if phase == "Signalled" else LASTING_S)
            if (is_over or lasts) and now_s - self._tried_s.get(take.key, -LASTING_S) >= LASTING_S:
                self._tried_s[take.key] = now_s
                due.append((take, phase, is_over))
        for problem in await together([partial(self._write, *one, now_s) for one in due]):
            if isinstance(problem, SlackwaterError):
                logger.warning("a Reclaim's status is written later: %s", problem)
        self._tried_s = {key: at_s for key, at_s in self._tried_s.items() if key in self.state.takes}

    def _phase(self, take: Take, now_s: float) -> tuple[str, bool]:
        """(phase, whether it is the last one)."""
        made = [pod for pod in self.state.replicas(take) if not pod.is_over]
        take.served |= {pod.uid for pod in made if pod.is_ready}
        if take.freed_s is None and not take.living:
            take.freed_s = max((v.freed_s for v in take.victims.values() if v.freed_s is not None), default=now_s)
        if take.freed_s is None:
            is_lost = now_s - take.decided_s > take.deadline_s + self._grace_s(take) + GIVE_UP_S
            return ("Failed", True) if is_lost else ("Signalled", False)
        missing = [pod for pod in made if pod.uid not in take.served]
        if len(made) < take.expected and now_s - take.freed_s < START_FOR_S:
            return "Freed", False
        if missing and now_s - take.freed_s < SERVE_FOR_S:
            return "Freed", False
        if take.served and take.serving_s is None:
            take.serving_s = now_s
        return ("Serving" if take.served and not missing else "Freed"), take.is_settled

    def _grace_s(self, take: Take) -> float:
        jobs = self.state.catalogue.jobs
        return max(
            (jobs[victim.job].spec.template.grace_s for victim in take.living if victim.job in jobs), default=0.0
        )

    async def _write(self, take: Take, phase: str, is_over: bool, now_s: float) -> None:
        state, is_late = self.state, take.is_late
        status = take.status(phase, state.clock, 1) | {"conditions": self._conditions(take, now_s)}
        metadata = {"namespace": take.namespace, "name": take.name}
        if (seen := state.caches.reclaims.get(take.namespace, take.name)) is not None:
            # What a leader sent into a line that was cut may arrive when another one has written the end.
            metadata["resourceVersion"] = seen["metadata"]["resourceVersion"]
        try:
            async with state.limiter:
                made = await state.kube.apply(
                    RECLAIMS,
                    {"metadata": metadata, "status": status},
                    manager=names.MANAGER_RECLAIM,
                    subresource="status",
                )
            state.caches.reclaims.remember(made)
        except NotFound:
            is_over = is_over or not take.living  # somebody deleted the record
        take.written, take.is_late_written = phase, is_late
        if is_over:
            drop(state, take)
            state.closed.add(take.key)
            state.finished.append(_view(take))

    def _conditions(self, take: Take, now_s: float) -> list[Object]:
        late = [victim.pod for victim in take.living] if now_s - take.decided_s > take.deadline_s else []
        now = datetime.fromtimestamp(self.state.clock.wall(now_s), UTC)
        found: tuple[Condition, ...] = ()
        if late or take.is_late:
            message = f"still there: {', '.join(sorted(late)[:5])}" if late else "freed after the deadline"
            found = set_condition(
                names.RECLAIM, found, "InTime", EventReason.RECLAIM_DEADLINE_EXCEEDED, message, now=now, generation=1
            )
        elif not take.living:
            found = set_condition(names.RECLAIM, found, "InTime", "WithinDeadline", now=now, generation=1)
        if take.is_settled:
            found = set_condition(names.RECLAIM, found, "Lossless", *_lossless(take), now=now, generation=1)
        return [one.dump() for one in found]


def _lossless(take: Take) -> tuple[str, str]:
    """The reason and the words of that condition, by the rule of `endings`; the worst of the victims gives it."""
    by_outcome: dict[str, list[str]] = {}
    for victim in take.victims.values():
        by_outcome.setdefault(victim.outcome, []).append(victim.pod)
    lost_s = sum(victim.lost_s for victim in take.victims.values())
    again = f"{lost_s:.0f} GPU-seconds after them are done again" if lost_s >= 0.5 else ""  # else it shows as 0
    if pods := by_outcome.get("Lost"):
        told = f"{_listed(pods)}: the ledger does not hold the newest durable record; run slackwater clean verify on it"
        return "WorkLost", told
    if pods := by_outcome.get("Timeout"):
        unknown = any(victim.verified is None for victim in take.victims.values())
        held = "nobody could look for the newest durable record" if unknown else "nothing durable is lost"
        return "KilledAtDeadline", "; ".join(filter(None, (f"{_listed(pods)}: killed at the deadline, {held}", again)))
    if pods := by_outcome.get("Unverified"):
        return "NotVerified", f"{_listed(pods)}: nobody could look for the newest durable record"
    return "AllCheckpointed", f"the ledger holds all newest durable records; {again}" if again else ""


def _listed(pods: list[str]) -> str:
    pods = sorted(pods)
    return ", ".join(pods[:5]) + (f" and {len(pods) - 5} more" if len(pods) > 5 else "")


def _view(take: Take) -> ReclaimView:
    def since(moment_s: float | None) -> float | None:
        return None if moment_s is None else moment_s - take.decided_s

    return ReclaimView(
        namespace=take.namespace,
        name=take.name,
        pool=take.pool,
        flavor=take.flavor,
        reason=take.reason,
        spike_to_decided_s=None if take.spike_s is None else take.decided_s - take.spike_s,
        freed_s=since(take.freed_s),
        serving_s=since(take.serving_s),
        victims=tuple(
            VictimView(
                pod=victim.pod,
                job=victim.job,
                outcome=victim.outcome or "Timeout",
                gpus=victim.gpus,
                took_s=(victim.freed_s if victim.freed_s is not None else take.decided_s + take.deadline_s)
                - take.decided_s,
                lost_s=victim.lost_s,
                durable_s=since(victim.durable_s),
            )
            for victim in take.victims.values()
        ),
    )
