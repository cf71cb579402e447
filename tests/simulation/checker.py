"""What must hold in every run, whatever the faults. A breach raises at the moment it happens.

| invariant (reference: reliability, 3.10) | where |
| --- | --- |
| I1, I4 positions without gap, nothing withdrawn | `delivered` |
| I2 no error without cause | `ended` |
| I3, I13, I22 the tokens of an undisturbed run (pages of failed rows are spoilt: a use of them shows) | `ended` |
| I5 pages add up | `check_invariants` after every step of the core |
| I6 nothing is held at rest | `at_rest` |
| I7, I23 rows write apart, domains share nothing | `planned` |
| I8, I9, I10, I11 once, in order, never of an older epoch or another incarnation | `executed`, `reset` |
| I12 late results change nothing | equal tokens, positions and books |
| I14 deadlines | `ended` |
| I15, I24 everything ends and nobody is doubted once faults stop | `at_rest` |
| I17 who has ended is in no plan | `planned` |
| I21 the same seed gives the same plans | `digest`, compared by a test |
| I25 a peer outside the protocol range is refused | `attach_refused` |

I16 (the oldest is not retracted) is held by `tests/property/test_core_simulation.py`, which has no faults that move it.
I18-I20 and I26 are of the edges and the process, not of these cores.
"""

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from protos.wire.enums import FinishReason
from protos.wire.errors import DeadlinePassed, EngineError, ProtocolMismatch, UnavailableError
from protos.wire.plan import ForwardPlan
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.events import RequestFinished, RequestRefused, RequestSpec, TokensReleased
from tests.support.core_harness import NEVER, oracle
from tests.support.stream_check import StreamCheck, require
from worker_svc.protocol.messages import AttachCall, Fence

if TYPE_CHECKING:
    from tests.simulation.workers import SimWorker

DEADLINE_SLACK_S = 0.5
LEAST_STRIKES = 3


class Caller:
    """One caller's request, over the lives of schedulers."""

    def __init__(self, spec: RequestSpec, expected: list[int]) -> None:
        self.spec = spec
        self.stream = StreamCheck(expected)
        self.end: RequestFinished | RequestRefused | DeadlinePassed | None = None
        self.is_cancelled = False
        self.bad_rows = 0
        self.strikes = 0
        self.was_alone = False


