"""Where a request may stand, what may happen to it there, and a driver that makes everything happen everywhere.

States are finer than `RequestStatus`: they also tell what is in flight, and what a request waits for.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum, auto

from protos.wire.enums import Feature, FinishReason, RowFailure
from protos.wire.errors import InvalidRequest
from protos.wire.limits import MAX_PLAN_BYTES
from protos.wire.result import PlanRejection
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.events import (
    CacheFlushRequested,
    Event,
    Grammar,
    MaskReady,
    ReaderPaused,
    ReaderResumed,
    RequestCancelled,
    RequestFinished,
    RequestRefused,
    RequestSpec,
    RequestSubmitted,
    ResultReceived,
    Sampling,
    StreamKey,
    WorkerLost,
)
from scheduler_svc.core.request import Request, RequestStatus
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.wait_reasons import WaitReason
from tests.support.core_harness import NEVER, CoreHarness, make_spec, small_info
from tests.support.plans import CORE_FEATURES, full_sub_pool


class Place(StrEnum):
    """Where a request stands."""

    WAITS_NEW = auto()
    WAITS_FOR_MASK = auto()
    WAITS_FOR_PREFIX = auto()
    WAITS_PAUSED = auto()
    WAITS_AGAIN = auto()
    WAITS_AGAIN_LATE = auto()
    """With rows of an earlier attempt in flight."""
    PREFILLS_IDLE = auto()
    """On its pages, no row in flight."""
    PREFILLS = auto()
    PREFILLS_LATE = auto()
    PREFILLS_PAUSED = auto()
    DECODES_IDLE = auto()
    DECODES = auto()
    DECODES_AHEAD = auto()
    """Two rows in flight, the second from the first one's token."""
    DECODES_LATE = auto()
    DECODES_FOR_MASK = auto()
    DECODES_PAUSED = auto()
    DECODES_PAUSED_IN_FLIGHT = auto()
    ENDED = auto()
    ENDED_IN_FLIGHT = auto()


class Happening(StrEnum):
    """What may happen to it."""

    ABORT = auto()
    STOP = auto()
    EDGE_GONE = auto()
    DEADLINE = auto()
    RETRACT = auto()
    WORKER_LOST = auto()
    WORKER_BACK = auto()
    """Attached again, without a word that it was lost."""
    PAUSE = auto()
    RESUME = auto()
    BAD_NUMBERS = auto()
    ROW_FAILED = auto()
    REJECTED = auto()
    MASK_REFUSED = auto()
    FLUSH = auto()
    TWIN = auto()
    """The edge submits another request of the same stream."""


WAITING = [place for place in Place if place.startswith("waits")]
ENDED = [Place.ENDED, Place.ENDED_IN_FLIGHT]
WITH_ROWS = [
    Place.WAITS_AGAIN_LATE,
    Place.PREFILLS,
    Place.PREFILLS_LATE,
    Place.PREFILLS_PAUSED,
    Place.DECODES,
    Place.DECODES_AHEAD,
    Place.DECODES_LATE,
    Place.DECODES_PAUSED_IN_FLIGHT,
    Place.ENDED_IN_FLIGHT,
]
"""Where a result may bring a failed row."""
WITH_QUESTION = [Place.WAITS_FOR_MASK, Place.DECODES_FOR_MASK, Place.WAITS_PAUSED, Place.DECODES_PAUSED, Place.ENDED]
"""Where the answer to a question for a mask may come, however late."""


def is_possible(place: Place, what: Happening) -> bool:
    """Whether that can happen there at all."""
    match what:
        case Happening.BAD_NUMBERS | Happening.ROW_FAILED | Happening.REJECTED:
            return place in WITH_ROWS
        case Happening.MASK_REFUSED:
            return place in WITH_QUESTION
        case Happening.RETRACT:
            return place not in (*WAITING, *ENDED)
        case Happening.DEADLINE:
            return place not in ENDED
        case Happening.TWIN:  # of an ended stream it is a new request
            return place not in ENDED
    return True


ALL_PAIRS = [(place, what) for place in Place for what in Happening if is_possible(place, what)]


