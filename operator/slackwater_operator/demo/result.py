"""What a demo run measured; `demo-report.json` is its JSON form, the HTML page its picture."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SlotMoment:
    """One slot at one moment.  holder: inference, cleaning or free; phase: of its workload, "" when free."""

    holder: str
    phase: str
    uid: str


@dataclass(frozen=True, slots=True)
class Moment:
    """One sample of the run, four a second.  t_s counts from the start of the traffic; negative before."""

    t_s: float
    slots: tuple[SlotMoment, ...]
    in_flight: int  # requests that hold a decode slot
    queued: int
    capacity: int  # decode slots of the replicas that serve
    items_done: int


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request as its client saw it.  first_audio_s and total_s count from its sending."""

    t_s: float
    frames: int
    outcome: str  # ok, refused, broken, failed or short
    first_audio_s: float | None
    total_s: float | None
    retries: int  # honest refusals before the answer
    burst: bool  # sent while more than one replica was needed


@dataclass(frozen=True, slots=True)
class Eviction:
    """One slot taken back."""

    t_s: float
    uid: str
    reason: str
    took_s: float  # from the decision until the slot was seen free
    outcome: str
    verified: bool
    items: int


@dataclass(frozen=True, slots=True)
class JobResult:
    """One cleaning job after the run, as `slackwater clean verify` found it."""

    name: str
    items_total: int
    items_done: int
    items_open: int
    items_lost: int
    items_doubled: int
    items_quarantined: int


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The whole run."""

    started_at: str  # ISO 8601, UTC
    wall_s: float
    machine: str
    versions: dict[str, str]
    slots: int
    trace: str  # which requests were played, in words
    verdict: str  # "" when all holds, else what does not, in words
    useful_ratio: float
    useful_ratio_without_filling: float
    gpu_seconds: dict[str, float]
    jobs: tuple[JobResult, ...]
    moments: tuple[Moment, ...]
    requests: tuple[RequestRow, ...]
    evictions: tuple[Eviction, ...]
    clean_command: str = ""  # how to look at the ledgers, if they were kept
    speech: bytes = b""  # an MP3 that the API streamed after the traffic, for a listener; b"" = there is none

    def figures(self) -> dict[str, Any]:
        """The figures that the report, the table and the bench quote."""
        answered = [r for r in self.requests if r.outcome == "ok"]
        quiet = [r.first_audio_s for r in answered if r.first_audio_s is not None and not r.burst]
        burst = [r.first_audio_s for r in answered if r.first_audio_s is not None and r.burst]
        took = [eviction.took_s for eviction in self.evictions if eviction.reason == "traffic"]
        everything = quiet + burst
        return {
            "items_done": sum(job.items_done for job in self.jobs),
            "items_lost": sum(job.items_lost for job in self.jobs),
            "items_doubled": sum(job.items_doubled for job in self.jobs),
            "items_quarantined": sum(job.items_quarantined for job in self.jobs),
            "evictions": len(took),
            "evictions_verified": sum(e.verified for e in self.evictions if e.reason == "traffic"),
            "requests": len(self.requests),
            "requests_answered": len(answered),
            "requests_refused": sum(r.outcome == "refused" for r in self.requests),
            "requests_failed": sum(r.outcome not in ("ok", "refused") for r in self.requests),
            "useful_ratio": round(self.useful_ratio, 4),
            "useful_ratio_without_filling": round(self.useful_ratio_without_filling, 4),
            "reclaim_p50_s": quantile(took, 0.5),
            "reclaim_p99_s": quantile(took, 0.99),
            "first_audio_p50_s": quantile(everything, 0.5),
            "first_audio_p99_s": quantile(everything, 0.99),
            "first_audio_quiet_p50_s": quantile(quiet, 0.5),
            "first_audio_quiet_p99_s": quantile(quiet, 0.99),
            "first_audio_burst_p50_s": quantile(burst, 0.5),
            "first_audio_burst_p99_s": quantile(burst, 0.99),
        }

    def as_json(self) -> dict[str, Any]:
        """The document of demo-report.json: the figures, and under `run` all that they come from."""
        run = asdict(self)
        del run["speech"]  # a file of its own
        return self.figures() | {"run": run}


def quantile(values: list[float], share: float) -> float | None:
    """The smallest value that at least `share` of all do not exceed; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))], 4)


@dataclass(slots=True)
class Recording:
    """Collects moments while the demo runs."""

    moments: list[Moment] = field(default_factory=list)

    def add(self, document: dict[str, Any], t_s: float) -> Moment:
        """Take one status document in; returns what was kept of it."""
        slots = document["slots"]
        moment = Moment(
            t_s=round(t_s, 3),
            slots=tuple(SlotMoment(s["holder"], s.get("phase", ""), s.get("uid", "")) for s in slots),
            in_flight=document["traffic"]["in_flight"] or 0,
            queued=document["traffic"]["queued"] or 0,
            capacity=sum(s.get("decode_slots", 0) for s in slots if s.get("phase") == "running"),
            items_done=sum(job.get("items_done", 0) for job in document["jobs"]),
        )
        self.moments.append(moment)
        return moment
