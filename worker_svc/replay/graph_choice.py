"""Which graphs a replay uses: none, or those that are captured here, chosen anew for every forward as a scheduler does.

A recording names the graphs of another worker at another moment; here each forward takes the bucket that fits.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from protos.wire.buckets import choose_bucket
from protos.wire.enums import Feature
from protos.wire.errors import UnsupportedFeature
from protos.wire.plan import Forward, ForwardPlan, GraphChoice
from protos.wire.worker_info import Buckets
from worker_svc.executor import CapturingExecutor, Executor

_LOOK_S = 0.02
"""Between two looks at what is prepared elsewhere."""


def capture_all(executor: Executor, *, progress: Callable[[int], None]) -> tuple[Buckets, ...]:
    """Capture everything before anything runs; which buckets are live then.

    Raises:
        UnsupportedFeature: the executor captures nothing.
    """
    captures = executor.captures if isinstance(executor, CapturingExecutor) else None
    if captures is None:
        raise UnsupportedFeature("runner graph: the recorded device captures no graphs", field="runner")
    while not captures.progress.is_done:
        if captures.next_ms(is_idle=True) is None:
            time.sleep(_LOOK_S)
            continue
        captures.capture_next(_go_on, is_idle=True)
        progress(sum(totals.captured for totals in captures.progress.totals.values()))
    return captures.progress.buckets


def with_graphs(plan: ForwardPlan, buckets: Sequence[Buckets]) -> ForwardPlan:
    """`plan` on the graphs of `buckets`; without any, each forward runs eagerly."""
    lengths = plan.rows.extend_lens
    forwards = tuple(_chosen(forward, lengths, buckets) for forward in plan.forwards)
    needed = {int(Feature.GRAPHS)} if any(isinstance(forward.graph, GraphChoice) for forward in forwards) else set()
    features = sorted(set(plan.identity.required_features) - {int(Feature.GRAPHS)} | needed)
    return replace(plan, forwards=forwards, identity=replace(plan.identity, required_features=tuple(features)))


def _chosen(forward: Forward, lengths: np.ndarray, buckets: Sequence[Buckets]) -> Forward:
    found = lengths[forward.row_begin : forward.row_end]
    num_tokens = int(found.sum(dtype=np.int64))
    graph = choose_bucket(buckets, mode=forward.mode, num_rows=len(found), num_tokens=num_tokens)
    return replace(forward, graph=graph)


def _go_on(piece_ms: float) -> None:
    """Nothing else waits for the device."""
