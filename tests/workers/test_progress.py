"""Progress that is read again and again counts what a reading of everything counts."""

import os
from pathlib import Path

import pytest

from slackwater_workers.core import Shard
from slackwater_workers.ledger.parts import commit, read_chain
from slackwater_workers.ledger.progress import ProgressReader
from slackwater_workers.ledger.store import PosixStore
from slackwater_workers.testing import Hand, unit_row

SHARD = Shard("s000000", ("a", "b", "c"))


@pytest.fixture
def store(memory_path: Path) -> PosixStore:
    store = PosixStore(memory_path / "ledger")
    store.prepare()
    return store


def test_what_a_worker_wrote_after_it_lost_its_shard_is_not_counted(store: PosixStore) -> None:
    zombie = Hand(store, SHARD.name)
    zombie.write("a")
    reader = ProgressReader(store)
    first = reader.read(None, (SHARD,))
    successor = Hand(store, SHARD.name)
    zombie.write("b")
    second = reader.read(None, (SHARD,))
    successor.write("c")

    third = reader.read(None, (SHARD,))

    # Until the successor has begun, the zombie's part tells the history.
    assert [first.items_done, second.items_done, third.items_done] == [1, 2, 2]
    assert third == ProgressReader(store).read(None, (SHARD,))
    assert set(read_chain(store, SHARD.name).rows) == {"a", "c"}


def test_a_torn_record_is_read_when_it_is_whole(store: PosixStore) -> None:
    part = Hand(store, SHARD.name)
    part.write("a")
    path = store.root / "part" / SHARD.name / "1"
    whole = path.stat().st_size
    part.write("b")
    rest = path.read_bytes()[whole:]
    os.truncate(path, whole)
    reader = ProgressReader(store)
    counts = []
    for byte in range(len(rest)):
        counts.append(reader.read(None, (SHARD,)).items_done)
        with path.open("ab") as file:
            file.write(rest[byte : byte + 1])

    assert counts == [1] * len(rest)
    assert reader.read(None, (SHARD,)).items_done == 2


def test_a_part_that_is_torn_inside_its_first_record_hides_nothing(store: PosixStore) -> None:
    Hand(store, SHARD.name).write("a")
    reader = ProgressReader(store)
    reader.read(None, (SHARD,))
    (store.root / "part" / SHARD.name / "2").write_bytes(b"SWF1")

    assert reader.read(None, (SHARD,)).items_done == 1
    assert reader.read(None, (SHARD,)) == ProgressReader(store).read(None, (SHARD,))


def test_each_worker_is_credited_with_what_it_wrote_also_in_finished_shards(store: PosixStore) -> None:
    Hand(store, SHARD.name).write("a")
    early = ProgressReader(store, follows_workers=True)
    early.read(None, (SHARD,))
    second = Hand(store, SHARD.name)
    for unit in "bc":
        second.write(unit)
    commit(store, SHARD, second.refs(), {unit: unit_row(unit) for unit in SHARD.units}, "hand")
    late = ProgressReader(store, follows_workers=True)

    found = [(reader.read(None, (SHARD,)).items_done, sorted(reader.records().values())) for reader in (early, late)]

    assert found == [(3, [1, 2])] * 2
    assert early.records() == late.records()
    assert early.holders() == late.holders() == {}
