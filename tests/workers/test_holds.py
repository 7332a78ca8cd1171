"""A receipt holds when the ledger has those bytes and counts them."""

from pathlib import Path

import pytest

from slackwater_workers.core import Receipt, Shard, Stopped
from slackwater_workers.ledger.parts import commit
from slackwater_workers.ledger.store import PosixStore
from slackwater_workers.ledger.verify import holds
from slackwater_workers.testing import Hand, make_input, numbered, receipt_of, unit_row, work

SHARD = Shard("s000000", ("a", "b", "c"))


@pytest.fixture
def store(memory_path: Path) -> PosixStore:
    return PosixStore(memory_path / "ledger")


@pytest.fixture
def half_done(store: PosixStore, memory_path: Path) -> PosixStore:
    """A ledger with three records in its two shards."""
    with pytest.raises(Stopped):
        work(store, make_input(memory_path / "in", numbered(6)), stop_after=3)
    return store


def test_every_receipt_of_a_run_holds(store: PosixStore, memory_path: Path) -> None:
    folder = make_input(memory_path / "in", numbered(6))
    receipts = work(store, folder).receipts

    assert len(receipts) == 6
    assert all(holds(store, receipt) for receipt in receipts)


def test_a_receipt_holds_where_the_worker_sees_the_ledger_under_another_path(half_done: PosixStore) -> None:
    path = next((half_done.root / "part").glob("s*/1"))
    receipt = receipt_of(path)

    assert holds(half_done, receipt)
    assert holds(half_done, Receipt(f"/mounted/there/part/{path.parent.name}/1", receipt.size_bytes, receipt.sha256))


def test_a_receipt_does_not_hold_when_a_byte_is_other_or_missing(half_done: PosixStore) -> None:
    path = next((half_done.root / "part").glob("s*/1"))
    receipt = receipt_of(path)
    content = path.read_bytes()

    path.write_bytes(content[:-1])
    is_short = holds(half_done, receipt)
    path.write_bytes(content[:-6] + bytes([content[-6] ^ 1]) + content[-5:])
    is_other = holds(half_done, receipt)
    path.unlink()
    is_gone = holds(half_done, receipt)

    assert [is_short, is_other, is_gone] == [False] * 3


def test_a_receipt_for_what_the_successor_did_not_take_over_does_not_hold(store: PosixStore) -> None:
    store.prepare()
    zombie, path = Hand(store, SHARD.name), store.root / "part" / SHARD.name / "1"
    kept = zombie.write("a")
    successor = Hand(store, SHARD.name)
    void = zombie.write("b")
    for unit in ("b", "c"):
        last = successor.write(unit)

    open_ones = [holds(store, receipt) for receipt in (kept, void, last)]
    commit(store, SHARD, successor.refs(), {unit: unit_row(unit) for unit in SHARD.units}, "hand")
    finished = [holds(store, receipt) for receipt in (kept, void, last)]

    assert receipt_of(path) == void
    assert open_ones == finished == [True, False, True]


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "/l/part/../5", "/l/part/s000000/x", "/l/done/s000000", "part/s9/1"]
)
def test_a_receipt_that_names_no_part_does_not_hold(half_done: PosixStore, path: str) -> None:
    assert not holds(half_done, Receipt(path, 1, "ab" * 32))
