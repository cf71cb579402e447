"""Gemma 3 on captured graphs in both of its sub-pools: eager steps beside, and the known ids under the real core."""

import pytest
import torch

from protos.wire.buckets import choose_bucket
from protos.wire.enums import ForwardMode, GraphPhase, GraphRefusal
from protos.wire.plan import GraphChoice
from protos.wire.worker_info import Buckets
from scheduler_svc.core.events import BucketsChanged
from scheduler_svc.core.settings import CoreSettings
from tests.support.core_harness import make_spec
from tests.support.executor_core import ExecutorCore
from tests.support.forwards import ForwardDriver
from tests.support.golden import assert_free_run, cases
from tests.support.graph_bench import GraphBench, same
from tests.support.graph_driver import capture_all
from tests.support.model import GEMMA3, model_folder
from worker_svc.build import build_tp_model_worker
from worker_svc.runners.executor_settings import ExecutorSettings
from worker_svc.runners.graph_settings import GraphSettings

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

CASES = cases("gemma3_greedy.json")
TOKENS = 8
DECODE, PREFILL, SLOTS = (1, 2, 4), (16, 32), 4
STEPS = (
    ("decode", [1] * 4),
    ("prefill", [17]),
    ("decode", [1]),
    ("decode", [1] * 2),
    ("prefill", [10, 5]),
    ("decode", [1] * 3),
    ("prefill", [1, 20, 1, 9]),
    ("decode", [1] * 4),
    ("prefill", [16]),
    ("decode", [1]),
    ("prefill", [2, 30]),
)
"""Every bucket after every other, sizes at a bucket and one to either side of it."""
BEYOND = (("prefill", [33], GraphRefusal.OVER_MAX_TOKENS), ("decode", [1] * 5, GraphRefusal.OVER_MAX_ROWS))


@pytest.fixture(scope="module")
def gemma():
    """The model, and rows in its pools: one longer than its window of 512 tokens."""
    torch.set_num_threads(2)
    driver = ForwardDriver(model_folder(GEMMA3), num_pages=128)
    assert len(driver.pools) == 2
    lengths = [540, 3, 20, 9]
    rows = [
        driver.row([100 + 37 * row + 11 * place % 5000 for place in range(length + 150)])
        for row, length in enumerate(lengths)
    ]
    driver.step(rows[:1], lengths[:1])
    driver.step(rows[1:], lengths[1:])
    return driver, rows


def chosen(phase, lens):
    """The bucket that a scheduler would name."""
    mode = ForwardMode.DECODE if phase == "decode" else ForwardMode.EXTEND
    live = (
        Buckets(phase=GraphPhase.DECODE, sizes=DECODE, live=DECODE, slots=0),
        Buckets(phase=GraphPhase.PREFILL, sizes=PREFILL, live=PREFILL, slots=SLOTS),
    )
    return choose_bucket(live, mode=mode, num_rows=len(lens), num_tokens=sum(lens))


@pytest.mark.parametrize("backends", [("full", "breakable"), ("breakable", "full")], ids="-".join)
def test_gemma_3_in_both_of_its_sub_pools_replays_what_eager_steps_give(gemma, backends):
    driver, rows = gemma
    bench = GraphBench(driver=driver, backends=backends, decode=DECODE, prefill=PREFILL, slots=SLOTS)
    bench.capture()
    used = []
    for number, (phase, lens) in enumerate(STEPS):
        choice = chosen(phase, lens)
        assert isinstance(choice, GraphChoice)
        used.append(choice.bucket)
        group = [rows[(number + index) % 4] for index in range(len(lens))]
        batch = bench.batch(group, lens, bucket=choice.bucket)
        known = bench.eager(batch)
        bench.buffers.poison(number + 1)
        assert same(bench.replay(batch), known)
        for row, length in zip(group, lens, strict=True):
            row.kv_len += length
    assert set(used) == {*DECODE, *PREFILL}
    assert all(chosen(phase, lens) is reason for phase, lens, reason in BEYOND)


@pytest.fixture(scope="module", params=[("full", "breakable"), ("breakable", "full")], ids="-".join)
def worker(request):
    graphs = GraphSettings(
        graph="all",
        decode_graph_backend=request.param[0],
        prefill_graph_backend=request.param[1],
        decode_buckets=(2, 8),
        prefill_buckets=(16, 64),
    )
    settings = ExecutorSettings(
        numerics="fast", kernels="torch", num_pages=200, max_rows=16, max_tokens=256, threads=2, graphs=graphs
    )
    worker = build_tp_model_worker(model_folder(GEMMA3), settings)
    capture_all(worker)
    yield worker
    worker.close()


def test_all_cases_replayed_give_the_known_ids(worker):
    core = ExecutorCore(worker, CoreSettings(budget_tokens=32))
    core.step(BucketsChanged(worker="w0", buckets=worker.captures.progress.buckets))
    core.submit(*[make_spec(i, prompt=case["prompt_ids"], max_tokens=TOKENS) for i, case in enumerate(CASES)])
    core.run()
    for index, case in enumerate(CASES):
        assert_free_run({name: case[name][:TOKENS] for name in ("greedy_ids", "top5_logprobs")}, core.output(index))
    chosen_graphs = [forward.graph for _, plan in core.plans for forward in plan.forwards]
    replayed = [graph for graph in chosen_graphs if isinstance(graph, GraphChoice)]
    assert len(replayed) > 0.8 * len(chosen_graphs)
    assert {graph.phase for graph in replayed} == set(GraphPhase)
    core.assert_balanced()
