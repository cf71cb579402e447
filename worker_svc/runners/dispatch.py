"""Which runner takes a forward: the first, in a fixed order, that does not refuse.

Knows nothing of what runners do. Guards: a forward that was not replayed carries a reason, the plan's own or that of
the runner that refused the plan's bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from protos.wire.enums import GraphRefusal
from protos.wire.plan import GraphChoice
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.runners.base import ForwardRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """A runner, and what to report of graphs."""

    runner: ForwardRunner
    graph: GraphChoice | GraphRefusal


class RunnerDispatch:
    """An ordered tuple of runners; the last one never refuses."""

    def __init__(self, runners: Sequence[ForwardRunner]) -> None:
        self._runners = tuple(runners)

    def choose(self, batch: ForwardBatch) -> Dispatched:
        """The runner of `batch`. Runs nothing."""
        reason = batch.graph if isinstance(batch.graph, GraphRefusal) else None
        for runner in self._runners:
            refusal = runner.refusal(batch)
            if refusal is None:
                replayed = batch.graph if runner.replays_graphs else None
                return Dispatched(runner=runner, graph=replayed or reason or GraphRefusal.DISABLED)
            # That a bucket is of the other phase is the weakest reason: the runner of its own phase knows more.
            if reason is None or (reason is GraphRefusal.MODE and reason is not batch.graph):
                reason = refusal
        raise AssertionError("the last runner refused a batch")
