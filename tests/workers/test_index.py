"""The index: whatever lies in a folder, and whoever lists it at the same time."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slackwater_workers.core import BadInput, Stopped
from slackwater_workers.ledger.index import (
    build_index,
    ensure_listing,
    hash_batches,
    hash_files,
    hash_shards,
    load_index,
    walk,
)
from slackwater_workers.ledger.store import PosixStore
from slackwater_workers.testing import make_input, numbered, wav_bytes, work


def go_on() -> None:
    return


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    store = PosixStore(tmp_path / "ledger")
    store.prepare()
    return store


def test_files_are_taken_by_their_name_or_by_their_content(tmp_path: Path) -> None:
    folder = make_input(
        tmp_path,
        {
            "a.MP3": b"<html>not found</html>",
            "b/recording": wav_bytes([0.0]),
            "c.txt": b"fLaC in the wrong coat",
            "d.png": b"\x89PNG",
            "e.wav": b"",
        },
    )

    assert [listed.path for listed in walk(folder, None, go_on)] == ["a.MP3", "b/recording", "c.txt", "e.wav"]


def test_what_is_no_readable_file_is_refused_with_its_reason_and_never_opened(tmp_path: Path) -> None:
    make_input(tmp_path, {"good.wav": b"x"})
    os.mkfifo(tmp_path / "fifo.wav")
    os.mkfifo(tmp_path / "fifo-without-suffix")
    (tmp_path / "dangling.wav").symlink_to("nowhere")
    (tmp_path / "loop.wav").symlink_to("loop.wav")
    (tmp_path / "folder.wav").mkdir()

    found = {listed.path: listed.refused for listed in walk(tmp_path, None, go_on)}

    assert found == {
        "good.wav": None,
        "fifo.wav": "not a regular file",
        "dangling.wav": "No such file or directory",
        "loop.wav": "Too many levels of symbolic links",
    }


def test_a_loop_of_folder_links_ends(tmp_path: Path) -> None:
    make_input(tmp_path, {"in/a.wav": b"x"})
    (tmp_path / "in" / "again").symlink_to(tmp_path)

    assert [listed.path for listed in walk(tmp_path, None, go_on)] == ["in/a.wav"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(b"caf\xc3\xa9.wav", id="composed"),
        pytest.param(b"cafe\xcc\x81.wav", id="decomposed"),
        pytest.param(b"line\nbreak.wav", id="newline"),
        pytest.param(b"-rf.wav", id="leading dash"),
        pytest.param(b"latin-\xe9.wav", id="not UTF-8"),
        pytest.param(b"x" * 251 + b".wav", id="255 bytes"),
    ],
)
def test_any_name_goes_through_the_ledger_and_back(tmp_path: Path, store: PosixStore, name: bytes) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    with open(os.path.join(os.fsencode(folder), name), "wb") as file:
        file.write(b"content")

    work(store, folder)

    index = load_index(store)
    assert index is not None
    assert [os.fsencode(item.path) for item in index.items.values()] == [name]


def test_the_same_content_under_two_names_is_one_item(tmp_path: Path, store: PosixStore) -> None:
    folder = make_input(tmp_path / "in", {"b.wav": b"same", "a.wav": b"same", "c.wav": b"other"})

    report = work(store, folder)

    index = load_index(store)
    assert index is not None
    assert [item.path for item in index.items.values()] == ["a.wav", "c.wav"]
    assert [path for path, _ in index.duplicates] == ["b.wav"]
    assert len(report.receipts) == 2


def test_racing_builders_agree_though_the_folder_changes_under_them(tmp_path: Path, store: PosixStore) -> None:
    folders = [make_input(tmp_path / str(count), numbered(count)) for count in range(3, 9)]

    with ThreadPoolExecutor(len(folders)) as pool:
        listings = list(pool.map(lambda folder: ensure_listing(store, walk(folder, None, go_on)), folders))

    assert all(listing == listings[0] for listing in listings)


def test_two_workers_that_build_the_index_at_once_make_one(tmp_path: Path, store: PosixStore) -> None:
    folder = make_input(tmp_path / "in", numbered(12))

    with ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(lambda _: work(store, folder, ttl_s=60.0), range(3)))

    assert sum(len(report.receipts) for report in reports) == 12


def test_hashing_is_cut_into_bounded_batches_that_only_depend_on_the_listing(tmp_path: Path) -> None:
    listing = walk(make_input(tmp_path, numbered(600)), None, go_on)

    batches = hash_batches(listing)

    assert [len(batch) for batch in batches.values()] == [256, 256, 88]
    assert [len(shard.units) for shard in hash_shards(batches)] == [3]
    assert [entry for batch in batches.values() for entry in batch] == listing


def test_a_file_that_vanishes_between_listing_and_hashing_is_refused(tmp_path: Path) -> None:
    listing = walk(make_input(tmp_path, numbered(2)), None, go_on)
    (tmp_path / "000.wav").unlink()

    files = hash_files(tmp_path, listing, go_on)["files"]

    assert files[0] == {"path": "000.wav", "refused": "No such file or directory"}
    assert len(files[1]["sha256"]) == 64


def test_hashing_a_large_file_can_be_abandoned(tmp_path: Path) -> None:
    listing = walk(make_input(tmp_path, {"large.wav": bytes(3 << 20)}), None, go_on)
    looks = []

    def stop_at_the_second_look() -> None:
        looks.append(1)
        if len(looks) == 2:
            raise Stopped("preempted")

    with pytest.raises(Stopped):
        hash_files(tmp_path, listing, stop_at_the_second_look)


def test_a_ledger_inside_its_input_is_not_input(tmp_path: Path, store: PosixStore) -> None:
    folder = make_input(tmp_path / "in", {**numbered(2), "ledger/export/audio.flac": b"fLaC"})

    listing = ensure_listing(store, walk(folder, folder / "ledger", go_on))

    assert [listed.path for listed in listing] == ["000.wav", "001.wav"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        pytest.param({}, "no audio files", id="empty"),
        pytest.param({"notes.txt": b"hello"}, "no audio files", id="nothing but text"),
    ],
)
def test_a_folder_without_audio_is_refused_in_one_line(tmp_path: Path, names: dict[str, bytes], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        walk(make_input(tmp_path, names), None, go_on)


def test_an_unreadable_index_is_not_built_over(tmp_path: Path, store: PosixStore) -> None:
    folder = make_input(tmp_path / "in", numbered(3))
    work(store, folder)
    before = store.read("index")

    listing = ensure_listing(store, walk(folder, None, go_on))
    build_index(store, listing, hash_shards(hash_batches(listing)), shard_items=1)

    assert store.read("index") == before
