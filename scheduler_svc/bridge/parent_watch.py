"""Ends a child process whose parent is gone: the parent holds the other end of a pipe and never writes to it.

The kernel closes that end however the parent dies, so no orphan is left behind to hold a port or a worker.
"""

import asyncio
import logging
import os

_logger = logging.getLogger(__name__)

EXIT_ORPHANED = 70


def watch_parent(descriptor: int) -> None:
    """End this process at once when the pipe ends. Called once, in the running event loop."""
    os.set_blocking(descriptor, False)
    asyncio.get_running_loop().add_reader(descriptor, _readable, descriptor)


def _readable(descriptor: int) -> None:
    try:
        ended = os.read(descriptor, 1) == b""
    except BlockingIOError:
        return
    if ended:
        _logger.error("the parent process is gone, ending at once")
        os._exit(EXIT_ORPHANED)
