"""What the engine adds to the bare step: core, codec, executor and sampling around the same native model, turn by turn.

A turn is everything between two forwards of one process without gRPC: result into the core, next plan, both codecs,
validation, batch, forward, sampling, result. The bare step is the native model alone on equal rows. Both alternate, so
that neighbours disturb both. Asserts nothing on a loaded machine: prints figures against the goals.

    python -m pytest -m bench -s tests/bench/test_bench_engine_overhead.py
"""

import statistics
import time

import numpy as np
import pytest

from kernels.native import ThreadPool
from protos.wire.codec import decode_plan, decode_result, encode_plan, encode_result
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from protos.wire.validate import validate_plan
from scheduler_svc.core.events import (
    Instruction,
    RequestSpec,
    RequestSubmitted,
    ResultReceived,
    Sampling,
    SendPlan,
    StreamKey,
    WorkerAttached,
)
from scheduler_svc.core.scheduler import step
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state import SchedulerState
from tests.bench.bare_model import bare_model, native_library, prefilled, timed
from tests.support.model import model_folder
from worker_svc.build import build_tp_model_worker
from worker_svc.runners.executor_settings import ExecutorSettings

pytestmark = [pytest.mark.bench, pytest.mark.model, pytest.mark.timeout(1200)]

THREADS, CONTEXT = 2, 64
MOST_MS_AT_ONE_ROW, MOST_SHARE = 1.0, 0.05
TURNS = {1: 60, 16: 24, 64: 12}
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.8, top_p=0.95, top_k=40)


@pytest.fixture(scope="module")
def worker():
    settings = ExecutorSettings(numerics="fast", kernels="native", num_pages=2400, max_rows=64, threads=THREADS)
    built = build_tp_model_worker(model_folder(), settings)
    yield built
    built.close()


@pytest.fixture(scope="module")
def model():
    with ThreadPool(native_library(), threads=THREADS) as pool, bare_model(model_folder().weights, pool) as made:
        yield made


def sent(instructions: list[Instruction]) -> list[ForwardPlan]:
    return [instruction.plan for instruction in instructions if isinstance(instruction, SendPlan)]


class Engine:
    """Core and executor in one thread, one plan at a time."""

    def __init__(self, executor, rows: int, sampling: Sampling) -> None:
        self.executor, self.info = executor, executor.worker_info()
        self.state = SchedulerState.create(CoreSettings(budget_tokens=2048))
        self.results: list[ForwardResult] = []
        step(self.state, [WorkerAttached("w0", self.info, 1, 1)], 0.0)
        rng = np.random.default_rng(0)
        specs = [
            RequestSpec(
                stream=StreamKey(0, index),
                request_id=str(index),
                prompt_ids=rng.integers(100, 40_000, CONTEXT, dtype=np.int32),
                sampling=sampling,
                max_tokens=120,
                deadline_s=1e9,
            )
            for index in range(rows)
        ]
        self.pending = sent(step(self.state, [RequestSubmitted(spec) for spec in specs], 0.0))
        while any(len(plan.rows.handles) < rows or plan.rows.extend_lens.max() > 1 for plan in self.pending):
            self.turn()
        self.results.clear()

    def turn(self) -> float:
        begin = time.perf_counter()
        plan = decode_plan(encode_plan(self.pending.pop(0)))
        validate_plan(plan, self.info)
        result = decode_result(encode_result(self.executor.execute(plan)))
        self.pending += sent(step(self.state, [ResultReceived("w0", result)], 0.0))
        self.results.append(result)
        return time.perf_counter() - begin


@pytest.mark.parametrize("rows", TURNS)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_engine_beside_the_bare_step(worker, model, capsys, sampling, rows):
    engine = Engine(worker, rows, sampling)
    sequences = prefilled(model, rows, CONTEXT, room=TURNS[rows] + 1)
    turns, bare = [], []
    for _ in range(TURNS[rows]):
        turns.append(engine.turn())
        bare.append(timed(model, [(sequence, [7]) for sequence in sequences]))
    added = [turn - alone for turn, alone in zip(turns, bare, strict=True)]
    ms = {
        name: 1e3 * statistics.median(values) for name, values in {"turn": turns, "bare": bare, "added": added}.items()
    }
    stages = {
        name: statistics.median(getattr(result.timings, f"{name}_ns") for result in engine.results) / 1e6
        for name in ("host_to_device", "forward", "sample", "device_to_host")
    }
    outside = ms["turn"] - sum(stages.values())
    goal = f"{MOST_MS_AT_ONE_ROW} ms" if rows == 1 else f"{MOST_SHARE * ms['bare']:.2f} ms (5 %)"
    with capsys.disabled():
        print(f"\n{rows} rows: turn {ms['turn']:.2f} ms, bare {ms['bare']:.2f}, added {ms['added']:.2f}, goal {goal}")
        print(
            "   ", ", ".join(f"{name} {value:.2f}" for name, value in stages.items()), f", core and codec {outside:.2f}"
        )
