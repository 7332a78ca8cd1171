"""The receipt file is one line at every moment, in the same file for ever."""

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slackwater_workers.core import PermanentError, Progress, Receipt
from slackwater_workers.ledger.store import PosixStore
from slackwater_workers.ledger.verify import holds
from slackwater_workers.pipeline.receipt import MAX_BYTES, ReceiptFile
from slackwater_workers.pipeline.report import ReceiptReport
from slackwater_workers.preemption import StopFlag
from slackwater_workers.testing import Recorder, make_input, numbered

HALF = Progress(items_total=10, items_done=4, items_quarantined=1, audio_s=8.0, shards_total=3, shards_open=2)
RECEIPT = Receipt("/ledger/part/s000000/1", 123, "ab" * 32)

# Rewrites the file as fast as it can with lines of every length that prove themselves.
STORM = """
import hashlib, itertools, pathlib, random, sys
from slackwater_workers.pipeline.receipt import ReceiptFile
file = ReceiptFile(pathlib.Path(sys.argv[1]))
dice = random.Random(int(sys.argv[2]))
for number in itertools.count():
    text = str(number) * dice.randrange(1, 200)
    file.replace({"text": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})
    if number == 0:
        print("begun", flush=True)
"""


def test_a_new_line_takes_the_place_of_a_longer_one_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "receipt"
    path.touch()
    os.link(path, tmp_path / "what the kubelet mounted")
    file = ReceiptFile(path)

    file.replace({"unit": "a" * 500})
    file.replace({"unit": "b"})

    content = (tmp_path / "what the kubelet mounted").read_text()
    assert json.loads(content) == {"unit": "b"}
    assert content.endswith("\n")
    assert content.count("\n") == 1


def test_it_is_empty_until_something_is_durable_whatever_lay_there(tmp_path: Path) -> None:
    path = tmp_path / "receipt"
    path.write_text('{"unit": "of another life"}\n')

    ReceiptFile(path)

    assert path.read_bytes() == b""


def test_it_is_made_when_missing(tmp_path: Path) -> None:
    ReceiptFile(tmp_path / "receipt").replace({"unit": "a"})

    assert json.loads((tmp_path / "receipt").read_text()) == {"unit": "a"}


@pytest.mark.parametrize(
    ("path", "says"),
    [
        pytest.param("{t}/none/receipt", "cannot write the receipt file", id="no folder"),
        pytest.param("{t}", "cannot write the receipt file", id="a folder"),
        pytest.param("/dev/full", "must be a regular file", id="a device"),
        pytest.param("{t}/pipe", "receipt file", id="a pipe nobody reads"),
    ],
)
def test_a_file_that_cannot_be_rewritten_is_refused_at_the_start(tmp_path: Path, path: str, says: str) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(PermanentError, match=says):
        ReceiptFile(Path(path.replace("{t}", str(tmp_path))))


def test_a_line_that_a_kubelet_might_cut_is_refused_and_the_last_one_stays(tmp_path: Path) -> None:
    file = ReceiptFile(tmp_path / "receipt")
    file.replace({"unit": "x" * (MAX_BYTES - 1 - len('{"unit":""}'))})
    before = (tmp_path / "receipt").read_bytes()

    with pytest.raises(PermanentError, match="shorter --output or --worker"):
        file.replace({"unit": "x" * MAX_BYTES})

    assert len(before) == MAX_BYTES
    assert (tmp_path / "receipt").read_bytes() == before


@pytest.mark.e2e
def test_sigkill_at_any_moment_leaves_one_whole_line(tmp_path: Path) -> None:
    dice = random.Random(11)
    path = tmp_path / "receipt"
    sizes = set()
    for round_ in range(6):
        process = subprocess.Popen([sys.executable, "-c", STORM, path, str(round_)], stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            time.sleep(dice.uniform(0.0, 0.05))
        finally:
            process.kill()
            process.communicate()

        line = json.loads(path.read_text())

        assert hashlib.sha256(line["text"].encode()).hexdigest() == line["sha256"]
        sizes.add(len(line["text"]))
    assert len(sizes) > 1


def test_the_receipt_is_the_durable_event_and_who_wrote_it_and_the_other_voice_goes_on(tmp_path: Path) -> None:
    voice = Recorder(StopFlag())
    report = ReceiptReport(voice, ReceiptFile(tmp_path / "receipt"), "pod-7")

    report.working(HALF)
    report.durable("a", RECEIPT, audio_s=1.5)
    report.durable("b", RECEIPT, audio_s=2.0)
    report.idle(HALF)
    report.leaving("preempted")

    assert json.loads((tmp_path / "receipt").read_text()) == {
        "unit": "b",
        "path": RECEIPT.path,
        "size_bytes": RECEIPT.size_bytes,
        "sha256": RECEIPT.sha256,
        "items": 2,
        "audio_s": 3.5,
        "worker": "pod-7",
    }
    assert voice.receipts == [RECEIPT, RECEIPT]
    assert voice.words == ["working", "idle", "leaving"]


@pytest.mark.e2e
def test_what_a_killed_worker_left_in_its_file_holds(memory_path: Path, clean: Any) -> None:
    folder = make_input(memory_path / "in", {f"{n}.wav": f"SLOW 0.05 {n}".encode() for n in range(40)})
    receipt = memory_path / "receipt"
    copy = ("--cleaner", "slackwater_workers.testing:CopyCleaner")
    arguments = ("run", folder, "-o", memory_path / "ledger", "--worker", "pod-7", "--receipt-file", receipt, *copy)
    process = clean(*arguments)
    while not (receipt.exists() and receipt.read_bytes()):
        assert process.poll() is None
        time.sleep(0.01)

    process.kill()
    process.wait()

    said = json.loads(receipt.read_text())
    assert said["worker"] == "pod-7"
    assert said["items"] >= 1
    assert holds(PosixStore(memory_path / "ledger"), Receipt(said["path"], said["size_bytes"], said["sha256"]))


@pytest.mark.e2e
def test_a_receipt_file_that_cannot_be_written_is_exit_code_2_before_any_work(memory_path: Path, clean: Any) -> None:
    folder = make_input(memory_path / "in", numbered(2))

    process = clean("run", folder, "-o", memory_path / "ledger", "--receipt-file", memory_path)
    _, said = process.communicate()

    assert process.returncode == 2
    assert "cannot write the receipt file" in said
    assert not (memory_path / "ledger").exists()
