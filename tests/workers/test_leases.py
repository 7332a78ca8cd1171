"""Leases: one owner at a time, as far as heartbeats tell; epochs only ever grow."""

import os
from pathlib import Path

import pytest

from slackwater_workers.ledger.leases import Lease, Leases
from slackwater_workers.ledger.store import PosixStore

TTL_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    store = PosixStore(tmp_path)
    store.prepare()
    return store


def set_back(store: PosixStore, worker: Leases, by_s: float) -> None:
    """Make the worker's last heartbeat older, as time would."""
    path = store.root / "hb" / worker.worker
    os.utime(path, (path.stat().st_mtime - by_s,) * 2)


def test_a_shard_with_a_living_owner_is_not_free(store: PosixStore) -> None:
    first, second = Leases(store, "a", TTL_S), Leases(store, "b", TTL_S)

    assert first.claim("s") == Lease("s", 1)
    assert second.claim("s") is None


def test_a_silent_owner_loses_its_shard_after_its_own_ttl(store: PosixStore) -> None:
    slow_beating, hasty = Leases(store, "slow", 60.0), Leases(store, "hasty", 1.0)
    lease = slow_beating.claim("s")
    assert lease is not None

    set_back(store, slow_beating, 50.0)
    early = hasty.claim("s")
    set_back(store, slow_beating, 15.0)
    late = hasty.claim("s")

    assert early is None
    assert late == Lease("s", 2)
    assert slow_beating.is_lost(lease)
    assert not hasty.is_lost(late)


def test_a_released_shard_is_free_at_once(store: PosixStore) -> None:
    first, second = Leases(store, "a", TTL_S), Leases(store, "b", TTL_S)
    lease = first.claim("s")
    assert lease is not None

    first.release(lease)

    assert second.claim("s") == Lease("s", 2)


def test_a_restarted_worker_of_the_same_name_does_not_keep_its_dead_self_alive(store: PosixStore) -> None:
    dead, reborn = Leases(store, "same", TTL_S), Leases(store, "same", TTL_S)
    dead.claim("s")
    set_back(store, dead, TTL_S + 1)

    assert reborn.claim("s") == Lease("s", 2)


def test_a_clock_that_was_set_back_only_delays_the_takeover(store: PosixStore) -> None:
    clock = Clock()
    dead, other = Leases(store, "a", TTL_S), Leases(store, "b", TTL_S, clock)
    dead.claim("s")
    set_back(store, dead, -3600.0)  # it beat in what is now the future, and died

    first_look = other.claim("s")
    clock.now_s += TTL_S + 1
    second_look = other.claim("s")

    assert first_look is None
    assert second_look == Lease("s", 2)


def test_an_epoch_that_has_a_part_but_no_lease_is_never_used_again(store: PosixStore) -> None:
    part = store.create_part("part/s/4")
    assert part is not None
    part.close()

    assert Leases(store, "a", TTL_S).claim("s") == Lease("s", 5)


def test_the_heartbeat_thread_keeps_a_lease_and_ends_with_its_worker(store: PosixStore) -> None:
    worker = Leases(store, "a", 0.2)
    set_back(store, worker, 100.0)
    before = store.modified_s(f"hb/{worker.worker}")
    assert before is not None

    worker.start()
    try:
        while store.modified_s(f"hb/{worker.worker}") == before:
            pass  # the test's time limit is the bound
    finally:
        worker.stop()

    after = store.modified_s(f"hb/{worker.worker}")
    assert after is not None
    assert after > before + 50
