"""Verify finds every planted fault, and is quiet on a sound ledger in any state."""

import json
import shutil
from pathlib import Path

import pytest

from slackwater_workers.core import PermanentError, Stopped
from slackwater_workers.ledger.frames import read_frames
from slackwater_workers.ledger.store import PosixStore
from slackwater_workers.ledger.verify import verify
from slackwater_workers.testing import make_input, numbered, work


@pytest.fixture
def store(memory_path: Path) -> PosixStore:
    """A finished ledger of ten items in shards of 4, 4 and 2; one item is quarantined."""
    folder = make_input(memory_path / "in", {**numbered(9), "zz.wav": b"REFUSE"})
    store = PosixStore(memory_path / "ledger")
    work(store, folder)
    return store


def part(store: PosixStore) -> Path:
    return store.root / "part" / "s000000" / "1"


def last_frame_offset(path: Path) -> int:
    with path.open("rb") as file:
        return list(read_frames(file))[-1].offset


def test_a_finished_ledger_is_sound_and_everything_is_accounted_for(store: PosixStore) -> None:
    found = verify(store)

    assert found.is_sound
    assert (found.items_total, found.items_done, found.items_quarantined, found.items_open) == (10, 9, 1, 0)
    assert found.problems == ()


def test_one_flipped_bit_in_the_audio_loses_exactly_its_item(store: PosixStore) -> None:
    content = bytearray(part(store).read_bytes())
    content[content.index(b"item 2")] ^= 1
    part(store).write_bytes(content)

    found = verify(store)

    assert (found.items_lost, found.items_done) == (1, 8)
    assert any("'002.wav'" in problem for problem in found.problems)


def test_a_cut_part_loses_the_items_behind_the_cut(store: PosixStore) -> None:
    content = part(store).read_bytes()
    part(store).write_bytes(content[: last_frame_offset(part(store)) + 5])

    assert verify(store).items_lost == 1


def test_a_deleted_part_loses_its_items(store: PosixStore) -> None:
    part(store).unlink()

    found = verify(store)

    assert found.items_lost == 4
    assert "part/s000000/1 is gone" in found.problems


def test_a_damaged_done_record_loses_its_shard(store: PosixStore) -> None:
    (store.root / "done" / "s000000").write_bytes(b'{"format": 1, "pa')

    assert verify(store).items_lost == 4


def test_a_second_commit_of_the_same_items_is_doubled(store: PosixStore) -> None:
    shutil.copy(store.root / "done" / "s000000", store.root / "done" / "s000099")

    found = verify(store)

    assert found.items_doubled == 4
    assert not found.is_sound


def test_a_part_named_twice_by_one_record_is_doubled(store: PosixStore) -> None:
    path = store.root / "done" / "s000002"
    record = json.loads(path.read_text())
    record["parts"] *= 2
    path.write_text(json.dumps(record))

    assert verify(store).items_doubled == 2


def test_swapped_audio_of_two_items_is_found_by_its_digest(memory_path: Path) -> None:
    # The digests of frames and part are made right again, as a tool that "repairs" ledgers might.
    from slackwater_workers.ledger.frames import write_frame
    from slackwater_workers.ledger.parts import prefix_sha256

    store = PosixStore(memory_path / "other")
    work(store, make_input(memory_path / "two", {"a.wav": b"one", "b.wav": b"two"}))
    path = part(store)
    content = path.read_bytes()
    with path.open("rb") as file:
        head, first, second = read_frames(file)
    with path.open("rb") as source, (path.parent / "new").open("w+b") as target:
        for frame, data in ((head, head), (first, second), (second, first)):
            source.seek(data.data_offset)
            write_frame(lambda piece, target=target: target.write(piece) and None, frame.row, source, data.data_bytes)
        digest = prefix_sha256(target, len(content))
    (path.parent / "new").replace(path)
    record = json.loads((store.root / "done" / "s000000").read_text())
    record["parts"][0]["sha256"] = digest
    (store.root / "done" / "s000000").write_text(json.dumps(record))

    assert verify(store).items_lost == 2


def test_a_deleted_done_record_only_opens_its_shard_again(store: PosixStore) -> None:
    (store.root / "done" / "s000000").unlink()

    found = verify(store)

    assert found.is_sound
    assert (found.items_done, found.items_open) == (9, 0)


def test_a_deleted_index_is_said_and_not_taken_for_a_new_ledger(store: PosixStore) -> None:
    (store.root / "index").unlink()

    with pytest.raises(PermanentError, match="no index"):
        verify(store)


def test_a_ledger_in_the_middle_of_its_work_is_sound_with_open_items(memory_path: Path) -> None:
    folder = make_input(memory_path / "in", numbered(10))
    store = PosixStore(memory_path / "half")

    with pytest.raises(Stopped):
        work(store, folder, stop_after=6)

    found = verify(store)
    assert found.is_sound
    assert (found.items_done, found.items_open) == (6, 4)


def test_a_new_folder_is_sound_and_empty(memory_path: Path) -> None:
    store = PosixStore(memory_path / "new")
    store.prepare()

    found = verify(store)

    assert found.is_sound
    assert found.items_total == 0


def test_what_is_beyond_the_named_bytes_is_garbage_and_harmless(store: PosixStore) -> None:
    content = part(store).read_bytes()
    part(store).write_bytes(content + content[last_frame_offset(part(store)) :] + b"SWF1 torn")

    found = verify(store)

    assert found.is_sound
    assert found.garbage_frames == 2
