"""Which runner takes a forward: the first, in a fixed order, that does not refuse.

Knows nothing of what runners do. Guards: a forward that was not replayed carries a reason, the plan's own or that of
the runner that refused the plan's bucket.
"""

from collections.abc import Callable, Sequence
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


OnMiss = Callable[[ForwardBatch, GraphRefusal], None]
"""Hears of each batch that runs eagerly, and why."""


def ignore_miss(batch: ForwardBatch, reason: GraphRefusal) -> None:
    """Nobody wants to know."""


class RunnerDispatch:
    """An ordered tuple of runners; the last one never refuses."""

    def __init__(self, runners: Sequence[ForwardRunner], *, on_miss: OnMiss = ignore_miss) -> None:
        self._runners = tuple(runners)
        self._on_miss = on_miss

    def choose(self, batch: ForwardBatch) -> Dispatched:
        """The runner of `batch`. Runs nothing."""
        reason = batch.graph if isinstance(batch.graph, GraphRefusal) else None
        for runner in self._runners:
            refusal = runner.refusal(batch)
            if refusal is None:
                return self._chosen(runner, batch, reason or GraphRefusal.DISABLED)
            # That a bucket is of the other phase is the weakest reason: the runner of its own phase knows more.
            if reason is None or (reason is GraphRefusal.MODE and reason is not batch.graph):
                reason = refusal
        raise AssertionError("the last runner refused a batch")

    def _chosen(self, runner: ForwardRunner, batch: ForwardBatch, reason: GraphRefusal) -> Dispatched:
        if runner.replays_graphs:
            return Dispatched(runner=runner, graph=batch.graph)
        self._on_miss(batch, reason)
        return Dispatched(runner=runner, graph=reason)
