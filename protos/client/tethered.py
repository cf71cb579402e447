"""Becomes another Python process that the kernel stops when its parent is gone: `-m protos.client.tethered PID ARGS…`.

A step of its own, since the alternative, code between fork and exec, may not run in a process with gRPC's threads: its
fork handlers have aborted children there. The order survives exec.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
TOO_LATE = 1


def main() -> None:
    """Tie this process to its parent, then exec the interpreter with the arguments behind the parent's PID."""
    parent = int(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the order stood
        sys.exit(TOO_LATE)
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])


if __name__ == "__main__":
    main()
