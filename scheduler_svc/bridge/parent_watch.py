"""A child process and its parent: it stops on the parent's word only, and ends at once when the parent is gone.

The parent holds the other end of a pipe and never writes to it: the kernel closes that end however the parent dies, so
no orphan is left behind to hold a port or a worker. SIGTERM and SIGINT reach a whole process group; here they wait,
since the parent has got them too and stops its children in order.
"""

import asyncio
import logging
import os
import signal

_logger = logging.getLogger(__name__)

EXIT_ORPHANED = 70
STOP_ORDER = signal.Signals(signal.SIGRTMIN)
"""The parent's word. No terminal and no supervisor sends it to a group; before a child listens, it ends it."""


def watch_parent(descriptor: int) -> None:
    """End this process at once when the pipe ends. Called once, in the running event loop."""
    os.set_blocking(descriptor, False)
    asyncio.get_running_loop().add_reader(descriptor, _readable, descriptor)


def obey_parent() -> None:
    """From now on SIGTERM and SIGINT do nothing before `STOP_ORDER`, which is then a SIGTERM. As `watch_parent`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    asyncio.get_running_loop().add_signal_handler(STOP_ORDER, _ordered)


def _ordered() -> None:
    """One that waits already is the same order; a later one is not."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.raise_signal(signal.SIGTERM)


def _readable(descriptor: int) -> None:
    try:
        ended = os.read(descriptor, 1) == b""
    except BlockingIOError:
        return
    if ended:
        _logger.error("the parent process is gone, ending at once")
        os._exit(EXIT_ORPHANED)