class Checker:
    """One for each run."""

    def __init__(self, info: WorkerInfo) -> None:
        self.counts: Counter[str] = Counter()
        self.callers: dict[int, Caller] = {}
        self.poison: set[int] = set()
        self._info = info
        self._fences: dict[bytes, Fence] = {}
        self._last_seq: dict[tuple[bytes, Fence], int] = {}
        self._digest = hashlib.blake2b(digest_size=8)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    # --- callers

    def asked(self, spec: RequestSpec) -> Caller:
        caller = Caller(spec, oracle(self._info, spec))
        self.callers[spec.stream.stream_id] = caller
        self.counts["requests"] += 1
        return caller

    def delivered(self, event: TokensReleased) -> None:
        caller = self.callers[event.stream.stream_id]
        require(caller.end is None, "I1 a token after the end", stream=event.stream)
        caller.stream.take(event.first_pos, event.token_ids)
        self.counts["tokens"] += len(event.token_ids)

    def ended(self, event: RequestFinished | RequestRefused, now: float) -> None:
        caller = self.callers[event.stream.stream_id]
        require(caller.end is None, "I1 two ends", stream=event.stream)
        caller.end = event
        spec = caller.spec
        require(now <= spec.deadline_s + DEADLINE_SLACK_S, "I14 deadline", stream=event.stream, now=now)
        if isinstance(event, RequestRefused):
            self._refused(caller, event)
            return
        self.counts["finished"] += 1
        if event.reason is FinishReason.DEADLINE:
            require(spec.deadline_s < NEVER, "I2 a deadline nobody set", stream=event.stream)
        elif event.reason is FinishReason.ABORT:
            require(caller.is_cancelled, "I2 an abort nobody asked for", stream=event.stream)
        else:
            caller.stream.end()

    def gave_up(self, caller: Caller) -> None:
        """The caller's deadline passed while no scheduler had its request."""
        caller.end = DeadlinePassed("nobody could be asked in time")
        self.counts["gave up"] += 1

    def _refused(self, caller: Caller, event: RequestRefused) -> None:
        reason = event.error.reason
        self.counts[f"refused {reason}"] += 1
        stream = event.stream.stream_id
        is_caused = {
            "DATA_FAULT": lambda: caller.bad_rows >= 2,
            "SUSPECTED_POISON": lambda: stream in self.poison or self._is_bad_luck(caller),
            "QUEUE_FULL": lambda: caller.spec.deadline_s < NEVER,
        }.get(reason, lambda: False)
        require(is_caused(), "I2 an error without cause", reason=reason, message=event.error.message)

    def _is_bad_luck(self, caller: Caller) -> bool:
        """Three workers died of something else, of which a request that poisons nobody had one alone: counted."""
        self.counts["suspected without guilt"] += 1
        return caller.was_alone and caller.strikes >= LEAST_STRIKES

    def died_with(self, epoch: int, handles: set[int]) -> None:
        """A worker is lost that had rows of those requests."""
        for handle in handles:
            stream = self.stream_of.get((epoch, handle))
            if stream is not None:
                caller = self.callers[stream]
                caller.strikes += 1
                caller.was_alone |= len(handles) == 1

    # --- plans

    def planned(self, worker: str, plan: ForwardPlan, live: dict[int, RequestSpec]) -> None:
        """A scheduler sends a plan; `live` are its requests by handle."""
        rows = plan.rows
        self._digest.update(f"{worker} {plan.identity.seq}".encode() + rows.handles.tobytes() + rows.seq_lens.tobytes())
        handles = rows.handles.tolist()
        require(set(handles) <= live.keys(), "I17 a plan with a request that ended", handles=handles)
        self.counts["plans"] += 1
        domains = [live[handle].isolation_domain for handle in handles]
        for table, pool in zip(plan.page_tables, self._info.sub_pools, strict=True):
            owner: dict[int, bytes] = {}
            written: set[int] = set()
            for row in range(len(handles)):
                pages = table.indices[table.indptr[row] : table.indptr[row + 1]].tolist()
                for page in pages:
                    require(owner.setdefault(page, domains[row]) == domains[row], "I23 domains share", page=page)
                first = int(rows.first_positions[row]) // pool.page_size
                last = (int(rows.seq_lens[row]) - 1) // pool.page_size
                mine = set(pages[first : last + 1])
                require(not mine & written, "I7 two rows write one page", pages=mine & written)
                written |= mine

    def apart(self, plan: ForwardPlan, struck: set[int], *, in_flight: int) -> None:
        """A plan went out; `struck` are the handles whose workers died, `in_flight` counts this plan."""
        handles = set(plan.rows.handles.tolist())
        if handles & struck:
            self.counts["struck plans"] += 1
            require(len(handles) == 1, "I2 a struck request in company", handles=handles)
            require(in_flight == 1, "I2 a struck request beside others", handles=handles, in_flight=in_flight)

    def executed(self, worker: "SimWorker", plan: ForwardPlan) -> None:
        """A worker's device begins a plan."""
        identity = plan.identity
        fence = Fence(identity.epoch, identity.term)
        own = worker.info.incarnation
        require(identity.incarnation == own, "I11 a plan for another life", worker=worker.name)
        require(
            fence == self._fences.get(own), "I10 a plan of another pair", fence=fence, highest=self._fences.get(own)
        )
        last = self._last_seq.get((own, fence), 0)
        require(identity.seq == last + 1, "I8 I9 once and in order", seq=identity.seq, last=last)
        self._last_seq[own, fence] = identity.seq
        self.counts["executed"] += 1

    def reset(self, worker: "SimWorker", fence: Fence) -> None:
        """A worker's device forgets what came before that pair."""
        before = self._fences.get(worker.info.incarnation, Fence(0, 0))
        require(fence > before, "I10 a pair that is not above", fence=fence, before=before)
        self._fences[worker.info.incarnation] = fence

    def attach_asked(self, worker: "SimWorker", asked: AttachCall) -> None:
        self.counts["attaches"] += 1

    def attach_refused(self, answer: WorkerInfo | EngineError) -> None:
        """What a scheduler of another protocol was told."""
        require(isinstance(answer, ProtocolMismatch | UnavailableError), "I25 a protocol of its own", answer=answer)
        self.counts["strangers refused"] += 1

    def bad_row(self, plan: ForwardPlan, row: int) -> None:
        """The device spoils a row."""
        self.counts["bad rows"] += 1
        self.spoilt((plan.identity.epoch, int(np.uint64(plan.rows.handles[row]))))

    def spoilt(self, key: tuple[int, int]) -> None:
        """By epoch and handle; streams are told by the scheduler that knows both."""
        self.counts["spoilt"] += 1
        stream = self.stream_of.get(key)
        if stream is not None:
            self.callers[stream].bad_rows += 1

    stream_of: dict[tuple[int, int], int]
    """Stream ids by (epoch, handle)."""

    def at_rest(self) -> None:
        """Faults have stopped long ago."""
        open_ones = [stream for stream, caller in self.callers.items() if caller.end is None]
        require(not open_ones, "I15 I24 requests without an end", streams=open_ones[:10])
