"""A worker's receipt is believed only if the bytes on disk bear it out."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from slackwater_operator.cluster.proof import receipt_holds

WORK = b"three items and the torn start of a fourth"
DURABLE = 11


def receipt(part: Path, **changes: Any) -> dict[str, Any]:
    digest = hashlib.sha256(WORK[:DURABLE]).hexdigest()
    return {"path": str(part), "size_bytes": DURABLE, "sha256": digest} | changes


@pytest.fixture
def part(tmp_path: Path) -> Path:
    path = tmp_path / "part"
    path.write_bytes(WORK)
    return path


def test_bytes_after_the_durable_ones_do_not_matter(part: Path) -> None:
    assert receipt_holds(receipt(part))


def test_a_worker_that_committed_nothing_has_nothing_to_lose() -> None:
    assert receipt_holds(None)


def test_a_part_that_lost_its_end_does_not_hold(part: Path) -> None:
    part.write_bytes(WORK[: DURABLE - 1])

    assert not receipt_holds(receipt(part))


def test_a_part_with_another_byte_does_not_hold(part: Path) -> None:
    part.write_bytes(b"X" + WORK[1:])

    assert not receipt_holds(receipt(part))


@pytest.mark.parametrize("changes", [{"sha256": None}, {"size_bytes": "many"}, {"path": "/nowhere/part"}], ids=str)
def test_a_receipt_that_makes_no_sense_does_not_hold(part: Path, changes: dict[str, Any]) -> None:
    assert not receipt_holds(receipt(part, **changes))
