"""The keeper tells what the ledger tells, and reads each thing once."""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import pytest

from slackwater_workers.core import PermanentError, Stopped
from slackwater_workers.keeper.keeper import Keeper
from slackwater_workers.keeper.server import LOOK_EVERY_S, serving
from slackwater_workers.ledger.index import load_index
from slackwater_workers.ledger.progress import ProgressReader
from slackwater_workers.ledger.store import PosixStore
from slackwater_workers.ledger.verify import verify
from slackwater_workers.testing import make_input, numbered, receipt_of, work

UNKNOWN = dict.fromkeys(
    ("items_total", "items_done", "items_quarantined", "items_open", "shards_open", "audio_s"), None
)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class CountingStore(PosixStore):
    """Counts what is opened."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened: Counter[str] = Counter()

    def open(self, name: str) -> BinaryIO | None:
        self.opened[name] += 1
        return super().open(name)


@pytest.fixture
def store(memory_path: Path) -> PosixStore:
    return PosixStore(memory_path / "ledger")


def stopped_after(store: PosixStore, folder: Path, records: int, **settings: Any) -> None:
    with pytest.raises(Stopped):
        work(store, folder, stop_after=records, **settings)


# Progress


def test_before_the_ledger_is_made_nothing_is_known(store: PosixStore) -> None:
    assert Keeper(store).look() == {"job": None, **UNKNOWN, "workers": {}}


def test_while_the_input_is_hashed_the_job_and_its_workers_are_known_and_no_count(
    store: PosixStore, memory_path: Path
) -> None:
    work(store, make_input(memory_path / "in", numbered(3)))
    (store.root / "index").unlink()

    found = Keeper(store).look()

    assert found == {"job": "test", **UNKNOWN, "workers": {"w": {"durable_age_s": None, "items": 0, "shard": None}}}


def test_every_look_at_a_job_that_is_preempted_again_and_again_agrees_with_a_fresh_reading(
    store: PosixStore, memory_path: Path
) -> None:
    folder = make_input(memory_path / "in", {**numbered(10), "003.wav": b"REFUSE"})
    keeper = Keeper(store)
    looks = []
    for records in (1, 2, 1, 3, 1):
        stopped_after(store, folder, records)
        found = keeper.look()
        index = load_index(store)
        assert index is not None
        fresh = ProgressReader(store).read(index, index.shards)
        looks.append({name: found[name] for name in UNKNOWN} == {name: _value(fresh, name) for name in UNKNOWN})
    work(store, folder)

    end = keeper.look()

    assert looks == [True] * 5
    judged = verify(store)
    assert (end["items_done"], end["items_quarantined"]) == (judged.items_done, judged.items_quarantined) == (9, 1)
    assert (end["items_total"], end["items_open"], end["shards_open"]) == (10, 0, 0)


def _value(progress: Any, name: str) -> Any:
    return progress.items_open if name == "items_open" else asdict(progress)[name]


def test_finished_shards_are_read_once(store: PosixStore, memory_path: Path) -> None:
    work(store, make_input(memory_path / "in", numbered(12)))
    counting = CountingStore(store.root)
    keeper = Keeper(counting)
    keeper.look()
    first = Counter(counting.opened)

    for _ in range(5):
        keeper.look()

    assert counting.opened == first
    assert set(first.values()) == {1}


def test_a_damaged_done_record_is_an_error_that_names_the_ledger(store: PosixStore, memory_path: Path) -> None:
    work(store, make_input(memory_path / "in", numbered(3)))
    (store.root / "done" / "s000000").write_text("{")

    with pytest.raises(PermanentError, match="clean verify"):
        Keeper(store).look()


def test_another_ledger_in_the_same_place_is_read_anew(store: PosixStore, memory_path: Path) -> None:
    folder = make_input(memory_path / "in", numbered(3))
    work(store, folder)
    keeper = Keeper(store)
    before = keeper.look()
    store.root.rename(memory_path / "moved")
    missing = keeper.look()
    stopped_after(PosixStore(store.root), folder, 1, loudness_lufs=-20)

    after = keeper.look()

    assert [before["items_done"], missing["items_done"], after["items_done"]] == [3, None, 1]


# Workers


@pytest.fixture
def half_done(store: PosixStore, memory_path: Path) -> PosixStore:
    """A ledger whose worker `w` made three records, the third of them in its second shard."""
    stopped_after(store, make_input(memory_path / "in", numbered(6)), 3, shard_items=2)
    return store


def set_time(store: PosixStore, folder: str, time_s: float) -> None:
    for path in (store.root / folder).rglob("*"):
        os.utime(path, (time_s, time_s))


def test_a_worker_is_told_with_its_items_its_shard_and_the_age_of_its_newest_record(half_done: PosixStore) -> None:
    monotonic, wall = Clock(), Clock()
    set_time(half_done, "hb", wall.now_s - 1)
    set_time(half_done, "part", wall.now_s - 4)
    keeper = Keeper(half_done, monotonic, wall)

    first = keeper.look()["workers"]
    monotonic.now_s += 2
    second = keeper.look()["workers"]

    done = half_done.names("done")
    open_shard = next(name for name in half_done.names("part") if name.startswith("s") and name not in done)
    assert first == {"w": {"durable_age_s": 4.0, "items": 3, "shard": open_shard}}
    assert second["w"]["durable_age_s"] == 6.0


def test_a_worker_that_does_not_beat_for_its_ttl_is_told_no_more_and_again_when_it_beats(half_done: PosixStore) -> None:
    monotonic, wall = Clock(), Clock()
    set_time(half_done, "hb", wall.now_s)
    keeper = Keeper(half_done, monotonic, wall)
    told = [set(keeper.look()["workers"])]
    monotonic.now_s += 10.5
    told.append(set(keeper.look()["workers"]))
    set_time(half_done, "hb", wall.now_s + 10)

    told.append(set(keeper.look()["workers"]))

    assert told == [{"w"}, set(), {"w"}]


def test_after_the_first_look_a_wrong_clock_of_the_store_does_not_matter(store: PosixStore, memory_path: Path) -> None:
    folder = make_input(memory_path / "in", numbered(5))
    stopped_after(store, folder, 1)
    monotonic, wall = Clock(), Clock()
    keeper = Keeper(store, monotonic, wall)
    keeper.look()
    stopped_after(store, folder, 1)
    monotonic.now_s += 3
    set_time(store, "hb", wall.now_s - 86_400)
    set_time(store, "part", wall.now_s - 86_400)

    workers = keeper.look()["workers"]

    assert workers["w"]["durable_age_s"] == 3.0
    assert workers["w"]["items"] == 1


# HTTP


@pytest.fixture
def served(half_done: PosixStore) -> Iterator[tuple[httpx.Client, PosixStore, Clock]]:
    clock = Clock()
    with (
        serving(Keeper(half_done), "127.0.0.1", 0, clock) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=20) as client,
    ):
        yield client, half_done, clock


def test_progress_verify_and_ready_over_http(served: tuple[httpx.Client, PosixStore, Clock]) -> None:
    client, store, _ = served
    receipt = receipt_of(next((store.root / "part").glob("s*/1")))

    found = client.get("/progress").json()
    held = client.post("/verify", json={"receipt": {**asdict(receipt), "unit": "x", "worker": "w"}}).json()
    forged = client.post("/verify", json={"receipt": {**asdict(receipt), "sha256": "0" * 64}}).json()

    assert (found["job"], found["items_total"], found["items_done"]) == ("test", 6, 3)
    assert (held, forged) == ({"holds": True}, {"holds": False})
    assert client.get("/ready").status_code == 200


def test_who_asks_more_often_gets_the_same_answer(served: tuple[httpx.Client, PosixStore, Clock]) -> None:
    client, store, clock = served
    before = client.get("/progress").json()
    (store.root / "part").rename(store.root / "gone")

    at_once = client.get("/progress").json()
    clock.now_s += LOOK_EVERY_S
    later = client.get("/progress").json()

    assert at_once == before
    assert later["items_done"] == 2  # the done-record stays


RECEIPT = {"path": "/l/part/s000000/1", "size_bytes": 1, "sha256": "ab" * 32}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param("", "body: Invalid JSON", id="nothing"),
        pytest.param("[]", "object", id="no object"),
        pytest.param("{}", "receipt: Field required", id="no receipt"),
        pytest.param(json.dumps({"receipt": {**RECEIPT, "size_bytes": 0}}), "receipt.size_bytes: ", id="empty"),
        pytest.param(json.dumps({"receipt": {**RECEIPT, "sha256": "AB" * 32}}), "receipt.sha256: ", id="digest"),
    ],
)
def test_a_wrong_receipt_is_refused_with_the_field_named(
    served: tuple[httpx.Client, PosixStore, Clock], body: str, says: str
) -> None:
    response = served[0].post("/verify", content=body)

    assert response.status_code == response.json()["status"] == 422
    assert says in response.json()["message"]


def test_other_paths_and_methods_and_large_bodies_are_refused(served: tuple[httpx.Client, PosixStore, Clock]) -> None:
    client, *_ = served

    assert client.get("/verify").status_code == 404
    assert client.put("/progress").status_code == 404
    refused = client.post("/verify", content=b" " * 70_000)
    assert (refused.status_code, refused.headers["connection"]) == (413, "close")
    assert client.get("/ready").status_code == 200


def test_a_refusal_arrives_though_the_caller_is_still_sending(served: tuple[httpx.Client, PosixStore, Clock]) -> None:
    client, *_ = served
    size = 20_000_000  # more than the connection holds: the answer comes while most of it is not sent

    for _ in range(5):
        assert client.post("/verify", content=b" " * size).status_code == 413


def test_a_damaged_ledger_is_a_500_that_says_so_and_a_keeper_that_lives(
    served: tuple[httpx.Client, PosixStore, Clock],
) -> None:
    client, store, _ = served
    (store.root / "job").write_text("{")

    response = client.get("/progress")

    assert response.status_code == 500
    assert "is damaged" in response.json()["message"]
    assert client.get("/ready").status_code == 200


@pytest.mark.e2e
def test_a_keeper_that_came_before_the_ledger_sees_the_job_to_its_end_and_ends_0(memory_path: Path, clean: Any) -> None:
    folder = make_input(memory_path / "in", numbered(20))
    keeper = clean("keep", memory_path / "ledger", "--host", "127.0.0.1", "--port", 0)
    url = keeper.stdout.readline().split(" on ")[1].split(",")[0]
    with httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
        before = client.get("/progress").json()
        copy = ("--cleaner", "slackwater_workers.testing:CopyCleaner")
        worker = clean("run", folder, "-o", memory_path / "ledger", "--worker", "pod-7", *copy)
        while (found := client.get("/progress").json())["items_open"] != 0:
            assert keeper.poll() is None
            time.sleep(0.05)
        code = worker.wait()

    keeper.terminate()

    assert before == {"job": None, **UNKNOWN, "workers": {}}
    assert (code, found["items_done"], found["shards_open"]) == (0, 20, 0)
    assert found["workers"]["pod-7"]["items"] == 20
    assert keeper.wait() == 0


@pytest.mark.e2e
def test_a_port_in_use_is_one_line_and_exit_code_2(memory_path: Path, clean: Any) -> None:
    with serving(Keeper(PosixStore(memory_path / "none")), "127.0.0.1", 0) as url:
        keeper = clean("keep", memory_path / "ledger", "--host", "127.0.0.1", "--port", url.rpartition(":")[2])
        _, said = keeper.communicate()

    assert keeper.returncode == 2
    assert "give another --host or --port" in " ".join(said.split())
