"""What `LocalCluster` knows of each of its children: engine replicas, workers and the gateway."""

from dataclasses import dataclass, field
from typing import Any

from slackwater_operator.cluster.child import Child
from slackwater_operator.core import Kind, Phase, Reason, Workload

PREEMPTED = 75  # exit code: left with its work durable
BAD_INPUT = 2  # exit code: a person has to change something; not started again


@dataclass(slots=True)
class Member:
    """An engine replica or a worker.  slot: None while an engine stands by."""

    uid: str
    kind: Kind
    owner: str
    slot: int | None
    started_s: float
    phase: Phase = Phase.STARTING
    child: Child | None = None  # None while the process is being started
    loaded: bool = False  # stands by, ready to be woken
    leaving_since_s: float | None = None
    reason: Reason | None = None  # why it was told to go
    decided_s: float | None = None
    killed: bool = False  # outlasted its grace
    # engines
    url: str = ""
    decode_slots: int = 0
    running: int = 0
    # workers
    receipt: dict[str, Any] | None = None  # the newest `durable` event
    durable_s: float | None = None
    mark_s: float | None = None  # since when the seconds after the last commit count
    committed_s: float = 0.0
    items: int = 0
    audio_s: float = 0.0

    def hear(self, event: dict[str, Any], now_s: float) -> None:
        """Take in what the child says of itself."""
        match event["event"]:
            case "standby":
                self.loaded = True
            case "ready":
                self.url = str(event.get("url", ""))
                self.decode_slots = int(event.get("slots") or 0)
                if self.phase is Phase.STARTING:
                    self.phase = Phase.RUNNING
            case "load":
                self.running = int(event.get("running") or 0) + int(event.get("waiting") or 0)
            case "working":
                if self.phase is Phase.STARTING:
                    self.phase = Phase.RUNNING
                self.mark_s = self.mark_s or now_s
                self.durable_s = self.durable_s or now_s
            case "durable":
                self.receipt = event
                self.items = int(event.get("items") or 0)
                self.audio_s = float(event.get("audio_s") or 0.0)
                self.committed_s += now_s - (self.mark_s or now_s)
                self.mark_s = self.durable_s = now_s
            case "idle":
                self.mark_s, self.durable_s = None, now_s
            case _:
                pass

    def workload(self, flavor: str, node: str, preemptible: bool) -> Workload:
        """As the policy sees it; only for members with a slot."""
        return Workload(
            uid=self.uid,
            kind=self.kind,
            owner=self.owner,
            flavor=flavor,
            node=node,
            phase=self.phase,
            started_s=self.started_s,
            preemptible=preemptible,
            leaving_since_s=self.leaving_since_s,
            durable_s=self.durable_s,
            running_slots=self.running,
            committed_s=self.committed_s,
        )


@dataclass(slots=True)
class Owner:
    """A service or a job: what its children's ends taught about starting the next one."""

    failures: int = 0  # in a row
    not_before_s: float = 0.0  # back-off
    broken: str = ""  # why it will not be started again, in words
    done: bool = False  # a job whose every item is finished
    progress: dict[str, int] = field(default_factory=dict)  # items_done, items_total, items_open, shards_open

    def may_start(self, now_s: float) -> bool:
        """Whether a child may be started now."""
        return not self.broken and not self.done and now_s >= self.not_before_s

    def settle_one(self) -> None:
        """One more item is durable.  An estimate between two counts by the workers, which see all of the ledger."""
        if "items_total" in self.progress:
            done = min(self.progress["items_total"], self.progress.get("items_done", 0) + 1)
            self.progress |= {"items_done": done, "items_open": self.progress["items_total"] - done}

    def finish(self) -> None:
        """The job is done: a worker found nothing left to do."""
        self.done = True
        self.progress |= {"items_open": 0, "shards_open": 0}
        if "items_total" in self.progress:
            self.progress["items_done"] = self.progress["items_total"]

    def failed(self, now_s: float) -> float:
        """Book a failure; returns the back-off in seconds: 1, 2, 4 … 60."""
        self.failures += 1
        delay_s = min(60.0, 2.0 ** (self.failures - 1))
        self.not_before_s = now_s + delay_s
        return delay_s


@dataclass(frozen=True, slots=True)
class Reclaim:
    """One slot taken back: its timings and what it cost.  outcome: checkpointed, lost or timeout."""

    uid: str
    owner: str
    reason: Reason
    decided_s: float
    freed_s: float
    outcome: str
    verified: bool  # the worker's last receipt was read back from disk and its digest is right
    items: int
    lost_s: float  # work done after the last durable point

    @property
    def took_s(self) -> float:
        return self.freed_s - self.decided_s

    def as_json(self) -> dict[str, Any]:
        """As it stands in the status document and the event log."""
        return {
            "uid": self.uid,
            "reason": self.reason,
            "decided_s": round(self.decided_s, 3),
            "freed_s": round(self.freed_s, 3),
            "took_s": round(self.took_s, 3),
            "outcome": self.outcome,
            "verified": self.verified,
            "items": self.items,
            "lost_s": round(self.lost_s, 3),
        }
