"""Who works on which shard.

Owns claims, heartbeats, release and the count of deaths.  A lease is a promise about who should work, not about
who may commit: the done-record decides that (parts.py).  The epoch in a lease's name is the fencing token.
"""

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from slackwater_workers.core import LedgerError, PermanentError
from slackwater_workers.ledger.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on `shard` until a higher epoch of it exists."""

    shard: str
    epoch: int

    @property
    def name(self) -> str:
        return f"lease/{self.shard}/{self.epoch}"


def epochs(store: Store, folder: str, shard: str) -> list[int]:
    """The epochs under `folder/shard`, ascending.  Names that are not numbers are not ours."""
    return sorted(int(name) for name in store.names(f"{folder}/{shard}") if name.isdecimal())


class Leases:
    """One worker's claims and its heartbeat.

    The worker's name gets a random tail, since a restarted worker of the same name must not keep the
    leases of its dead self alive.
    """

    def __init__(
        self, store: Store, worker: str, ttl_s: float, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._monotonic_s = monotonic_s
        self._seen: dict[str, tuple[float, float]] = {}  # owner -> (time of its heartbeat, when we first saw that)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.worker = f"{worker}-{secrets.token_hex(4)}"
        self._heartbeat = f"hb/{self.worker}"
        body = {"worker": self.worker, "name": worker, "host": socket.gethostname(), "pid": os.getpid(), "ttl_s": ttl_s}
        if not store.create(self._heartbeat, json.dumps(body).encode()):
            raise PermanentError(f"two workers drew the name {self.worker}; start again")

    def start(self) -> None:
        """Beat every quarter of the TTL, from a thread of its own."""
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _beat(self) -> None:
        while not self._stopping.wait(self._ttl_s / 4):
            try:
                self._store.touch(self._heartbeat)
            except LedgerError as error:
                # One missed beat is nothing; if the storage stays away the lease runs out, as it should.
                logger.warning("heartbeat failed worker=%s error=%s", self.worker, error)

    def claim(self, shard: str) -> Lease | None:
        """The shard's next epoch, when it has no living owner and nobody else was quicker."""
        taken = max([0, *epochs(self._store, "lease", shard), *epochs(self._store, "part", shard)])
        if taken and not self._is_free(shard, taken):
            return None
        lease = Lease(shard, taken + 1)
        body = json.dumps({"worker": self.worker}).encode()
        return lease if self._store.create(lease.name, body) else None

    def release(self, lease: Lease) -> None:
        """Let others claim at once.  An epoch that was released does not count as a death."""
        self._store.create(f"released/{lease.shard}/{lease.epoch}", json.dumps({"worker": self.worker}).encode())

    def is_lost(self, lease: Lease) -> bool:
        """Whether somebody claimed the epoch after this one."""
        return self._store.exists(f"lease/{lease.shard}/{lease.epoch + 1}")

    def _is_free(self, shard: str, epoch: int) -> bool:
        if self._store.exists(f"released/{shard}/{epoch}"):
            return True
        owner = self._owner(shard, epoch)
        if owner == self.worker:
            return True  # we left it without a word (its storage failed); nobody else can hold it
        return owner is None or self._is_dead(owner)

    def _owner(self, shard: str, epoch: int) -> str | None:
        body = self._store.read(f"lease/{shard}/{epoch}")
        # An epoch with a part but no lease was made by a power cut between the two; it has no owner.
        return None if body is None else str(json.loads(body)["worker"])

    def _is_dead(self, owner: str) -> bool:
        """Whether `owner` did not beat for its own TTL.

        Judged by the store's clock, for which our own heartbeat is the probe; and, since a clock can be set
        back, by ours when the heartbeat did not change while we looked on for that long.
        """
        name = f"hb/{owner}"
        beat_s = self._store.modified_s(name)
        if beat_s is None:
            return True
        body = self._store.read(name)
        ttl_s = float(json.loads(body)["ttl_s"]) if body else self._ttl_s
        known = self._seen.get(owner)
        if known is None or known[0] != beat_s:
            known = (beat_s, self._monotonic_s())
            self._seen[owner] = known
        return self._store.touch(self._heartbeat) - beat_s > ttl_s or self._monotonic_s() - known[1] > ttl_s
