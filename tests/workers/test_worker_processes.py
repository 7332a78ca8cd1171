"""Real worker processes, killed in every way a fleet kills them."""

import hashlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from slackwater_workers.ledger.store import PosixStore
from slackwater_workers.ledger.verify import verify
from slackwater_workers.testing import exported, make_input, numbered, tone, wav_bytes

pytestmark = pytest.mark.e2e

COPY = ("--cleaner", "slackwater_workers.testing:CopyCleaner")


def slow(count: int, each_s: float) -> dict[str, bytes]:
    return {f"{number:03d}.wav": f"SLOW {each_s} {number}".encode() for number in range(count)}


def next_event(process: "subprocess.Popen[str]", wanted: str) -> dict[str, Any]:
    """Read events until the wanted one; the test's time limit is the bound."""
    assert process.stdout is not None
    for line in process.stdout:
        event: dict[str, Any] = json.loads(line)
        if event["event"] == wanted:
            return event
    raise AssertionError(f"ended with {process.wait()} before {wanted!r}: {process.stderr and process.stderr.read()}")


def test_a_storm_of_sigkills_loses_nothing_and_doubles_nothing(memory_path: Path, clean: Any) -> None:
    tones = {f"{n:03d}.wav": wav_bytes(tone(0.05 + 0.001 * n, 100.0 + n)) for n in range(30)}
    folder = make_input(memory_path / "in", tones | {f"s{n}.wav": f"SLOW 0.1 {n}".encode() for n in range(200)})
    ledger = memory_path / "ledger"
    arguments = ("run", folder, "-o", ledger, "--set", "shard_items=8", "--ttl", "0.6", *COPY)
    dice = random.Random(7)  # three workers have work for seven seconds at the least, the kills are over before
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}

    workers = [clean(*arguments, **quiet) for _ in range(3)]
    kills = 0
    while kills < 8:
        time.sleep(dice.uniform(0.3, 0.7))
        victim = dice.randrange(3)
        if workers[victim].poll() is None:
            workers[victim].kill()
            kills += 1
        workers[victim] = clean(*arguments, **quiet)
    codes = [worker.wait() for worker in workers]

    assert codes == [0, 0, 0]
    found = verify(PosixStore(ledger))
    assert (found.items_done, found.items_lost, found.items_doubled, found.items_open) == (230, 0, 0, 0)
    manifest = exported(PosixStore(ledger), memory_path / "out")
    assert sum(name.startswith("audio/") for name in manifest) == 230


def test_sigterm_is_answered_within_half_a_second_and_the_next_worker_goes_on(memory_path: Path, clean: Any) -> None:
    folder = make_input(memory_path / "in", slow(6, 0.3))
    ledger = memory_path / "ledger"
    arguments = ("run", folder, "-o", ledger, "--supervised", "--ttl", "600", *COPY)
    first = clean(*arguments)
    next_event(first, "durable")

    asked_s = time.monotonic()
    first.terminate()
    leaving = next_event(first, "leaving")
    code = first.wait()
    took_s = time.monotonic() - asked_s
    # The long TTL shows that the lease was released: nobody waits for it.
    second = clean(*arguments)
    working = next_event(second, "working")

    assert (code, leaving["reason"]) == (75, "preempted")
    assert took_s < 5.0  # a wide bound on a busy machine; the flag is looked at every few milliseconds
    assert working["items_done"] >= 1
    assert second.wait() == 0
    assert verify(PosixStore(ledger)).items_done == 6


def test_what_a_durable_event_claims_is_on_disk(memory_path: Path, clean: Any) -> None:
    folder = make_input(memory_path / "in", numbered(5))
    process = clean("run", folder, "-o", memory_path / "ledger", "--supervised", "--set", "shard_items=2", *COPY)

    events = [json.loads(line) for line in process.stdout]

    durable = [event for event in events if event["event"] == "durable"]
    assert process.wait() == 0
    assert [event["items"] for event in durable] == [1, 2, 3, 4, 5]
    for event in durable:
        start = Path(event["path"]).read_bytes()[: event["size_bytes"]]
        assert hashlib.sha256(start).hexdigest() == event["sha256"]
    working = [event for event in events if event["event"] == "working"]
    assert working[0]["items_total"] is None
    assert (working[1]["items_done"], working[1]["items_open"], working[1]["shards_open"]) == (0, 5, 3)


def test_a_worker_leaves_when_its_parent_is_gone(memory_path: Path, clean: Any) -> None:
    folder = make_input(memory_path / "in", slow(50, 0.2))
    process = clean("run", folder, "-o", memory_path / "ledger", "--supervised", *COPY)
    next_event(process, "durable")

    process.stdin.close()

    assert next_event(process, "leaving")["reason"] == "parent gone"
    assert process.wait() == 75


