"""The status document of a supervisor on one machine: written by it, read by `slackwater status`.

One JSON file in the state folder, replaced whole; `running` says whether its writer still lives.
Moments are on the machine's monotonic clock, which all its processes share.
"""

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from slackwater_operator.cluster.local import LocalCluster
from slackwater_operator.cluster.members import Member
from slackwater_operator.cluster.slots import Slot
from slackwater_operator.core import Kind, PermanentError, Phase
from slackwater_operator.loop import Loop

SHOWN_SIGNALS = ("in_flight", "queued", "arrivals_total", "rejected_total", "failed_total", "first_audio_p95_s")
RECENT = 12  # reclaims shown; totals are kept apart


@dataclass(slots=True)
class StateFolder:
    """A supervisor's folder; holding the lock means being its only supervisor."""

    path: Path
    _lock: BinaryIO | None = None

    def claim(self) -> None:
        """Raises PermanentError when another supervisor has it, or it cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("ab")
        except OSError as error:
            raise PermanentError(f"state_dir {self.path} cannot be used: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PermanentError(
                f"another supervisor runs with state_dir {self.path}; stop it or give this one a folder of its own"
            ) from error

    def release(self) -> None:
        """Let another have it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write(self, document: dict[str, Any]) -> None:
        """Replace the status document; a full disk costs the document, not the supervisor."""
        temporary = self.path / f"status.{os.getpid()}.tmp"
        try:
            temporary.write_text(json.dumps(document))
            temporary.replace(self.path / "status.json")
        except OSError:
            temporary.unlink(missing_ok=True)

    def read(self) -> dict[str, Any]:
        """The newest document with `running` added.  Raises PermanentError when there is none."""
        try:
            document: dict[str, Any] = json.loads((self.path / "status.json").read_text())
        except FileNotFoundError:
            raise PermanentError(f"no supervisor has run with state_dir {self.path}") from None
        except (OSError, ValueError) as error:
            raise PermanentError(f"the status in {self.path} cannot be read: {error}") from error
        document["running"] = self._is_locked()
        return document

    def _is_locked(self) -> bool:
        try:
            with (self.path / "lock").open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


def document(cluster: LocalCluster, loop: Loop, slots: tuple[Slot, ...], now_s: float, url: str) -> dict[str, Any]:
    """What there is to know now, as JSON values."""
    holders = {member.slot: member for member in cluster.members.values() if member.slot is not None}
    load = loop.snapshot.services[0].load if loop.snapshot and loop.snapshot.services else None
    signals = cluster.front.signals if cluster.front else {}
    return {
        "t_s": round(now_s, 3),
        "pid": os.getpid(),
        "url": url,
        "slots": [_slot(slot, holders.get(slot.index), now_s) for slot in slots],
        "standby": sum(m.slot is None and m.loaded for m in cluster.members.values()),
        "traffic": {
            **{key: signals.get(key) for key in SHOWN_SIGNALS},
            "arrival_rps": round(load.arrival_rps, 2) if load else 0.0,
            "stale": load.stale if load else False,
        },
        "need_replicas": dict(loop.plan.need_replicas),
        "conditions": [str(condition) for condition in loop.plan.conditions],
        "jobs": [_job(name, cluster) for name in sorted(cluster.owners) if name in cluster.jobs],
        "reclaims_by_reason": dict(cluster.reclaims_by_reason),
        "reclaims_total": cluster.reclaims_by_reason.total(),
        "reclaims": [reclaim.as_json() for reclaim in list(cluster.reclaims)[-RECENT:]],
        "accounts": loop.accounts.as_dict(),
        "pids": {child.uid: child.pid for child in cluster.children()},
    }


def _slot(slot: Slot, member: Member | None, now_s: float) -> dict[str, Any]:
    if member is None:
        return {"slot": slot.index, "flavor": slot.flavor, "holder": "free"}
    doing = (
        f"{member.running}/{member.decode_slots or '?'} streams"
        if member.kind is Kind.INFERENCE
        else f"{member.items} items, {member.audio_s:.0f} s of audio"
    )
    if member.phase is Phase.LEAVING and member.reason:
        doing = f"leaving for {member.reason}: {doing}"
    return {
        "slot": slot.index,
        "flavor": slot.flavor,
        "holder": member.kind,
        "uid": member.uid,
        "owner": member.owner,
        "phase": member.phase,
        "since_s": round(now_s - member.started_s, 1),
        "running": member.running,
        "decode_slots": member.decode_slots,
        "doing": doing,
    }


def _job(name: str, cluster: LocalCluster) -> dict[str, Any]:
    owner = cluster.owners[name]
    state = "failed" if owner.broken else "done" if owner.done else "open"
    return {
        "name": name,
        "state": state,
        "message": owner.broken,
        "ledger": str(cluster.jobs[name].output),
        **owner.progress,
    }
