"""One worker in this process: what it does at each kind of failure."""

import os
import shutil
from pathlib import Path

import pytest

from slackwater_workers.core import BadInput, Stopped, StorageFull
from slackwater_workers.ledger.index import load_index
from slackwater_workers.ledger.leases import Leases
from slackwater_workers.ledger.parts import read_chain, read_done
from slackwater_workers.ledger.progress import ProgressReader
from slackwater_workers.ledger.store import PosixStore
from slackwater_workers.ledger.verify import verify
from slackwater_workers.testing import FullStore, exported, make_input, numbered, work


def test_a_bad_item_is_quarantined_and_the_run_goes_on(memory_path: Path) -> None:
    store = PosixStore(memory_path / "ledger")

    work(store, make_input(memory_path / "in", {"a.wav": b"one", "b.wav": b"REFUSE", "c.wav": b"three"}))

    found = verify(store)
    assert (found.items_done, found.items_quarantined, found.items_open) == (2, 1, 0)


def test_a_finished_ledger_is_left_alone(memory_path: Path) -> None:
    store = PosixStore(memory_path / "ledger")
    folder = make_input(memory_path / "in", numbered(5))
    work(store, folder)
    leases = store.names("lease/s000000")

    again = work(store, folder)

    assert again.receipts == []
    assert store.names("lease/s000000") == leases


def die_on_the_second_item(store: PosixStore, folder: Path, times: int) -> None:
    """Leave the ledger as so many workers do that were killed on the shard's second item."""
    with pytest.raises(Stopped):
        work(store, folder, stop_after=1)
    shutil.rmtree(store.root / "released")
    for death in range(times):
        if death:
            assert Leases(store, "dead", ttl_s=10.0).claim("s000000") is not None
        shutil.rmtree(store.root / "hb")


def test_an_item_on_which_three_workers_died_is_cleaned_in_a_process_of_its_own(memory_path: Path) -> None:
    folder = make_input(memory_path / "in", {"a.wav": b"one", "b.wav": b"PARENT", "c.wav": b"three"})
    store = PosixStore(memory_path / "ledger")
    die_on_the_second_item(store, folder, times=3)

    work(store, folder)

    parents = [int(row["parent"]) for row in read_chain(store, "s000000").rows.values() if row["path"] == "b.wav"]
    assert parents == [os.getpid()]
    assert verify(store).items_done == 3


def test_an_item_on_which_fewer_died_is_cleaned_as_usual(memory_path: Path) -> None:
    folder = make_input(memory_path / "in", {"a.wav": b"one", "b.wav": b"PARENT"})
    store = PosixStore(memory_path / "ledger")
    die_on_the_second_item(store, folder, times=2)

    work(store, folder)

    parents = [int(row["parent"]) for row in read_chain(store, "s000000").rows.values() if row["path"] == "b.wav"]
    assert parents == [os.getppid()]


def test_an_item_that_also_kills_its_own_process_is_quarantined_with_the_signal(memory_path: Path) -> None:
    folder = make_input(memory_path / "in", {"a.wav": b"one", "b.wav": b"CRASH", "c.wav": b"three"})
    store = PosixStore(memory_path / "ledger")
    die_on_the_second_item(store, folder, times=3)

    work(store, folder)

    found = verify(store)
    assert (found.items_done, found.items_quarantined) == (2, 1)
    assert b"signal SIGKILL" in exported(store, memory_path / "out")["quarantine.jsonl"]


def test_a_refusal_in_a_process_of_its_own_keeps_its_reason(memory_path: Path) -> None:
    folder = make_input(memory_path / "in", {"a.wav": b"one", "b.wav": b"REFUSE"})
    store = PosixStore(memory_path / "ledger")
    die_on_the_second_item(store, folder, times=3)

    work(store, folder)

    assert b"asked to" in exported(store, memory_path / "out")["quarantine.jsonl"]


@pytest.mark.parametrize("room_bytes", range(2_000, 9_000, 1_000))
def test_a_full_disk_ends_the_worker_and_harms_nothing(memory_path: Path, room_bytes: int) -> None:
    folder = make_input(memory_path / "in", {name: content * 100 for name, content in numbered(12).items()})
    store = PosixStore(memory_path / "ledger")

    with pytest.raises(StorageFull, match="free some and start again, nothing is lost"):
        work(FullStore(store.root, room_bytes), folder, ttl_s=0.5)

    assert verify(store).is_sound
    assert all((read_done(store, name) or {})["units"] == 4 for name in store.names("done") if name.startswith("s"))
    work(store, folder)
    undisturbed = PosixStore(memory_path / "undisturbed")
    work(undisturbed, folder)
    assert exported(store, memory_path / "out") == exported(undisturbed, memory_path / "expected")


def test_another_folder_under_an_old_ledger_is_refused_before_anything_is_quarantined(memory_path: Path) -> None:
    store = PosixStore(memory_path / "ledger")
    work(store, make_input(memory_path / "in", numbered(3)))
    (store.root / "done" / "s000000").unlink()
    other = make_input(memory_path / "other", {"x.wav": b"x"})

    with pytest.raises(BadInput, match="is it the folder the ledger was made from"):
        work(store, other)


def test_progress_counts_open_shards_and_agrees_with_verify(memory_path: Path) -> None:
    store = PosixStore(memory_path / "ledger")
    folder = make_input(memory_path / "in", {**numbered(9), "000.wav": b"REFUSE"})
    with pytest.raises(Stopped):
        work(store, folder, stop_after=5)
    index = load_index(store)
    assert index is not None

    progress = ProgressReader(store).read(index, index.shards)

    found = verify(store)
    assert (progress.items_done, progress.items_quarantined) == (found.items_done, found.items_quarantined)
    assert (progress.items_total, progress.items_open, progress.shards_total) == (9, 4, 3)
