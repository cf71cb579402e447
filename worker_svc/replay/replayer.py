"""Runs the plans of one worker in a recording on an executor, in order, and compares each result.

Knows nothing of devices. Guards: a plan runs only after everything recorded before it, on pages that hold what they
held then.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from protos.service.plan_recording import Entry, EntryKind
from protos.service.recording_payloads import LivePages, decode_attachment, decode_pages
from protos.wire.codec import decode_plan, decode_result
from protos.wire.errors import DataFault, EngineError, InvalidRequest
from protos.wire.plan import ForwardPlan, GraphChoice
from protos.wire.result import ForwardResult
from protos.wire.validate import validate_plan
from protos.wire.worker_info import WorkerInfo
from worker_svc.executor import Executor
from worker_svc.replay.comparison import Difference, first_difference
from worker_svc.replay.literal_plans import KnownTokens, as_own, known_tokens, with_literals
from worker_svc.replay.pool_rebuild import rebuild_plans


@dataclass(slots=True, kw_only=True)
class ReplayCounts:
    """What happened so far."""

    plans: int = 0
    rows: int = 0
    tokens: int = 0
    rebuilt_pages: int = 0
    rejected: int = 0
    """Plans that the worker had refused; not run."""
    unanswered: int = 0
    """Plans without a result in the file; not run."""
    differing: int = 0
    """Plans with a difference."""
    replays: int = 0
    """Forwards that replayed a captured graph."""
    misses: dict[str, int] = field(default_factory=dict)
    """Why the others ran eagerly."""
    forward_ns: int = 0
    recorded_forward_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRules:
    """What is done with results."""

    worker: str
    compares: bool
    logprob_tolerance: float
    on_graphs: Callable[[ForwardPlan], ForwardPlan]
    """Names the graphs that a plan's forwards replay here, see `graph_choice.with_graphs`."""


class Replayer:
    """One run over one file."""

    def __init__(self, executor: Executor, rules: ReplayRules) -> None:
        self.counts = ReplayCounts()
        self.first: Difference | None = None
        """None: no difference so far."""
        self.cut: str | None = None
        """Where the recording ends without its end; None: it has one, or is not read so far."""
        self._executor = executor
        self._rules = rules
        self._pending: dict[int, ForwardPlan] = {}
        self._known: KnownTokens = {}
        """What plans sampled that were answered before this file."""

    def run(self, entries: Iterator[Entry]) -> Iterator[None]:
        """Take every entry; yields after each plan.

        Raises:
            DataFault: the recording is damaged or incomplete.
            EngineError: the executor cannot run a plan.
        """
        for entry in entries:
            if entry.kind is EntryKind.DROPPED:
                message = f"the recording is incomplete: entries are missing after {self.counts.plans} plans"
                raise DataFault(message, field="recording")
            if entry.kind is EntryKind.CUT:
                self.cut = entry.payload.decode()
            if entry.worker != self._rules.worker:
                continue
            match entry.kind:
                case EntryKind.ATTACH:
                    self._attach(decode_attachment(entry.payload).info)
                case EntryKind.PAGES:
                    self._rebuild(decode_pages(entry.payload))
                case EntryKind.PLAN:
                    plan = decode_plan(entry.payload)
                    self._pending[plan.identity.seq] = plan
                case EntryKind.RESULT:
                    self._answered(decode_result(entry.payload))
                    yield
        self.counts.unanswered += len(self._pending)

    def _attach(self, recorded: WorkerInfo) -> None:
        """A new term: nothing of the one before counts."""
        _check_geometry(recorded, self._executor.worker_info())
        self._executor.reset()
        self.counts.unanswered += len(self._pending)
        self._pending.clear()
        self._known = {}

    def _rebuild(self, live: LivePages) -> None:
        for plan in rebuild_plans(live, self._executor.worker_info()):
            self._execute(plan)
        self._executor.reset()
        self.counts.rebuilt_pages += len(live.pages)
        self._known = known_tokens(live.recent)

    def _answered(self, recorded: ForwardResult) -> None:
        plan = self._pending.pop(recorded.identity.seq, None)
        if plan is None:
            message = f"the recording holds a result of plan {recorded.identity.seq}, and not the plan"
            raise DataFault(message, field="recording")
        if recorded.rejection is not None:
            self.counts.rejected += 1
            return
        ring_plans = self._executor.worker_info().limits.ring_plans
        plan = self._rules.on_graphs(plan)
        got = self._execute(with_literals(plan, self._known, oldest_seq=plan.identity.seq - ring_plans))
        self._count(plan, recorded, got)
        if not self._rules.compares:
            return
        found = first_difference(recorded, got, logprob_tolerance=self._rules.logprob_tolerance)
        if found is not None:
            self.counts.differing += 1
            self.first = self.first or found

    def _execute(self, plan: ForwardPlan) -> ForwardResult:
        """Run one plan as this executor's own.

        Raises:
            EngineError: names the plan.
        """
        info = self._executor.worker_info()
        plan = as_own(plan, info)
        try:
            validate_plan(plan, info)
            return self._executor.execute(plan)
        except EngineError as error:
            error.plan_seq = plan.identity.seq
            raise

    def _count(self, plan: ForwardPlan, recorded: ForwardResult, got: ForwardResult) -> None:
        counts = self.counts
        counts.plans += 1
        counts.rows += plan.rows.num_rows
        counts.tokens += int(plan.rows.extend_lens.sum(dtype=np.int64))
        for outcome in got.forwards:
            if isinstance(outcome.graph, GraphChoice):
                counts.replays += 1
            else:
                reason = outcome.graph.name.lower()
                counts.misses[reason] = counts.misses.get(reason, 0) + 1
        counts.forward_ns += got.timings.forward_ns
        counts.recorded_forward_ns += recorded.timings.forward_ns


def _check_geometry(recorded: WorkerInfo, here: WorkerInfo) -> None:
    pools = [(pool.kind, pool.page_size) for pool in recorded.sub_pools]
    own = [(pool.kind, pool.page_size) for pool in here.sub_pools]
    if pools != own or recorded.logits_width != here.logits_width:
        raise InvalidRequest("the recorded worker has other pools or another vocabulary than this one", field="model")
