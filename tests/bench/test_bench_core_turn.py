"""One full turn of the core with running decode rows: consume a result, schedule, build and encode the next plan.

Full encoding, without gRPC and edges. CPU time of this thread, since the machine may be loaded.

    python -m pytest -m bench -s tests/bench/test_bench_core_turn.py
"""

import importlib
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from protos.wire.codec import encode_plan
from protos.wire.enums import RowStatus
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardOutcome, ForwardResult, ResultColumns
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
from tests.support.plans import full_sub_pool, make_info, make_limits

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]
TURNS, WARM_UP = 96, 16
MOST_MS = {256: 3.0, 1024: 12.0}
MOST_US_PER_ROW_AND_1K = 1.0
ROWS, CONTEXTS = (16, 64, 128, 256), (1024, 4096, 8192)
MOST_BEND = 1.5
"""Linear in rows: twice the rows take at most so many times twice the time."""
BUILD = Path(__file__).resolve().parents[2] / "build"


def answer(plan: ForwardPlan) -> ForwardResult:
    """Every row that samples gets a token."""
    rows = plan.rows
    statuses = np.where(rows.samples, RowStatus.TOKEN, RowStatus.NONE).astype(np.uint8)
    columns = ResultColumns(
        handles=rows.handles,
        attempts=rows.attempts,
        positions=rows.seq_lens - 1,
        statuses=statuses,
        token_ids=(rows.seq_lens * 7 % 1000).astype(np.int32),
    )
    outcomes = tuple(
        ForwardOutcome(
            mode=forward.mode, graph=forward.graph, real_tokens=len(plan.tokens.ids), padded_tokens=0, forward_ns=1
        )
        for forward in plan.forwards
    )
    return ForwardResult(identity=plan.identity, rows=columns, forwards=outcomes)


def sent(instructions: list[Instruction]) -> list[ForwardPlan]:
    return [instruction.plan for instruction in instructions if isinstance(instruction, SendPlan)]


class Core:
    """A core with `rows` requests that decode at `context` tokens, two plans in flight."""

    def __init__(self, rows: int, context: int) -> None:
        pages = rows * (context // 16 + 16) + 64
        limits = make_limits(max_rows=rows, max_tokens=65536, context_tokens=1 << 20)
        self.state = SchedulerState.create(
            CoreSettings(budget_tokens=60_000, max_waiting_requests=4096, max_waiting_tokens=1 << 30)
        )
        info = replace(make_info(sub_pools=(full_sub_pool(num_pages=pages),)), limits=limits)
        step(self.state, [WorkerAttached("w0", info, 1, 1)], 0.0)
        rng = np.random.default_rng(0)
        specs = [
            RequestSpec(
                stream=StreamKey(0, index),
                request_id=str(index),
                prompt_ids=rng.integers(0, 1000, context, dtype=np.int32),
                sampling=Sampling(),
                max_tokens=TURNS + WARM_UP + 200,
                deadline_s=1e9,
            )
            for index in range(rows)
        ]
        self.pending = sent(step(self.state, [RequestSubmitted(spec) for spec in specs], 0.0))
        while any(len(plan.rows.handles) < rows or plan.rows.extend_lens.max() > 1 for plan in self.pending):
            self.turn()

    def turn(self) -> int:
        result = answer(self.pending.pop(0))
        began = time.thread_time_ns()
        plans = sent(step(self.state, [ResultReceived("w0", result)], 0.0))
        for plan in plans:
            encode_plan(plan)
        took = time.thread_time_ns() - began
        self.pending.extend(plans)
        return took


def median_ms(rows: int, context: int) -> float:
    core = Core(rows, context)
    times = [core.turn() for _ in range(WARM_UP + TURNS)][WARM_UP:]
    assert len(core.state.workers["w0"].running) == rows
    return statistics.median(times) / 1e6


@pytest.mark.parametrize("rows", MOST_MS)
def test_one_turn_at_1024_tokens_a_row(rows: int) -> None:
    took = median_ms(rows, 1024)
    print(f"\n{rows} rows at 1,024 tokens: {took:.2f} ms of CPU a turn (most {MOST_MS[rows]})")
    assert took <= MOST_MS[rows]


def test_the_curve_over_rows_and_context() -> None:
    curve = {
        (rows, context): took for context in CONTEXTS for rows, took in zip(ROWS, side_by_side(context), strict=True)
    }
    print("\nrows  context  ms/turn  µs/row")
    for (rows, context), took in curve.items():
        print(f"{rows:4}  {context:7}  {took:7.2f}  {took / rows * 1e3:6.1f}")
    for context in CONTEXTS:
        slope, _ = np.polyfit(ROWS, [curve[rows, context] for rows in ROWS], 1)
        print(f"{context} tokens a row: {slope * 1e3:.1f} µs a row more")
        largest = curve[ROWS[-1], context]
        assert largest <= MOST_BEND * ROWS[-1] / ROWS[-2] * curve[ROWS[-2], context]
    draw(curve)


def side_by_side(context: int) -> list[float]:
    """Milliseconds a turn for each number of rows, turn by turn, since the machine's load changes."""
    cores = [Core(rows, context) for rows in ROWS]
    times = [[core.turn() for core in cores] for _ in range(WARM_UP + TURNS)][WARM_UP:]
    return [statistics.median(column) / 1e6 for column in zip(*times, strict=True)]


def draw(curve: dict[tuple[int, int], float]) -> None:
    """As a picture, where matplotlib is installed."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    figure = figures.Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for context in CONTEXTS:
        axes.plot(ROWS, [curve[rows, context] for rows in ROWS], marker="o", label=f"{context} tokens a row")
    axes.set(xlabel="running decode rows", ylabel="ms of CPU a turn", xlim=0, ylim=0)
    axes.set_title("One turn of the core: result, schedule, plan, encoding")
    axes.grid(alpha=0.3)
    axes.legend()
    BUILD.mkdir(exist_ok=True)
    figure.savefig(BUILD / "bench_core_turn.png", dpi=120)
    print(f"drawn: {BUILD / 'bench_core_turn.png'}")


def test_the_cost_of_longer_contexts() -> None:
    """Turn by turn side by side, since the machine's load changes."""
    cores = [Core(256, context) for context in (1024, 8192)]
    times = [[core.turn() for core in cores] for _ in range(WARM_UP + TURNS)][WARM_UP:]
    short, long = (statistics.median(column) for column in zip(*times, strict=True))
    per_1k = (long - short) / 256 / 7 / 1e3
    print(f"\n{per_1k:.2f} µs per row and 1,024 tokens more")
    assert per_1k <= MOST_US_PER_ROW_AND_1K
