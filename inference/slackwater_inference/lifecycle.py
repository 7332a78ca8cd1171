"""What an engine process has before it has torch: its port, and how it is told to wake and to leave.

Owns the signals and the end of standard input (the contract is in operator/README.md).  Light on
purpose: it is in force while torch is still being imported.  Called by the cli and the server.
"""

import logging
import os
import queue
import signal
import socket
import sys
import threading
from typing import NoReturn

from slackwater_inference.core import PortUnavailable
from slackwater_inference.events import ParentLink

_POLL_S = 0.02


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one.  Raises PortUnavailable if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise PortUnavailable(f"cannot listen on {host}:{port}: {reason}; choose another address or port") from error
    listener.setblocking(False)
    # Its connections inherit it; asyncio leaves it off for a socket that it did not make itself.  Without it a small
    # chunk of audio waits until the client has confirmed the one before, which may take it 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class Lifecycle:
    """Handles SIGTERM, SIGINT, SIGUSR1 and the parent's death for this process.

    Before `begin_serving` nothing is lost by leaving at once, so a signal does that.  Afterwards the
    first one sets `is_leaving` and the second one leaves at once.
    """

    def __init__(self, *, supervised: bool) -> None:
        self.link = ParentLink(sys.stdout, sys.stdin) if supervised else ParentLink(None, None)
        self._is_serving = False
        self._leaving = threading.Event()
        self._woken = threading.Event()
        # A handler interrupts the main thread anywhere, also where it holds the link's or an event's lock.
        # This queue is the one thing that is safe to touch then; a thread does what the signal asks.
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda number, _frame: self._signals.put(number))
        threading.Thread(target=self._heed_signals, name="signals", daemon=True).start()
        # A parent that is gone cannot want a graceful end, and nobody would reap us.
        self.link.listen(on_set=lambda _: None, on_gone=lambda: os._exit(0))

    @property
    def is_leaving(self) -> bool:
        """True once the process was told to leave."""
        return self._leaving.is_set()

    def begin_serving(self) -> None:
        """From now on there may be live streams to finish."""
        self._is_serving = True

    def stand_by(self) -> None:
        """Say `standby` and return when SIGUSR1 came."""
        self.link.say("standby")
        # In short waits: a handler runs only between two steps of the main thread.
        while not self._woken.wait(_POLL_S):
            pass

    def end(self, code: int) -> NoReturn:
        """Leave now, all work being done.

        Taking torch down in order costs about a second, in which somebody waits for what we hold.
        """
        logging.shutdown()
        os._exit(code)

    def _heed_signals(self) -> None:
        while True:
            number = self._signals.get()
            if number == signal.SIGUSR1:
                self._woken.set()
            elif self.is_leaving:
                os._exit(0)
            else:
                self.link.say("leaving", reason=signal.Signals(number).name)
                if not self._is_serving:
                    os._exit(0)
                self._leaving.set()
