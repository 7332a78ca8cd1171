"""An export is the same however often and in how many steps it was made."""

import json
from pathlib import Path

import pytest

from slackwater_workers.core import PermanentError, Stopped
from slackwater_workers.ledger.export import export
from slackwater_workers.ledger.store import PosixStore
from slackwater_workers.testing import exported, make_input, numbered, work


def test_audio_and_manifest_belong_together(memory_path: Path) -> None:
    store = PosixStore(memory_path / "ledger")
    work(store, make_input(memory_path / "in", {**numbered(3), "bad.wav": b"REFUSE", "twin.wav": b"item 0"}))

    found = export(store, memory_path / "out")

    rows = [json.loads(line) for line in (memory_path / "out" / "manifest.jsonl").read_text().splitlines()]
    assert (found.cleaned, found.quarantined, found.written, found.shards_open) == (3, 1, 3, 0)
    assert [row["path"] for row in rows] == ["000.wav", "001.wav", "002.wav"]
    assert all((memory_path / "out" / row["audio"]).stat().st_size == row["audio_bytes"] for row in rows)
    (bad,) = (memory_path / "out" / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(bad)["reason"] == "asked to"


def test_a_second_export_writes_nothing_and_changes_nothing(memory_path: Path) -> None:
    store = PosixStore(memory_path / "ledger")
    work(store, make_input(memory_path / "in", numbered(3)))
    first = exported(store, memory_path / "out")

    again = export(store, memory_path / "out")

    assert again.written == 0
    assert exported(store, memory_path / "out") == first


def test_an_export_of_open_work_holds_finished_shards_only_and_can_be_completed(memory_path: Path) -> None:
    folder = make_input(memory_path / "in", numbered(9))
    store = PosixStore(memory_path / "ledger")
    with pytest.raises(Stopped):
        work(store, folder, stop_after=6)

    half = export(store, memory_path / "out")
    work(store, folder)
    whole = export(store, memory_path / "out")

    assert half.cleaned in (4, 5)  # which shards came first is chance
    assert whole.cleaned == 9
    assert whole.written == 9 - half.cleaned


def test_damage_in_the_ledger_is_not_exported(memory_path: Path) -> None:
    store = PosixStore(memory_path / "ledger")
    work(store, make_input(memory_path / "in", numbered(3)))
    path = store.root / "part" / "s000000" / "1"
    path.write_bytes(path.read_bytes().replace(b"item 1", b"item X"))

    with pytest.raises(PermanentError, match="damaged in the ledger"):
        export(store, memory_path / "out")
    assert not list((memory_path / "out" / "audio").glob(".*"))


def test_a_ledger_without_an_index_says_what_to_do(memory_path: Path) -> None:
    with pytest.raises(PermanentError, match="slackwater clean run"):
        export(PosixStore(memory_path), memory_path / "out")
