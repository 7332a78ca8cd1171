"""The first lines of the console script: how a process that has only begun takes a SIGTERM.

Owns that one signal until a command installs its own handler.  To the first process of a container the kernel gives no
signal whose action is the default one, and imports take some tenths of a second: without this, a pod that is told to
go in its first moments hears nothing, and holds its GPU until the grace has run out.  Imports nothing heavy.
"""

import os
import signal
from types import FrameType


def main() -> None:
    """Run `sys.argv`; does not return."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _leave)
    # An image may start us by `env --block-signal=TERM`: what came before this line is delivered now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    from slackwater_operator import cli

    cli.main()


def _leave(number: int, _frame: FrameType | None) -> None:
    """End as the default action does: nothing was begun that could be lost."""
    os._exit(128 + number)
