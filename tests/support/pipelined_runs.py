"""The same requests in one process, and over everything but sockets at window 1 and 2 with trouble: equal to the token.

"One process" is the core with its executor called directly, one plan at a time, pages enough, no trouble.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from protos.wire.enums import FinishReason
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.events import RequestFinished, RequestSpec, StreamKey
from scheduler_svc.core.settings import CoreSettings
from tests.support.core_harness import CoreHarness
from tests.support.core_on_executor import AroundExecutor
from tests.support.pipelined import PipelinedCore
from tests.support.rough_load import WIDTH, Trouble, drive, rough_specs
from tests.support.simulated import simulated_executor
from worker_svc.executor import Executor
from worker_svc.simulated.executor import SimulatedExecutor

PAGE, WAVE = 4, 500
"""Requests of one wave share a core, a pool and its prefix cache."""
STEPS_A_CHECK = 10


@dataclass
class RunReport:
    """What runs came to."""

    requests: int = 0
    tokens: int = 0
    """Delivered at window 2."""
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def text(self, seconds: float) -> str:
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        return (
            f"pipelined = unpipelined = one process: {self.requests} requests, {self.tokens} tokens at window 2, "
            f"{seconds:.0f} s; {len(self.wrong)} wrong; {kinds}"
        )


class OneProcess(AroundExecutor):
    """A core that calls its executor."""

    def make_worker(self, info: WorkerInfo) -> Executor:
        self._executor.reset()
        return self._executor

    def _record_plan(self, worker, plan) -> None:
        super()._record_plan(worker, plan)
        self.plans.clear()


def executor(*, num_pages: int, window: int) -> SimulatedExecutor:
    return simulated_executor(
        vocab_size=WIDTH, num_pages=num_pages, page_size=PAGE, max_rows=64, max_tokens=256, window=window
    )


def compare_runs(report: RunReport, *, seed: int, requests: int, unpipelined: int) -> None:
    """Run `requests` three ways, at window 1 only the first `unpipelined` of each wave."""
    for first in range(0, requests, WAVE):
        draw = random.Random(f"{seed} {first}")
        specs = rough_specs(draw, min(WAVE, requests - first))
        whole = _one_process(specs)
        for window, chosen in ((1, specs[:unpipelined]), (2, specs)):
            core, trouble = _in_trouble(chosen, random.Random(f"{seed} {first} {window}"), window=window)
            report.wrong += [
                f"seed {seed} wave {first} window {window}: {text}" for text in _wrong(core, whole, trouble)
            ]
            report.counts += _counted(core, trouble, window=window)
            report.tokens += (window == 2) * sum(len(output) for output in core.outputs.values())
        report.requests += len(specs)


def _one_process(specs: Sequence[RequestSpec]) -> CoreHarness:
    core = OneProcess(executor(num_pages=4000, window=1), CoreSettings(budget_tokens=256))
    core.steps_a_check = STEPS_A_CHECK
    core.attach_with(window=1)
    calm = Trouble(cancel=0.0, stop=0.0, retract=0.0, most_open=60)
    drive(core, specs, draw=random.Random(0), trouble=calm)
    core.assert_balanced()
    return core


def _in_trouble(specs: Sequence[RequestSpec], draw: random.Random, *, window: int) -> tuple[PipelinedCore, Trouble]:
    settings = CoreSettings(
        budget_tokens=draw.choice([16, 64, 128]), new_token_ratio_start=0.0, new_token_ratio_floor=0.0
    )
    core = PipelinedCore(executor(num_pages=draw.choice([28, 80, 160]), window=window), settings, draw=draw)
    core.steps_a_check = STEPS_A_CHECK
    core.attach_with(window=window)
    trouble = Trouble(cancel=draw.choice([0.01, 0.1]), stop=0.02, retract=draw.choice([0.05, 0.2]))
    drive(core, specs, draw=draw, trouble=trouble, shake=core.shake)
    core.assert_balanced()
    return core, trouble


def _wrong(core: CoreHarness, whole: CoreHarness, trouble: Trouble) -> list[str]:
    """The harness has seen to it that no position is skipped, repeated or out of order."""
    return [
        f"request {stream.stream_id}: {said}"
        for stream, end in core.ends.items()
        if (said := _difference(core, whole, stream, is_cut=stream in trouble.ended)) and end is not None
    ]


def _difference(core: CoreHarness, whole: CoreHarness, stream: StreamKey, *, is_cut: bool) -> str | None:
    end = core.ends[stream]
    got, wanted = core.outputs.get(stream, []), whole.outputs.get(stream, [])
    if not isinstance(end, RequestFinished):
        return f"ended with {end}"
    if is_cut and end.reason in (FinishReason.ABORT, FinishReason.STOP):
        wanted = wanted[: len(got)]
    elif (end.reason, end.stop_token_id) != (whole.ends[stream].reason, whole.ends[stream].stop_token_id):
        return f"ended with {end.reason.name}, not {whole.ends[stream].reason.name}"
    if got != wanted:
        place = next((index for index, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1]), -1)
        return f"token {place} differs"
    if core.logprobs.get(stream, []) != whole.logprobs.get(stream, [])[: len(got)]:
        return "log-probabilities differ"
    return None


def _counted(core: PipelinedCore, trouble: Trouble, *, window: int) -> Counter[str]:
    counters = core.state.counters
    counts = Counter(
        {
            "retracted for pages": counters.retractions,
            "late rows": counters.late_rows,
            "failed rows": counters.failed_rows,
            "cache hits": counters.cache.hit_tokens,
            "steps": core.wire.deltas + core.wire.full_plans,
            "plans as changes": core.wire.deltas,
            "plans sent again": core.wire.resent,
            "plans wanted in full": core.wire.needed_full,
        }
    )
    counts.update({f"told: {name}": count for name, count in trouble.counts.items()})
    return Counter({f"{name} (window {window})": count for name, count in counts.items()})
