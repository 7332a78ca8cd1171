"""Reading back what a worker said it made durable, so that nothing counts as saved on its word alone."""

import hashlib
from pathlib import Path
from typing import Any


def receipt_holds(receipt: dict[str, Any] | None) -> bool:
    """Whether the first `size_bytes` of `path` are on disk with the digest that the worker named.

    A worker that has nothing to show (no receipt) holds nothing that could be lost.
    """
    if receipt is None:
        return True
    try:
        left = int(receipt["size_bytes"])
        digest = hashlib.sha256()
        with Path(str(receipt["path"])).open("rb") as part:
            while left and (block := part.read(min(left, 1 << 20))):
                digest.update(block)
                left -= len(block)
    except (OSError, KeyError, ValueError):
        return False
    return left == 0 and digest.hexdigest() == receipt.get("sha256")