def place_of(state: SchedulerState, request: Request) -> Place:
    """Where the request stands now."""
    rows = [row for worker in state.workers.values() for plan in worker.in_flight for row in plan.rows]
    attempts = [row.attempt for row in rows if row.request is request]
    num_current = attempts.count(request.attempt)
    is_late = len(attempts) > num_current
    match request.status:
        case RequestStatus.FINISHED:
            return Place.ENDED_IN_FLIGHT if attempts else Place.ENDED
        case RequestStatus.WAITING:
            return _waiting(state, request, is_late=is_late)
        case RequestStatus.PREFILLING:
            if request.standing.is_paused:
                return Place.PREFILLS_PAUSED
            return Place.PREFILLS_LATE if is_late else Place.PREFILLS if num_current else Place.PREFILLS_IDLE
    if request.standing.is_paused:
        return Place.DECODES_PAUSED_IN_FLIGHT if num_current else Place.DECODES_PAUSED
    if request.awaits_mask:
        return Place.DECODES_FOR_MASK if not num_current else Place.DECODES
    if is_late:
        return Place.DECODES_LATE
    return (Place.DECODES_IDLE, Place.DECODES, Place.DECODES_AHEAD)[min(num_current, 2)]


def _waiting(state: SchedulerState, request: Request, *, is_late: bool) -> Place:
    if request.standing.is_paused:
        return Place.WAITS_PAUSED
    if request.awaits_mask:
        return Place.WAITS_FOR_MASK
    if request.standing.has_run:
        return Place.WAITS_AGAIN_LATE if is_late else Place.WAITS_AGAIN
    is_behind_prefix = state.last_look.reasons.get(request.handle) is WaitReason.PREFIX
    return Place.WAITS_FOR_PREFIX if is_behind_prefix else Place.WAITS_NEW


