"""The receipt file: the newest durable record, for whoever finds the worker gone.

Owns one line in one file, rewritten in place: a kubelet mounts its termination-log file into the container and reads
that same file afterwards, so another file under its name would not be seen.
"""

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slackwater_workers.core import PermanentError, TemporaryError
from slackwater_workers.ledger.store import storage_error

# A kubelet passes on 4096 bytes, and all of a pod's containers share 12 KiB.  Within one memory page, see `replace`.
MAX_BYTES = 2048


class ReceiptFile:
    """A file with one JSON line, or empty until the first."""

    def __init__(self, path: Path) -> None:
        """Open and empty it; it is made when missing.  Raises PermanentError."""
        self._path = path
        self._size_bytes = 0
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
            is_file = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
            if is_file:
                os.ftruncate(self._descriptor, 0)
        except OSError as error:
            raise PermanentError(f"cannot write the receipt file {path}: {error.strerror}") from error
        if not is_file:
            os.close(self._descriptor)
            raise PermanentError(f"the receipt file {path} must be a regular file: it is rewritten in place")

    def replace(self, fields: Mapping[str, Any]) -> None:
        """Put this line in the place of the one before; a kill at any moment leaves one of the two, whole.

        A line is never shorter than the one before (blanks fill it up), so one write does it and nothing is cut off
        afterwards; and a write inside the file's first page is done or not begun when SIGKILL comes.
        Raises PermanentError for a line above MAX_BYTES, StorageFull or TemporaryError when the file fails.
        """
        line = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode("ascii")
        if len(line) >= MAX_BYTES:
            raise PermanentError(
                f"a receipt may have {MAX_BYTES - 1} bytes, got {len(line)}; give a shorter --output or --worker"
            )
        self._size_bytes = max(self._size_bytes, len(line) + 1)
        data = line.ljust(self._size_bytes - 1) + b"\n"
        try:
            written = os.pwrite(self._descriptor, data, 0)
        except OSError as error:
            raise storage_error(error, str(self._path)) from error
        if written != len(data):
            raise TemporaryError(f"the receipt file {self._path} took {written} of {len(data)} bytes")
