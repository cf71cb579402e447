"""Who of several schedulers serves: the holder of one Lease that is never deleted. The others wait, warm.

Knows nothing of the API server's protocol. The Lease elects, the epoch protects: a worker that a new holder has
attached refuses the old one's plans, whatever the old one believes. Guards: this process serves only after it has
held the Lease, and ends once it sees that another holds it. While the API server does not answer, a holder goes on:
through a server that answers nobody none can take the Lease, and a holder that alone is cut off is fenced by epoch.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from prometheus_client import Counter

from protos.wire.errors import EngineError, SyncError, UnavailableError
from scheduler_svc.cluster_config import LeaseRole
from scheduler_svc.metrics import Renewal

_logger = logging.getLogger(__name__)
_RENEWALS_PER_DURATION = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """The Lease as it was read."""

    holder: str
    """Empty: nobody."""
    duration_s: int
    """How long it holds after its last renewal."""
    renewals: str
    """Differs after each renewal; means nothing else."""
    wanted_by: str
    """The primary that waits for a standby to give way; empty: none."""
    found: object = None
    """What a write builds on: it is refused if anyone wrote since."""


class LeaseCalls(Protocol):
    """The authority that keeps the Lease."""

    async def read(self) -> LeaseRecord:
        """The Lease now.

        Raises:
            EngineError: UnavailableError passes by itself, any other needs an operator.
        """
        ...

    async def write(self, record: LeaseRecord, *, renews: bool) -> bool:
        """Store `record`, renewed now if that is asked for; False: anyone wrote since it was read.

        Raises:
            EngineError: as `read`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """Of one candidate."""

    identity: str
    """Unique for this process's life."""
    role: LeaseRole
    duration_s: int


class LeaseKeeper:
    """One candidate. Made by the core's composition root, run once."""

    def __init__(
        self, calls: LeaseCalls, settings: LeaseSettings, *, renewals: Counter, clock: Callable[[], float]
    ) -> None:
        self._calls = calls
        self._settings = settings
        self._renewals = renewals
        self._clock = clock
        self._pause_s = settings.duration_s / _RENEWALS_PER_DURATION
        self._held = asyncio.Event()
        self._seen = ("", "")
        self._seen_at = clock()
        self._last_error = ""

    async def held(self) -> None:
        """Wait until this process has the Lease."""
        await self._held.wait()

    async def run(self) -> None:
        """Take the Lease when it may be taken, then keep it.

        Raises:
            SyncError: another has it, or is to have it. This process must end.
            EngineError: before it was held: an operator must act.
        """
        await self._acquire()
        self._held.set()
        await self._keep()

    async def release(self) -> None:
        """Let another take it at once. Does nothing for who does not hold it, or cannot reach it."""
        if not self._held.is_set():
            return
        try:
            record = await self._calls.read()
            if record.holder == self._settings.identity:
                await self._calls.write(replace(record, holder=""), renews=False)
        except EngineError as error:
            _logger.warning("the Lease is not released, it runs out", extra={"error": error.message})

    # --- waiting

    async def _acquire(self) -> None:
        extra = {"identity": self._settings.identity, "role": self._settings.role.value}
        _logger.info("waiting for the Lease", extra=extra)
        began = self._clock()
        while True:
            try:
                if await self._took(waited_s=self._clock() - began):
                    _logger.info("holds the Lease", extra=extra)
                    return
                self._last_error = ""
            except UnavailableError as error:
                # Its holder could not renew it meanwhile either: it has its whole time again.
                self._seen = ("", "")
                self._failed("the Lease cannot be asked for, trying on", error)
            await asyncio.sleep(self._pause_s)

    async def _took(self, *, waited_s: float) -> bool:
        """One look: take it if it may be taken, else ask for it if that is due."""
        me, record = self._settings.identity, await self._calls.read()
        if self._may_take(record):
            taken = replace(record, holder=me, duration_s=self._settings.duration_s, wanted_by="")
            return await self._calls.write(taken, renews=True)
        if self._wants(record, waited_s=waited_s):
            await self._calls.write(replace(record, wanted_by=me), renews=False)
        return False

    def _may_take(self, record: LeaseRecord) -> bool:
        """By this process's own clock: clocks of two machines are never compared."""
        now = self._clock()
        if (record.holder, record.renewals) != self._seen:
            self._seen, self._seen_at = (record.holder, record.renewals), now
        is_promised = self._settings.role is LeaseRole.STANDBY and record.wanted_by
        if record.holder in ("", self._settings.identity) and not is_promised:
            return True
        return now - self._seen_at >= (record.duration_s or self._settings.duration_s)

    def _wants(self, record: LeaseRecord, *, waited_s: float) -> bool:
        """Whether to ask the holder to give way: late enough that this process is warm."""
        is_primary = self._settings.role is LeaseRole.PRIMARY
        return is_primary and record.wanted_by != self._settings.identity and waited_s >= self._settings.duration_s

    # --- holding

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s)
            try:
                record = await self._calls.read()
                self._check(record)
                was_written = await self._calls.write(record, renews=True)
                self._renewals.labels(Renewal.OK if was_written else Renewal.CONFLICT).inc()
                self._last_error = ""
            except SyncError:
                raise
            except EngineError as error:
                self._renewals.labels(Renewal.FAILED).inc()
                self._failed("the Lease cannot be renewed, serving on", error)

    def _check(self, record: LeaseRecord) -> None:
        if record.holder != self._settings.identity:
            message = f"{record.holder or 'nobody'} holds the Lease now"
            raise SyncError(message, field="lease_object")
        if self._settings.role is LeaseRole.STANDBY and record.wanted_by:
            message = f"the standby gives way to {record.wanted_by}"
            raise SyncError(message, field="lease_object")

    def _failed(self, text: str, error: EngineError) -> None:
        if error.message != self._last_error:
            self._last_error = error.message
            _logger.warning(text, extra={"error": error.message})
