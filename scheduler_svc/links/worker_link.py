"""The scheduler's link to one worker: attaches, serves terms, attaches again.

Explicit state: attaching -> serving (a session) -> pause -> attaching. Knows nothing of requests.
Guards: (epoch, term) rises at each attach, so nothing of an ended term can be mistaken for the next one's.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc

from protos.wire.enums import WorkerState
from protos.wire.errors import EngineError, StaleEpoch, UnavailableError
from protos.wire.plan import ForwardPlan
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.attachment import check_worker
from scheduler_svc.links.epoch import EpochSource
from scheduler_svc.links.fingerprints import ExpectedModel, check_model
from scheduler_svc.links.recorder import PlanRecorder
from scheduler_svc.links.session import LinkListener, SessionParts, SessionSettings, WorkerSession
from scheduler_svc.links.statistics import LinkCounts
from scheduler_svc.links.worker_calls import WorkerCalls
from scheduler_svc.metrics import LinkMetrics

_logger = logging.getLogger(__name__)


class FencedListener(LinkListener, Protocol):
    """What the link tells beside a session's events."""

    def worker_fenced(self, worker: str, error: StaleEpoch) -> None:
        """Another scheduler has taken this worker: this one must end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Time limits of one link."""

    session: SessionSettings
    attach_timeout_s: float
    reattach_min_s: float
    reattach_max_s: float
    scheduler_name: str
    """Unique for this process's life: an attach of another life is never an identical retry of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkParts:
    """What the composition root gives each link."""

    listener: FencedListener
    metrics: LinkMetrics
    epoch: EpochSource
    expected: ExpectedModel
    open_channel: Callable[[str], grpc.aio.Channel]
    clock: Callable[[], float]
    recorder: PlanRecorder | None = None
    certificates: Callable[[], object] | None = None
    """What channels are opened with now: another object once there is something new. None: plain text."""


class WorkerLink:
    """One for each configured worker address, for the core's life."""

    def __init__(self, worker: str, *, settings: LinkSettings, parts: LinkParts) -> None:
        self.worker = worker
        self.counts = LinkCounts()
        self._settings = settings
        self._parts = parts
        self._session: WorkerSession | None = None
        self._term = 0
        self._was_attached = False
        self._last_failure = ""
        self._pause_s = settings.reattach_min_s
        parts.metrics.set_state(None)

    @property
    def info(self) -> WorkerInfo | None:
        """What the attached worker said of itself; None while none is."""
        return None if self._session is None else self._session.term.info

    @property
    def state(self) -> WorkerState | None:
        """The attached worker's state; None while none is."""
        return None if self._session is None else self._session.state

    @property
    def num_in_flight(self) -> int:
        """Plans without a result."""
        return 0 if self._session is None else self._session.num_in_flight

    def send(self, plan: ForwardPlan) -> None:
        """Send a plan of the current term. While the worker is lost it goes nowhere: the core is being told."""
        if self._session is not None:
            self._session.send(plan)

    async def run(self) -> None:
        """Keep the worker attached until cancelled, or until another scheduler has it."""
        while True:
            error = await self._one_term()
            if not isinstance(error, StaleEpoch):
                await self._pause()
            elif not self._may_overtake(error):
                self._parts.listener.worker_fenced(self.worker, error)
                return

    async def _one_term(self) -> EngineError:
        """Attach and serve; returns why it ended or did not begin. Each try has its own channel and its own term."""
        self._term += 1
        calls = self._calls()
        try:
            return await self._serve(await self._attach(calls))
        except EngineError as error:
            self._attach_failed(error)
            return error
        finally:
            await calls.close()

    def _calls(self) -> WorkerCalls:
        certificates = None if self._parts.certificates is None else self._parts.certificates()
        return WorkerCalls(self._parts.open_channel(self.worker), certificates=certificates)

    async def _attach(self, calls: WorkerCalls) -> WorkerSession:
        term = await calls.attach(
            self.worker,
            epoch=self._parts.epoch.current(),
            term=self._term,
            scheduler_name=self._settings.scheduler_name,
            timeout_s=self._settings.attach_timeout_s,
        )
        check_model(term.info, self._parts.expected)
        check_worker(term.info)
        session_parts = SessionParts(
            listener=self._parts.listener,
            metrics=self._parts.metrics,
            counts=self.counts,
            settings=self._settings.session,
            clock=self._parts.clock,
            recorder=self._parts.recorder,
            certificates=self._parts.certificates,
            new_calls=self._calls,
        )
        return WorkerSession(calls, term=term, parts=session_parts)

    async def _serve(self, session: WorkerSession) -> EngineError:
        term = session.term
        _logger.info("worker attached", extra={"worker": self.worker, "epoch": term.epoch, "term": term.term})
        self._was_attached = True
        self._last_failure = ""
        self._parts.metrics.workers.epoch.set(term.epoch)
        begun = self._parts.clock()
        self._session = session
        try:
            reason = await session.run()
        finally:
            self._session = None
        if self._parts.clock() - begun > self._settings.reattach_max_s:
            self._pause_s = self._settings.reattach_min_s
        self._parts.metrics.lost(reason.reason)
        extra = {"worker": self.worker, "term": term.term, "reason": reason.reason, "error": reason.message}
        _logger.warning("worker lost", extra=extra)
        return reason

    def _may_overtake(self, error: StaleEpoch) -> bool:
        """Whether a refused pair may be answered with a higher epoch: before service only."""
        return not self._was_attached and self._parts.epoch.overtake(error.highest_epoch)

    def _attach_failed(self, error: EngineError) -> None:
        """Count it; say it once for each reason, so a worker that stays away does not fill the log.

        That a worker does not answer yet is how every start looks; that one has gone is news.
        """
        self._parts.metrics.attach_refused(error.reason)
        if error.reason != self._last_failure:
            self._last_failure = error.reason
            is_expected = isinstance(error, UnavailableError) and not self._was_attached
            extra = {"worker": self.worker, "reason": error.reason, "field": error.field, "error": error.message}
            level = logging.INFO if is_expected else logging.WARNING
            _logger.log(level, "worker cannot be attached, trying on", extra=extra)

    async def _pause(self) -> None:
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, self._settings.reattach_max_s)
