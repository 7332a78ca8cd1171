"""How the replicas of a service move to the revision that serves: one more is started, then an old one drains.

Pure but for its memory of how many replicas there were.  The policy starts the new replica, because the service's floor
is raised by one, and so takes a GPU back from cleaning if it must; the drain is this module's.  Called by `lead`.
"""

from dataclasses import dataclass, field

from slackwater_operator.cluster.kube.ports import ReplicaView, ServiceView
from slackwater_operator.core import Phase
from slackwater_operator.loop import ServiceSpec

ACTIVE = (Phase.STARTING, Phase.RUNNING)
SURGE_PATIENCE_S = 60.0  # no GPU for one more by then: an old replica goes first, if another one serves


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now.  bounds: (min, max) replicas for the policy, None = the spec's own.   drain: a replica."""

    bounds: tuple[int, int] | None = None
    drain: str | None = None


@dataclass(slots=True)
class _Roll:
    base: int  # replicas when it began
    asked_s: float | None = None  # since when one more is asked for, and none came


@dataclass(slots=True)
class Rollout:
    """The rolls under way, by service.  A new leader begins with none, and may hold one replica more for a while."""

    _rolls: dict[str, _Roll] = field(default_factory=dict)

    def step(self, spec: ServiceSpec, view: ServiceView, serving: str | None, now_s: float) -> Step:
        """The next step of one service.  serving: the revision; None = nothing may be started, so nothing moves."""
        old = [replica for replica in view.replicas if replica.revision != serving]
        active = [replica for replica in view.replicas if replica.phase in ACTIVE]
        old_active = [replica for replica in old if replica.phase in ACTIVE]
        if serving is None or not old:
            self.rest(spec.name)
            return Step()
        roll = self._rolls.setdefault(spec.name, _Roll(len(active)))
        if any(replica not in old_active for replica in old):
            return self._hold(spec, roll, len(active))  # an old one is leaving: it holds the one GPU more
        if broken := [replica for replica in old_active if not replica.is_ready]:
            return Step(self._bounds(spec, len(active)), min(broken, key=lambda one: one.uid).uid)  # it serves nobody
        if any(not replica.is_ready for replica in active):
            return self._hold(spec, roll, len(active))  # the new one loads
        if len(active) > roll.base:
            roll.asked_s = None
            return Step(self._bounds(spec, len(active)), _first(old_active))
        roll.asked_s = now_s if roll.asked_s is None else roll.asked_s
        if now_s - roll.asked_s > SURGE_PATIENCE_S and len(active) > 1:
            roll.asked_s = None
            return Step(self._bounds(spec, len(active)), _first(old_active))
        return Step(self._bounds(spec, len(active) + 1))

    def rest(self, service: str) -> None:
        """All of its replicas are of the revision that serves."""
        self._rolls.pop(service, None)

    def forget(self, services: set[str]) -> None:
        """Only these are left."""
        for name in [name for name in self._rolls if name not in services]:
            del self._rolls[name]

    def _hold(self, spec: ServiceSpec, roll: _Roll, count: int) -> Step:
        roll.asked_s = None
        return Step(self._bounds(spec, count))

    @staticmethod
    def _bounds(spec: ServiceSpec, floor: int) -> tuple[int, int]:
        return max(spec.min_replicas, floor), max(spec.max_replicas, floor)


def _first(old: list[ReplicaView]) -> str:
    return min(old, key=lambda replica: replica.uid).uid
