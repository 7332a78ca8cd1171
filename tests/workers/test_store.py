"""Create-if-absent is the one primitive; it must hold among racing processes and on a full disk."""

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slackwater_workers.core import PermanentError, StorageFull, TemporaryError
from slackwater_workers.ledger.store import PosixStore, storage_error


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    store = PosixStore(tmp_path / "ledger")
    store.prepare()
    return store


def test_exactly_one_of_many_racing_creators_wins_and_its_content_stays_whole(store: PosixStore) -> None:
    contents = [bytes([number]) * 50_000 for number in range(16)]

    for attempt in range(10):
        with ThreadPoolExecutor(16) as pool:
            won = list(pool.map(lambda content, name=f"lease/s/{attempt}": store.create(name, content), contents))

        assert sum(won) == 1
        assert store.read(f"lease/s/{attempt}") == contents[won.index(True)]


def test_a_loser_leaves_nothing_behind(store: PosixStore) -> None:
    store.create("a/b", b"first")

    assert not store.create("a/b", b"second")
    assert store.names("tmp") == []
    assert store.read("a/b") == b"first"


def test_absent_names_are_none_or_empty_not_errors(store: PosixStore) -> None:
    assert store.read("no/such") is None
    assert store.modified_s("no/such") is None
    assert store.names("no") == []


def test_a_part_has_one_writer_ever(store: PosixStore) -> None:
    part = store.create_part("part/s/1")
    assert part is not None
    part.write(b"abc")
    part.sync()
    part.close()

    assert store.create_part("part/s/1") is None
    assert store.read("part/s/1") == b"abc"


def test_strays_of_killed_writers_are_swept_once_they_are_old(store: PosixStore) -> None:
    old, fresh = store.root / "tmp" / "old", store.root / "tmp" / "fresh"
    old.write_bytes(b"")
    fresh.write_bytes(b"")
    os.utime(old, (0, 0))

    store.prepare()

    assert store.names("tmp") == ["fresh"]


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        pytest.param(errno.ENOSPC, StorageFull, "no space left on /ledger", id="disk full"),
        pytest.param(errno.EDQUOT, StorageFull, "nothing is lost", id="quota"),
        pytest.param(errno.EROFS, PermanentError, "cannot write in /ledger", id="read-only"),
        pytest.param(errno.EIO, TemporaryError, "the storage of /ledger failed", id="bad disk"),
    ],
)
def test_a_failed_system_call_says_what_a_person_can_do(code: int, kind: type[Exception], words: str) -> None:
    error = storage_error(OSError(code, os.strerror(code)), "/ledger")

    assert type(error) is kind
    assert words in str(error)


def test_a_file_in_the_ledgers_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(PermanentError, match="in the way"):
        PosixStore(tmp_path / "file").prepare()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)

    with pytest.raises(PermanentError, match="cannot write"):
        PosixStore(tmp_path / "ledger").prepare()
