"""SmolLM2's forward by graph back-end beside eager, alternating in one run: decode at batch 1, prompts of some lengths.

Plain torch, one thread, the whole forward: static buffers, attention's plan, layers, logits of the rows that want them.
Prints figures, asserts none: replay ÷ eager of medians ("best" compares the fastest steps, which neighbours disturb
least), and what preparing one bucket took.
"""

import statistics
import time

import pytest
import torch

from protos.wire.enums import GraphPhase
from tests.support.graph_bench import GraphBench
from tests.support.model import model_folder
from worker_svc.batch.sink_batch import sink_batch
from worker_svc.graph_backends.compiled import why_not_compiled

pytestmark = [pytest.mark.bench, pytest.mark.model, pytest.mark.timeout(3600)]

CONTEXT = 64
CASES = (("decode", 1, 1), ("decode", 4, 1), ("prefill", 1, 16), ("prefill", 1, 64), ("prefill", 4, 16))
"""Phase, rows, tokens of each row."""
BACKENDS = ("full", "breakable", "compiled")
ROUNDS, STEPS = 6, 8


@pytest.fixture(scope="module")
def benches():
    torch.set_num_threads(1)
    names = [name for name in BACKENDS if name != "compiled" or why_not_compiled() is None]
    decode = sorted({rows for phase, rows, _ in CASES if phase == "decode"})
    prefill = sorted({rows * tokens for phase, rows, tokens in CASES if phase == "prefill"})
    folder = model_folder()
    return {
        name: GraphBench(folder, backends=(name, name), decode=decode, prefill=prefill, numerics="fast")
        for name in names
    }


def prepared_s(bench: GraphBench, phase: GraphPhase, bucket: int) -> float:
    """Seconds until the bucket can be replayed: preparation and capture."""
    runner = bench.decode if phase is GraphPhase.DECODE else bench.prefill
    example = sink_batch(runner.shapes.mode, num_sub_pools=1, device=torch.device("cpu"))
    begin = time.perf_counter()
    work = runner.preparation(bucket, example=example)
    if work is not None:
        work()
    bench.capture_one(runner, bucket)
    return time.perf_counter() - begin


def steps_of(bench: GraphBench, rows: int, tokens: int, bucket: int):
    """(replay, eager) of one batch; both write the same slots with the same values."""
    made = [bench.driver.row([7 + 13 * row + place for place in range(CONTEXT + tokens)]) for row in range(rows)]
    bench.driver.step(made, [CONTEXT] * rows)
    batch = bench.batch(made, [tokens] * rows, bucket=bucket)
    return (lambda: bench.replay(batch)), (lambda: bench.eager(batch))


def timed_ms(step) -> list[float]:
    found = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        step()
        found.append(1e3 * (time.perf_counter() - begin))
    return found


@pytest.mark.parametrize(("phase", "rows", "tokens"), CASES)
def test_replay_beside_eager(benches, capsys, phase, rows, tokens):
    bucket = rows if phase == "decode" else rows * tokens
    seconds = {name: prepared_s(bench, GraphPhase[phase.upper()], bucket) for name, bench in benches.items()}
    steps = {name: steps_of(bench, rows, tokens, bucket) for name, bench in benches.items()}
    times: dict[str, list[float]] = {"eager": [], **{name: [] for name in benches}}
    for _ in range(ROUNDS):
        for name, (replay, eager) in steps.items():
            times[name] += timed_ms(replay)
            times["eager"] += timed_ms(eager)[: STEPS // len(steps) + 1]
    with capsys.disabled():
        print(f"\n{phase}, {rows} x {tokens} tokens behind {CONTEXT}: milliseconds of a forward")
        print(f"{'':12}{'median':>10}{'best':>10}{'÷ eager':>10}{'best ÷':>10}{'prepared':>12}")
        base = statistics.median(times["eager"]), min(times["eager"])
        for name, found in times.items():
            median, best = statistics.median(found), min(found)
            ready = f"{seconds[name]:.2f} s" if name in seconds else ""
            print(f"{name:12}{median:10.2f}{best:10.2f}{median / base[0]:10.2f}{best / base[1]:10.2f}{ready:>12}")
    for name, (replay, eager) in steps.items():
        torch.testing.assert_close(replay().logits, eager().logits, rtol=0, atol=0.05, msg=name)