def test_a_worker_that_slept_past_its_ttl_loses_its_shard_and_doubles_nothing(memory_path: Path, clean: Any) -> None:
    folder = make_input(memory_path / "in", slow(6, 0.15))
    ledger = memory_path / "ledger"
    arguments = ("run", folder, "-o", ledger, "--supervised", "--ttl", "0.6", *COPY)
    zombie = clean(*arguments)
    next_event(zombie, "durable")

    os.kill(zombie.pid, signal.SIGSTOP)
    successor = clean(*arguments)
    code = successor.wait()
    before = {name: (ledger / "done" / name).read_bytes() for name in os.listdir(ledger / "done")}
    os.kill(zombie.pid, signal.SIGCONT)

    assert code == 0
    assert zombie.wait() == 0
    assert {name: (ledger / "done" / name).read_bytes() for name in os.listdir(ledger / "done")} == before
    found = verify(PosixStore(ledger))
    assert (found.items_done, found.items_lost, found.items_doubled) == (6, 0, 0)


def test_an_idle_worker_says_so_and_takes_over_from_the_dead(memory_path: Path, clean: Any) -> None:
    folder = make_input(memory_path / "in", {"a.wav": b"one", "b.wav": b"SLOW 2.5", "c.wav": b"3", "d.wav": b"4"})
    arguments = ("run", folder, "-o", memory_path / "ledger", "--supervised", "--ttl", "1.0", *COPY)
    first = clean(*arguments)
    next_event(first, "durable")
    second = clean(*arguments)
    idle = next_event(second, "idle")

    first.kill()
    first.wait()

    assert (idle["items_total"], idle["shards_open"]) == (4, 1)
    assert next_event(second, "working")["items_done"] >= 1
    assert second.wait() == 0
    assert verify(PosixStore(memory_path / "ledger")).items_done == 4


def test_an_item_that_kills_every_worker_ends_in_quarantine(memory_path: Path, clean: Any) -> None:
    folder = make_input(memory_path / "in", {"a.wav": b"one", "b.wav": b"CRASH", "c.wav": b"three"})
    arguments = ("run", folder, "-o", memory_path / "ledger", "--ttl", "0.5", *COPY)

    codes = [clean(*arguments).wait() for _ in range(4)]

    assert codes == [-signal.SIGKILL] * 3 + [0]
    found = verify(PosixStore(memory_path / "ledger"))
    assert (found.items_done, found.items_quarantined, found.items_open) == (2, 1, 0)


def test_an_item_that_hangs_ends_its_worker_and_then_itself(memory_path: Path, clean: Any) -> None:
    folder = make_input(memory_path / "in", {"a.wav": b"one", "b.wav": b"HANG"})
    settings = ("--set", "stall_s=2", "--set", "max_deaths=1", "--ttl", "0.5")
    arguments = ("run", folder, "-o", memory_path / "ledger", *settings, *COPY)

    codes = [clean(*arguments).wait() for _ in range(2)]

    assert codes == [1, 0]
    assert b"no answer" in exported(PosixStore(memory_path / "ledger"), memory_path / "out")["quarantine.jsonl"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_really_full_disk_is_one_line_and_exit_2_and_then_the_run_goes_on(memory_path: Path, clean: Any) -> None:
    disk = memory_path / "disk"
    disk.mkdir()
    folder = make_input(memory_path / "in", {f"{n}.wav": bytes([n]) * 150_000 for n in range(12)})
    arguments = ("run", folder, "-o", disk / "ledger", "--ttl", "0.5", *COPY)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no mount here: {mounted.stderr.strip()}")
    try:
        process = clean(*arguments)
        _, said = process.communicate()
        found = verify(PosixStore(disk / "ledger"))
        subprocess.run(["mount", "-o", "remount,size=16M", disk], check=True)
        again = clean(*arguments)
        again.communicate()

        assert process.returncode == 2
        assert "no space left on" in said
        assert "free some and start again, nothing is lost" in said
        assert "Traceback" not in said
        assert found.is_sound
        assert found.items_open > 0
        assert again.returncode == 0
        assert verify(PosixStore(disk / "ledger")).items_done == 12
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_the_real_steps_give_the_same_bytes_when_they_are_preempted_on_the_way(memory_path: Path, clean: Any) -> None:
    contents = {f"{n}.wav": wav_bytes(tone(0.4 + 0.1 * n, 150.0 + 10 * n)) for n in range(8)}
    folder = make_input(memory_path / "in", {**contents, "page.mp3": b"<html>", "twin.wav": contents["0.wav"]})
    arguments = ("run", folder, "--supervised", "-o")

    undisturbed = clean(*arguments, memory_path / "undisturbed")
    preempted = clean(*arguments, memory_path / "ledger")
    next_event(preempted, "durable")
    preempted.terminate()
    codes = [undisturbed.wait(), preempted.wait(), clean(*arguments, memory_path / "ledger").wait()]

    assert codes == [0, 75, 0]
    result = exported(PosixStore(memory_path / "ledger"), memory_path / "out")
    assert result == exported(PosixStore(memory_path / "undisturbed"), memory_path / "expected")
    assert len(result["manifest.jsonl"].splitlines()) == 8
    assert json.loads(result["quarantine.jsonl"])["path"] == "page.mp3"
