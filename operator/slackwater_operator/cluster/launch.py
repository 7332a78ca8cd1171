"""Becomes a child process that cannot outlive the one that started it.

Run by file, `python -S launch.py PARENT_PID NICE COMMAND...`, never imported: it asks Linux to kill
this process when its parent dies, lowers its priority and then becomes COMMAND.  The request survives
the exec.  Elsewhere the children still see the end of their standard input.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h

if __name__ == "__main__":
    parent, nice, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before the request was in place
        sys.exit(1)
    if int(nice):
        os.nice(int(nice))
    os.execv(command[0], command)
