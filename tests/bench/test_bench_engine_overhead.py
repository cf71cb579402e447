"""What the engine adds to the bare step: core, codec, executor and sampling around the same native model, turn by turn.

A turn is everything between two forwards of one process without gRPC: result into the core, next plan, both codecs,
validation, batch, forward, sampling, result. The bare step is the native model alone on equal rows. Both alternate, so
that neighbours disturb both. Asserts nothing on a loaded machine: prints figures against the goals.

    python -m pytest -m bench -s tests/bench/test_bench_engine_overhead.py
"""

import statistics

import numpy as np
import pytest

from kernels.native import ThreadPool
from scheduler_svc.core.events import Sampling
from tests.bench.bare_model import bare_model, native_library, prefilled, timed
from tests.bench.engine import GREEDY, Engine, native_worker
from tests.support.model import model_folder

pytestmark = [pytest.mark.bench, pytest.mark.model, pytest.mark.timeout(1200)]

THREADS, CONTEXT = 2, 64
MOST_MS_AT_ONE_ROW, MOST_SHARE = 1.0, 0.05
TURNS = {1: 60, 16: 24, 64: 12}
SAMPLED = Sampling(temperature=0.8, top_p=0.95, top_k=40)


@pytest.fixture(scope="module")
def worker():
    with native_worker(model_folder(), threads=THREADS) as built:
        yield built


@pytest.fixture(scope="module")
def model():
    with ThreadPool(native_library(), threads=THREADS) as pool, bare_model(model_folder().weights, pool) as made:
        yield made


@pytest.mark.parametrize("rows", TURNS)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_engine_beside_the_bare_step(worker, model, capsys, sampling, rows):
    prompts = np.random.default_rng(0).integers(100, 40_000, (rows, CONTEXT))
    engine = Engine(worker, prompts, max_tokens=120, sampling=sampling)
    engine.fill()
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
