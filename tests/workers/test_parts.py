"""Whatever dies, and wherever in a part it dies, the committed output is that of an undisturbed run."""

import shutil
from pathlib import Path

import pytest

from slackwater_workers.core import LeaseLost, Shard, Stopped
from slackwater_workers.ledger.frames import read_frames
from slackwater_workers.ledger.leases import Leases
from slackwater_workers.ledger.parts import PartWriter, commit, deaths, read_chain, read_done
from slackwater_workers.ledger.store import PosixStore
from slackwater_workers.ledger.verify import verify
from slackwater_workers.testing import exported, make_input, numbered, work

SHARD = Shard("s000000", ("a", "b", "c"))


def row(unit: str) -> dict[str, object]:
    return {"unit": unit, "status": "cleaned", "duration_s": 1.0}


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    store = PosixStore(tmp_path / "ledger")
    store.prepare()
    return store


class Hand:
    """A worker that is led by hand through the protocol."""

    def __init__(self, store: PosixStore) -> None:
        self.store = store
        self.leases = Leases(store, "hand", ttl_s=0.0)  # every look finds it dead
        lease = self.leases.claim(SHARD.name)
        assert lease is not None
        self.lease = lease
        self.chain = read_chain(store, SHARD.name)
        self.rows = dict(self.chain.rows)
        self.part = PartWriter(store, self.leases, lease, self.chain)

    def write(self, *units: str) -> "Hand":
        for unit in units:
            self.part.append(row(unit))
            self.rows[unit] = row(unit)
        return self

    def commit(self) -> bool:
        return commit(self.store, SHARD, self.part.refs(), self.rows, "hand")


def test_a_kill_at_every_byte_of_a_record_changes_nothing_in_the_output(memory_path: Path) -> None:
    folder = make_input(memory_path / "in", numbered(4))
    undisturbed = PosixStore(memory_path / "undisturbed")
    work(undisturbed, folder)
    expected = exported(undisturbed, memory_path / "expected")
    killed = memory_path / "killed"
    with pytest.raises(Stopped):
        work(PosixStore(killed), folder, stop_after=3)
    shutil.rmtree(killed / "released")  # a SIGKILL says no goodbye
    shutil.rmtree(killed / "hb")
    content = (killed / "part/s000000/1").read_bytes()
    with (killed / "part/s000000/1").open("rb") as file:
        last = list(read_frames(file))[-1]

    for cut in range(last.offset, len(content) + 1):
        ledger = PosixStore(memory_path / f"cut-{cut}")
        shutil.copytree(killed, ledger.root)
        (ledger.root / "part/s000000/1").write_bytes(content[:cut])

        resumed = work(ledger, folder)

        assert len(resumed.receipts) == (1 if cut == len(content) else 2), f"cut at {cut}: only the torn item is redone"
        assert exported(ledger, memory_path / f"export-{cut}") == expected
        found = verify(ledger)
        assert (found.items_done, found.items_lost, found.items_doubled) == (4, 0, 0)
        assert found.garbage_frames == (last.offset < cut < len(content))
        shutil.rmtree(ledger.root)
        shutil.rmtree(memory_path / f"export-{cut}")


def test_a_part_torn_inside_its_first_frame_never_began(store: PosixStore) -> None:
    Hand(store).write("a")
    torn = Hand(store).write("b")
    path = store.root / f"part/{SHARD.name}/{torn.lease.epoch}"
    path.write_bytes(path.read_bytes()[:30])

    assert set(read_chain(store, SHARD.name).rows) == {"a"}


def test_what_a_paused_worker_adds_after_the_takeover_is_garbage_not_a_duplicate(store: PosixStore) -> None:
    paused = Hand(store).write("a")
    file = paused.part._file
    assert file is not None

    successor = Hand(store)
    with pytest.raises(LeaseLost):
        paused.write("b")
    # And were it between its look at the lease and its write, the bytes would still come too late:
    start = (store.root / f"part/{SHARD.name}/1").read_bytes()
    file.write(start)
    successor.write("b", "c")

    assert successor.commit()
    record = read_done(store, SHARD.name)
    assert record is not None
    assert (record["parts"][0]["epoch"], record["parts"][0]["size_bytes"]) == (1, len(start))
    assert record["cleaned"] == 3


def test_of_two_workers_that_both_finish_the_first_commit_counts(store: PosixStore) -> None:
    first = Hand(store).write("a", "b", "c")
    second = Hand(store).write()
    second.rows.update(first.rows)

    assert first.commit()
    assert not second.commit()


def test_a_history_goes_through_many_epochs_and_skips_the_ones_without_progress(store: PosixStore) -> None:
    Hand(store).write("a")
    Hand(store)
    Hand(store).write("b")
    Hand(store)

    last = Hand(store).write("c")

    assert last.commit()
    assert [ref.epoch for ref in last.part.refs()] == [1, 3, 5]


def test_a_part_that_rotted_before_the_commit_is_done_again(store: PosixStore) -> None:
    Hand(store).write("a")
    Hand(store).write("b")
    path = store.root / f"part/{SHARD.name}/1"
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)

    successor = Hand(store)

    assert set(successor.rows) == {"b"}
    assert successor.write("a", "c").commit()


def test_a_done_record_is_never_written_for_a_short_shard(store: PosixStore) -> None:
    with pytest.raises(AssertionError, match="short shard"):
        Hand(store).write("a", "b").commit()


def test_deaths_count_on_one_item_and_released_leases_do_not_count(store: PosixStore) -> None:
    Hand(store).write("a")  # died on b
    Hand(store)  # died on b
    willing = Hand(store)
    willing.leases.release(willing.lease)
    Hand(store)  # died on b
    before = Hand(store)

    on_b = deaths(store, SHARD, before.chain, before.lease.epoch)
    before.write("b")
    after = Hand(store)
    on_c = deaths(store, SHARD, after.chain, after.lease.epoch)

    assert on_b == 3
    assert on_c == 1