class LifeCycle:
    """One core and its workers. `turn` does what was not seen yet where it can, else anything."""

    def __init__(self, seed: int, seen: Counter[tuple[Place, Happening]], *, is_tight: bool) -> None:
        self.random = random.Random(seed)
        self.seen = seen
        self.is_tight = is_tight
        """Nobody is made to end, so that pages run short while rows fail."""
        self.harness = CoreHarness(self._settings())
        self.info = self._info()
        self.names = ["w0", "w1"][: self.random.choice([1, 1, 2])]
        self.requests: dict[StreamKey, Request] = {}
        self.next_stream = 1
        self.failing: tuple[int, RowFailure] | None = None
        self.rejecting: int | None = None
        self.harness.fail_row = self._fails
        self.harness.reject = self._rejects
        for name in self.names:
            self.harness.attach(name, self.info)

    def _settings(self) -> CoreSettings:
        return CoreSettings(
            budget_tokens=self.random.choice([2, 4] if self.is_tight else [2, 4, 16]),
            new_token_ratio_start=0.0,
            new_token_ratio_floor=0.0,
            data_fault_retries=10_000,
            row_retries=10_000,
        )

    def _info(self) -> WorkerInfo:
        size = 1 if self.is_tight else self.random.choice([1, 2, 4])
        usable = [16, 20] if self.is_tight else [16, 20, 28, 40]
        features = CORE_FEATURES
        if self.random.random() < 0.2:
            features -= {Feature.TOKEN_REFERENCES}
        return small_info(
            sub_pools=(full_sub_pool(num_pages=1 + self.random.choice(usable) // size, page_size=size),),
            features=features,
            window=self.random.choice([2, 4]) if self.is_tight else self.random.choice([1, 2, 2, 3]),
            max_rows=self.random.choice([2, 4, 8]),
            max_tokens=size + 16,
            max_plan_bytes=self.random.choice([MAX_PLAN_BYTES, 1700]),
        )

    def noted(self, request: Request, what: Happening) -> None:
        """It happens to the request where it stands now."""
        self.seen[place_of(self.harness.state, request), what] += 1

    def turn(self) -> None:
        """One thing happens; most of the time what serving is made of."""
        if self.random.random() < 0.75:
            self._progress()
            return
        options = self._options()
        if options:
            least = min(self.seen[pair] for pair, _ in options)
            rare = [happen for pair, happen in options if self.is_tight or self.seen[pair] == least]
            self.random.choice(rare)()

    def settle(self) -> None:
        """Everything that is left goes on to its end."""
        harness = self.harness
        harness.step(*[ReaderResumed(stream) for stream in self.requests])
        for name in self.names:
            if name not in harness.workers:
                harness.attach(name, self.info)
        harness.run()

    # --- what serving is made of

    def _progress(self) -> None:
        harness = self.harness
        busy = [name for name in harness.workers if harness.pending[name]]
        missing = [name for name in self.names if name not in harness.workers]
        if missing and self.random.random() < 0.2:
            harness.attach(missing[0], self.info)
        elif harness.masks and self.random.random() < 0.4:
            harness.answer_mask()
        elif busy and self.random.random() < 0.6:
            harness.deliver(self.random.choice(busy))
        elif len(harness.state.streams) < 9:
            self._submit(self._spec())

    def _submit(self, spec: RequestSpec) -> None:
        self.harness.submit(spec)
        request = self.harness.state.streams.get(spec.stream)
        if request is not None:
            self.requests[spec.stream] = request

    def _spec(self) -> RequestSpec:
        rng, length = self.random, self.random.randint(1, 10)
        book = [(7 * position) % 97 for position in range(length)]
        prompt = book if rng.random() < 0.6 else [rng.randrange(97) for _ in range(length)]
        spec = make_spec(
            self.next_stream,
            prompt=prompt,
            max_tokens=rng.randint(1, 6) if rng.random() < 0.5 else 16 - length,
            sampling=Sampling(repetition_penalty=rng.choice([1.0, 1.0, 1.5])),
            stop_token_ids=frozenset(rng.sample(range(97), rng.choice([0, 3]))),
            grammar=Grammar("regex", "." * rng.randint(1, 9)) if rng.random() < 0.3 else None,
            deadline_s=self.harness.now + rng.randint(1, 1000) if rng.random() < 0.7 else NEVER,
        )
        self.next_stream += 1
        return replace(spec, stream=StreamKey(rng.choice([0, 1]), spec.stream.stream_id))

    # --- what may happen

    def _options(self) -> list[tuple[tuple[Place, Happening], Callable[[], None]]]:
        """What can be done now, one choice a place and happening."""
        state = self.harness.state
        known = [*state.streams.values(), *self._ended()]
        self.random.shuffle(known)
        found: dict[tuple[Place, Happening], Callable[[], None]] = {}
        for request in known:
            place = place_of(state, request)
            for what, happen in self._happenings(request).items():
                found.setdefault((place, what), happen)
        return [
            (pair, happen)
            for pair, happen in found.items()
            if is_possible(*pair) and (pair[1] is Happening.ROW_FAILED or not self.is_tight)
        ]

    def _ended(self) -> list[Request]:
        ended = [request for request in self.requests.values() if request.status is RequestStatus.FINISHED]
        return ended[-4:]

    def _happenings(self, request: Request) -> dict[Happening, Callable[[], None]]:
        stream = request.spec.stream
        found: dict[Happening, Callable[[], None]] = {
            Happening.ABORT: lambda: self._cancel([request], Happening.ABORT),
            Happening.STOP: lambda: self._cancel([request], Happening.STOP),
            Happening.EDGE_GONE: lambda: self._cancel(self._of_edge(stream.edge) or [request], Happening.EDGE_GONE),
            Happening.PAUSE: lambda: self._pause(request),
            Happening.RESUME: lambda: self._tell(Happening.RESUME, [request], ReaderResumed(stream)),
            Happening.FLUSH: lambda: self._tell(Happening.FLUSH, self._everybody(request), CacheFlushRequested(0)),
        }
        if request.status is not RequestStatus.FINISHED:
            found[Happening.TWIN] = lambda: self._twin(request)
            if request.spec.deadline_s == min(other.spec.deadline_s for other in self.harness.state.streams.values()):
                found[Happening.DEADLINE] = lambda: self._expire(request)
        worker = self._worker_of(request)
        if worker is not None:
            found[Happening.WORKER_LOST] = lambda: self._lose(worker, request)
            found[Happening.WORKER_BACK] = lambda: self._reattach(worker, request)
        carrier = self._carrier(request)
        if carrier is not None:
            found[Happening.BAD_NUMBERS] = lambda: self._fail(carrier, request, RowFailure.NAN)
            found[Happening.ROW_FAILED] = lambda: self._fail(carrier, request, RowFailure.LIMIT)
            found[Happening.REJECTED] = lambda: self._reject(carrier, request)
        if any(wanted.stream == stream for wanted in self.harness.masks):
            found[Happening.MASK_REFUSED] = lambda: self._refuse_mask(request)
        return found

    def _cancel(self, requests: list[Request], what: Happening) -> None:
        reason = FinishReason.STOP if what is Happening.STOP else FinishReason.ABORT
        streams = [request.spec.stream for request in requests if request.status is not RequestStatus.FINISHED]
        self._tell(what, requests, *[RequestCancelled(request.spec.stream, reason) for request in requests])
        for stream in streams:
            end = self.harness.ends[stream]
            assert isinstance(end, RequestFinished)
            assert end.reason is reason
            assert end.usage.output_tokens == len(self.harness.outputs.get(stream, []))

    def _pause(self, request: Request) -> None:
        self._tell(Happening.PAUSE, [request], ReaderPaused(request.spec.stream))
        assert request.standing.is_paused or request.status is RequestStatus.FINISHED

    def _twin(self, request: Request) -> None:
        self._tell(Happening.TWIN, [request], RequestSubmitted(replace(self._spec(), stream=request.spec.stream)))
        end = self.harness.ends[request.spec.stream]
        assert isinstance(end, RequestRefused)
        assert end.error.reason == "INTERNAL_FAULT"

    def _expire(self, request: Request) -> None:
        self.harness.now = max(self.harness.now, request.spec.deadline_s)
        self._tell(Happening.DEADLINE, [request])
        end = self.harness.ends[request.spec.stream]
        assert isinstance(end, RequestFinished)
        assert end.reason is FinishReason.DEADLINE

    def _lose(self, name: str, request: Request) -> None:
        on_it = list(self.harness.state.workers[name].running.values())
        known = {one.handle: (one.attempt, one.sampled_len) for one in on_it}
        del self.harness.workers[name]
        self.harness.pending[name].clear()
        self._tell(Happening.WORKER_LOST, self._everybody(request), WorkerLost(name))
        assert all((one.attempt, one.sampled_len) == (known[one.handle][0] + 1, known[one.handle][1]) for one in on_it)

    def _reattach(self, name: str, request: Request) -> None:
        for one in self._everybody(request):
            self.noted(one, Happening.WORKER_BACK)
        self.harness.attach(name, self.info)

    def _fail(self, name: str, request: Request, failure: RowFailure) -> None:
        self.failing = request.handle, failure
        what = Happening.BAD_NUMBERS if failure is RowFailure.NAN else Happening.ROW_FAILED
        result = self.harness.execute(name)
        self.failing = None
        self._tell(what, [request], ResultReceived(name, result))

    def _reject(self, name: str, request: Request) -> None:
        self.rejecting = request.handle
        result = self.harness.execute(name)
        self.rejecting = None
        self._tell(Happening.REJECTED, [request], ResultReceived(name, result))

    def _refuse_mask(self, request: Request) -> None:
        wanted = next(wanted for wanted in self.harness.masks if wanted.stream == request.spec.stream)
        self.harness.masks.remove(wanted)
        error = InvalidRequest("no such grammar", field="regex")
        self._tell(Happening.MASK_REFUSED, [request], MaskReady(wanted.stream, len(wanted.output_ids), error))

    def _tell(self, what: Happening, whom: list[Request], *events: Event) -> None:
        for request in whom:
            self.noted(request, what)
        self.harness.step(*events)

    # --- finding one's way

    def _of_edge(self, edge: int) -> list[Request]:
        return [request for stream, request in self.harness.state.streams.items() if stream.edge == edge]

    def _everybody(self, request: Request) -> list[Request]:
        live = list(self.harness.state.streams.values())
        return live if request in live else [*live, request]

    def _worker_of(self, request: Request) -> str | None:
        workers = self.harness.state.workers
        if request.holding is not None:
            return request.holding.key.worker
        return self.random.choice(list(workers)) if workers else None

    def _carrier(self, request: Request) -> str | None:
        """The worker whose next result has a row of the request."""
        for name, plans in self.harness.pending.items():
            if plans and request.handle in plans[0].rows.handles:
                return name
        return None

    def _fails(self, plan, row: int) -> RowFailure | None:
        if self.failing is not None and plan.rows.handles[row] == self.failing[0]:
            return self.failing[1]
        return None

    def _rejects(self, plan) -> PlanRejection | None:
        if self.rejecting is None:
            return None
        return PlanRejection(reason="INVALID_PLAN", field="rows", row=None, message="refused")
