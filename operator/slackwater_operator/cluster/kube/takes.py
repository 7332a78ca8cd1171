"""Take-backs: one `Reclaim` object for all victims of one need, from the plan to the last timing.

Owns the record and its JSON.  The spec is written once, before anything is done, so that whoever leads next can
finish it; the status is only ever derived.  Owns no write and no choice of victims.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from slackwater_operator.cluster.kube.clock import Clock
from slackwater_operator.cluster.kube.pods import Pod
from slackwater_operator.core import Reason
from slackwater_operator.kube.types import Object, micro_stamp
from slackwater_operator.resources import names
from slackwater_operator.resources.base import duration
from slackwater_operator.resources.reclaim import Reclaim

OVER = ("Serving", "Cancelled", "Failed")  # phases after which nothing comes
Key = tuple[str, str]  # namespace, name


@dataclass(slots=True)
class Victim:
    """A pod that is asked to leave.

    asked_s: when its delete was sent by us.   freed_s: when its GPUs were seen free.   outcome: Checkpointed,
    Unverified, Lost or Timeout, once it is known.   durable_s: its newest durable record when it was last seen alive.
    """

    pod: str
    k8s_uid: str
    job: str
    node: str
    gpus: int
    estimated_lost_s: float = 0.0
    asked_s: float | None = None
    freed_s: float | None = None
    outcome: str = ""
    verified: bool | None = None
    durable_unit: int | None = None
    digest: str | None = None
    durable_s: float | None = None
    lost_s: float = 0.0

    @property
    def is_freed(self) -> bool:
        return self.freed_s is not None


@dataclass(slots=True)
class Take:
    """One take-back while it lasts.

    variant: uid of the Variant that the GPUs are for, "" if they are for somebody else or nobody.   is_planned: its
    Reclaim is not written yet, so nobody may be told to go.   in_doubt: it was sent, and the answer was lost.
    written: the phase that its object shows.   forsaken: nodes on which nobody waits any more, as their victims hang.
    """

    namespace: str
    name: str
    ref_kind: str
    ref_name: str
    pool: str
    flavor: str
    reason: Reason
    deadline_s: float
    decided_s: float
    victims: dict[str, Victim]
    variant: str = ""
    replica_gpus: int = 1
    spike_s: float | None = None
    is_planned: bool = False
    in_doubt: bool = False
    written: str = ""
    freed_s: float | None = None
    serving_s: float | None = None
    is_late: bool = False  # the deadline's passing was said
    is_late_written: bool = False
    forsaken: set[str] = field(default_factory=set)
    replicas: dict[str, str] = field(default_factory=dict)  # pods that were asked for by us: uid -> node
    served: set[str] = field(default_factory=set)  # of these, those that were ready

    @property
    def key(self) -> Key:
        return self.namespace, self.name

    @property
    def policy_flavor(self) -> str:
        return names.policy_flavor(self.pool, self.flavor)

    @property
    def living(self) -> list[Victim]:
        """Victims that still hold their GPUs."""
        return [victim for victim in self.victims.values() if not victim.is_freed]

    @property
    def expected(self) -> int:
        """How many replicas it makes room for by itself, at least one if it is for a service."""
        if not self.variant:
            return 0
        freed: dict[str, tuple[int, int]] = {}
        for victim in self.victims.values():
            gpus, count = freed.get(victim.node, (0, 0))
            freed[victim.node] = (gpus + victim.gpus, count + 1)
        return max(1, sum(reservations(freed, {}, self.replica_gpus).values()))

    @property
    def is_settled(self) -> bool:
        """All victims are gone, and what they left is known."""
        return all(victim.is_freed and victim.outcome for victim in self.victims.values())

    def body(self) -> Object:
        """The Reclaim to create."""
        return {
            "metadata": {"namespace": self.namespace, "name": self.name},
            "spec": {
                "forRef": {"kind": self.ref_kind, "name": self.ref_name},
                "pool": self.pool,
                "flavor": self.flavor,
                "gpus": sum(victim.gpus for victim in self.victims.values()),
                "reason": str(self.reason),
                "deadline": duration(self.deadline_s),
                "victims": [
                    {
                        "pod": victim.pod,
                        "job": victim.job,
                        "node": victim.node,
                        "uid": victim.k8s_uid,
                        "gpus": victim.gpus,
                        "estimatedLostSeconds": round(victim.estimated_lost_s, 3),
                    }
                    for victim in self.victims.values()
                ],
            },
        }

    def status(self, phase: str, clock: Clock, generation: int) -> Object:
        """The status to write."""

        def stamp(moment_s: float | None) -> str | None:
            return None if moment_s is None else micro_stamp(clock.wall(moment_s))

        timings = {
            "spikeAt": stamp(self.spike_s),
            "decidedAt": stamp(self.decided_s),
            "freedAt": stamp(self.freed_s),
            "servingAt": stamp(self.serving_s),
        }
        status: Object = {
            "observedGeneration": generation,
            "phase": phase,
            "victims": [_victim_status(victim, stamp(victim.freed_s)) for victim in self.victims.values()],
            "timings": {key: value for key, value in timings.items() if value is not None},
            "lostSeconds": round(sum(victim.lost_s for victim in self.victims.values()), 3),
        }
        if self.freed_s is not None:
            status["took"] = duration(self.freed_s - self.decided_s)
        return status


def _victim_status(victim: Victim, freed_at: str | None) -> Object:
    shown = {
        "pod": victim.pod,
        "outcome": victim.outcome or "Leaving",
        "durableUnit": victim.durable_unit,
        "digest": victim.digest,
        "verified": victim.verified,
        "freedAt": freed_at,
        "lostSeconds": round(victim.lost_s, 3),
    }
    return {key: value for key, value in shown.items() if value is not None}


def take_name(beneficiary: str, victims: Iterable[Pod], decided_wall_s: float) -> str:
    """A name for people, and no other take-back's: whom it is for, when, and a digest of its victims."""
    when = datetime.fromtimestamp(decided_wall_s, UTC).strftime("%Y%m%d-%H%M%S")
    text = "\n".join([f"{decided_wall_s:.6f}", *sorted(pod.k8s_uid for pod in victims)])
    return f"{beneficiary[:40].rstrip('-.')}-{when}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def resumed(reclaim: Reclaim, clock: Clock) -> Take:
    """A take-back from its object: another leader began it."""
    spec, status = reclaim.spec, reclaim.status
    assert spec.victims is not None, "a dry run is no take-back"
    told = {victim.pod: victim for victim in status.victims}
    victims = {}
    for planned in spec.victims:
        victim = Victim(planned.pod, planned.uid, planned.job, planned.node, planned.gpus, planned.estimated_lost_s)
        if (seen := told.get(planned.pod)) is not None and seen.outcome != "Leaving":
            victim.outcome, victim.verified, victim.lost_s = seen.outcome, seen.verified, seen.lost_s
            victim.durable_unit, victim.digest = seen.durable_unit, seen.digest
        if seen is not None and seen.freed_at is not None:
            victim.freed_s = clock.moment(seen.freed_at.timestamp())
            victim.outcome = victim.outcome or "Unverified"  # what it left behind went with the leader that saw it
        victims[planned.pod] = victim
    created = reclaim.metadata.creation_timestamp
    decided = status.timings.decided_at or created
    spike = status.timings.spike_at
    is_service = spec.for_ref.kind == "InferenceDeployment"
    return Take(
        namespace=reclaim.metadata.namespace,
        name=reclaim.metadata.name,
        ref_kind=spec.for_ref.kind,
        ref_name=spec.for_ref.name,
        pool=spec.pool or "",
        flavor=spec.flavor or "",
        reason=spec.reason or Reason.TRAFFIC,
        deadline_s=spec.deadline_s,
        decided_s=clock.moment(decided.timestamp() if decided else 0.0),
        victims=victims,
        variant=names.variant_uid(reclaim.metadata.namespace, spec.for_ref.name, spec.pool or "", spec.flavor or "")
        if is_service
        else "",
        spike_s=None if spike is None else clock.moment(spike.timestamp()),
        written=status.phase or "Planned",
    )


def reservations(freed: Mapping[str, tuple[int, int]], room: Mapping[str, int], gpus: int) -> dict[str, int]:
    """By node, how many replicas of `gpus` to let wait for the GPUs of a take-back's victims.

    freed: node -> (GPUs, victims) of this take-back.   room: node -> GPUs that are free or coming anyway and that
    nobody waits for.  Never more than one replica a victim: what else is freed, the next plan gives on.
    """
    found = {}
    for node, (more, victims) in freed.items():
        now = room.get(node, 0)
        count = min(victims, (now + more) // gpus - now // gpus)
        if count > 0:
            found[node] = count
    return found
