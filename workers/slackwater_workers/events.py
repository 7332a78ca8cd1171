"""JSON lines between this process and the one that runs it (the contract is in operator/README.md).

Owns the wire only.  A process that nobody supervises uses `ParentLink(None, None)`, which says nothing.
"""

import json
import threading
from collections.abc import Callable
from typing import Any, TextIO


class ParentLink:
    """Says events on `out`, one JSON object a line, and hears `set` messages on `inp`.

    Safe from any thread.  A parent that is gone is not an error here: `say` drops the line, and
    `listen` reports the end of `inp`.
    """

    def __init__(self, out: TextIO | None, inp: TextIO | None) -> None:
        self._out = out
        self._inp = inp
        self._lock = threading.Lock()

    def say(self, event: str, **fields: Any) -> None:
        """Write one event.  Fields must be JSON values."""
        if self._out is None:
            return
        line = json.dumps({"event": event, **fields}, allow_nan=False) + "\n"
        with self._lock:
            try:
                self._out.write(line)
                self._out.flush()
            except (BrokenPipeError, ValueError):  # the parent closed its end, or we are closing ours
                self._out = None

    def listen(self, on_set: Callable[[dict[str, Any]], None], on_gone: Callable[[], None]) -> None:
        """Call `on_set` with each message and `on_gone` at the end of input, from a daemon thread."""
        if self._inp is not None:
            threading.Thread(
                target=self._read, args=(self._inp, on_set, on_gone), name="parent-link", daemon=True
            ).start()

    @staticmethod
    def _read(inp: TextIO, on_set: Callable[[dict[str, Any]], None], on_gone: Callable[[], None]) -> None:
        for line in inp:
            try:
                message = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(message, dict) and "set" in message:
                on_set(message)
        on_gone()
