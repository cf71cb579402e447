"""The epoch as an annotation of one object that is never deleted, raised by compare-and-set.

Knows nothing of the API server's protocol. Guards: no two schedulers have the same epoch, whoever races.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from protos.wire.errors import UnavailableError

_logger = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class RaisedEpoch:
    """An epoch source that is raised once, before any link asks it.

    Args:
        compare_and_set: one try to raise the stored epoch; None when another was faster.
    """

    def __init__(self, compare_and_set: Callable[[], Awaitable[int | None]]) -> None:
        self._compare_and_set = compare_and_set
        self._epoch: int | None = None

    async def raise_once(self) -> None:
        """Take the next epoch. Tries on while the authority cannot be reached: without an epoch there is no service.

        Raises:
            EngineError: an operator must act.
        """
        pause_s, last_error = _FIRST_PAUSE_S, ""
        while self._epoch is None:
            try:
                self._epoch = await self._compare_and_set()
            except UnavailableError as error:
                if error.message != last_error:
                    last_error = error.message
                    _logger.warning("no epoch yet, trying on", extra={"error": error.message})
            if self._epoch is None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def current(self) -> int:
        """The epoch to attach with."""
        assert self._epoch is not None, "raised before any link is made"
        return self._epoch

    def overtake(self, highest_epoch: int) -> bool:
        """Never rises: a worker that saw more means that another scheduler took over, or that the object was lost."""
        return self.current() > highest_epoch
