"""A worker and a keeper as a pod runs them."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from slackwater_workers.core import Receipt
from slackwater_workers.ledger.store import PosixStore
from slackwater_workers.ledger.verify import holds, verify
from slackwater_workers.testing import make_input, numbered, tone, wav_bytes

pytestmark = pytest.mark.e2e

COPY = ("--cleaner", "slackwater_workers.testing:CopyCleaner")
# The bar is half a second from the signal to the exit on an idle machine; this is for a busy one.
SOON_S = 3.0


def mounted_file(path: Path) -> Path:
    """As a kubelet makes the termination log."""
    path.touch()
    path.chmod(0o666)
    return path


def test_a_worker_with_the_real_steps_works_on_a_read_only_root_and_leaves_with_75(pod: Any, pod_folder: Path) -> None:
    speech = wav_bytes(tone(2.0))
    folder = make_input(pod_folder / "in", {f"{n}.wav": speech[:-2] + n.to_bytes(2, "big") for n in range(200)})
    receipt = mounted_file(pod_folder / "log")
    worker = pod("clean", "run", folder, "-o", pod_folder / "ledger", "--worker", "pod-7", "--receipt-file", receipt)
    while not receipt.read_bytes():
        assert worker.process.poll() is None, worker.process.communicate()
        time.sleep(0.005)

    worker.terminate()
    began_s = time.monotonic()
    code = worker.process.wait(60)

    said = json.loads(receipt.read_text())
    assert code == 75
    assert time.monotonic() - began_s < SOON_S
    assert holds(PosixStore(pod_folder / "ledger"), Receipt(said["path"], said["size_bytes"], said["sha256"]))
    assert verify(PosixStore(pod_folder / "ledger")).items_done == said["items"] < 200


def test_an_idle_worker_leaves_with_75(pod: Any, pod_folder: Path, clean: Any) -> None:
    folder = make_input(pod_folder / "in", {"a.wav": b"SLOW 120"})
    holder = clean("run", folder, "-o", pod_folder / "ledger", "--supervised", *COPY)
    while "shards_open" not in (line := holder.stdout.readline()) or json.loads(line)["items_total"] is None:
        assert holder.poll() is None
    for path in (pod_folder / "ledger").rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o666)
    (pod_folder / "ledger").chmod(0o777)
    worker = pod("clean", "run", folder, "-o", pod_folder / "ledger", *COPY)
    assert "idle" in worker.process.stderr.readline()

    worker.terminate()
    began_s = time.monotonic()
    code = worker.process.wait(60)

    assert code == 75
    assert time.monotonic() - began_s < SOON_S


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.15])
def test_a_process_that_has_only_begun_hears_the_signal_too(pod: Any, pod_folder: Path, delay_s: float) -> None:
    folder = make_input(pod_folder / "in", {"a.wav": b"SLOW 120"})
    worker = pod("clean", "run", folder, "-o", pod_folder / "ledger", *COPY)
    while not worker.program().startswith("python"):
        time.sleep(0.001)
    time.sleep(delay_s)

    worker.terminate()

    # 143: the command had not begun.  75: it had, and left.
    assert worker.process.wait(60) in (143, 75)


def test_a_keeper_reads_a_ledger_that_it_cannot_write_and_ends_0(pod: Any, pod_folder: Path, clean: Any) -> None:
    make_input(pod_folder / "in", numbered(3))
    clean("run", pod_folder / "in", "-o", pod_folder / "ledger", *COPY).wait()
    keeper = pod("clean", "keep", pod_folder / "ledger", "--host", "127.0.0.1", "--port", 0)
    url = keeper.process.stdout.readline().split(" on ")[1].split(",")[0]
    found = _get(f"{url}/progress")

    keeper.terminate()

    assert (found["items_done"], found["items_open"]) == (3, 0)
    assert keeper.process.wait(60) == 0


def _get(url: str) -> dict[str, Any]:
    import httpx

    return dict(httpx.get(url, trust_env=False, timeout=20).json())
