"""What a worker reports as its capacity can be held at once: every page written, and every token of it read back."""

import numpy as np
import pytest

from protos.wire.enums import GraphPhase
from protos.wire.errors import InvalidRequest
from scheduler_svc.core.settings import CoreSettings
from tests.support.core_harness import make_spec
from tests.support.executor_core import ExecutorCore
from tests.support.model import model_folder
from tests.support.plan_driver import PlanDriver, Request
from tests.support.tiny_llama import Shape, tiny_folder
from worker_svc.build import build_tp_model_worker
from worker_svc.device import graph_memory
from worker_svc.device.memory import free_host_bytes
from worker_svc.runners import pool_sizes
from worker_svc.runners.executor_settings import ExecutorSettings
from worker_svc.runners.graph_memory_need import fingerprint_of
from worker_svc.runners.graph_settings import GraphSettings

PAGE = 16


@pytest.fixture
def free(monkeypatch):
    """Says how much memory there is, before and after the weights."""

    def say(before, after):
        readings, held = iter((before, after)), iter((0, before - after))
        monkeypatch.setattr(pool_sizes, "free_bytes", lambda device: next(readings))
        monkeypatch.setattr(pool_sizes, "own_bytes", lambda device: next(held))

    return say


def fill(worker, *, context, vocab):
    """Prefill so many requests that not one page is left, then let all of them read what they hold in one plan."""
    (pool,) = worker.worker_info().sub_pools
    left = pool.num_pages - 1
    sizes = []
    while left:
        sizes.append(min(left, context // PAGE) * PAGE)
        left -= sizes[-1] // PAGE
    draw = np.random.default_rng(1)
    requests = [Request(prompt_ids=draw.integers(0, vocab, size - 1).tolist(), max_new=1) for size in sizes]
    driver = PlanDriver(worker, budget_tokens=2000)
    for handle, request in enumerate(requests, start=1):
        request.handle = handle
    while not all(request.is_done for request in requests):
        driver._step([request for request in requests if not request.is_done])
    assert driver._free_pages == []
    for request in requests:
        request.max_new = 2
    driver._step(requests)
    assert [request.kv_len for request in requests] == sizes
    return requests, sum(sizes)


def test_a_torch_workers_default_capacity_can_be_held_at_once(tmp_path, free):
    free(60_000_000, 40_000_000)
    settings = ExecutorSettings(kernels="torch", max_rows=64, threads=1, kv_canary="refuse")
    worker = build_tp_model_worker(tiny_folder(tmp_path), settings)
    (pool,) = worker.worker_info().sub_pools
    assert pool.num_pages == 10_000_000 // (pool.bytes_per_page + 16 * PAGE + 32), "a quarter of what the weights left"
    requests, held = fill(worker, context=512, vocab=250)
    assert held == (pool.num_pages - 1) * PAGE
    alone = Request(prompt_ids=requests[-2].prompt_ids, max_new=2)
    PlanDriver(worker).run(alone)
    assert alone.token_ids == requests[-2].token_ids


@pytest.mark.model
def test_a_native_workers_default_capacity_can_be_held_at_once(free):
    free(400_000_000, 80_000_000)
    worker = build_tp_model_worker(model_folder(), ExecutorSettings(kernels="native", max_rows=16, threads=2))
    try:
        (pool,) = worker.worker_info().sub_pools
        assert pool.num_pages == 20_000_000 // pool.bytes_per_page
        requests, held = fill(worker, context=320, vocab=40_000)
        assert held == (pool.num_pages - 1) * PAGE
        assert all(request.failure is None and len(request.token_ids) == 2 for request in requests)
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("lengths", "count", "budget_tokens", "sub_pool"),
    [((100, 300), 4, 16, 0), ((20, 12), 20, 128, 1)],
    ids=["the full sub-pool", "the window sub-pool"],
)
def test_both_sub_pools_of_a_hybrid_worker_can_be_held_to_the_last_page(
    tmp_path, lengths, count, budget_tokens, sub_pool
):
    """Long rows use up the full sub-pool, short ones the smaller one of the windows; what finds no page waits."""
    shape = Shape(architecture="gemma3", window=32, full_every=2, num_layers=2)
    settings = ExecutorSettings(kernels="torch", threads=1, num_pages=42, max_rows=32, kv_canary="refuse")
    worker = build_tp_model_worker(tiny_folder(tmp_path, shape), settings)
    assert [pool.num_pages - 1 for pool in worker.worker_info().sub_pools] == [41, 32]
    core = ExecutorCore(worker, CoreSettings(budget_tokens=budget_tokens))
    draw = np.random.default_rng(3)
    specs = [
        make_spec(stream, prompt=draw.integers(0, 250, lengths[0]).tolist(), max_tokens=lengths[1])
        for stream in range(1, count + 1)
    ]
    free_pages = []
    core.watch = lambda: free_pages.append(core.memory.available()[sub_pool])
    core.submit(*specs)
    core.run()
    assert min(free_pages) == 0
    together = [core.output(spec.stream.stream_id) for spec in specs]
    for spec, output in zip(specs, together, strict=True):
        alone = ExecutorCore(worker)
        alone.submit(spec)
        alone.run()
        assert alone.output(spec.stream.stream_id) == output


def test_without_a_setting_the_pool_is_within_a_quarter_of_what_this_machine_has(tmp_path):
    before = free_host_bytes()
    worker = build_tp_model_worker(tiny_folder(tmp_path), ExecutorSettings(kernels="torch", threads=1))
    (pool,) = worker.worker_info().sub_pools
    assert pool.num_pages * pool.bytes_per_page <= before / 4
    assert pool.num_pages == 1 + 256 * 512 // PAGE, "all rows at full context: more would be of no use"


def test_a_fraction_and_the_graphs_of_the_last_start_size_the_pool(tmp_path, free):
    folder = tiny_folder(tmp_path)
    file = tmp_path / "graphs.json"
    graphs_on = GraphSettings(graph="all", graph_memory_file=str(file))
    settings = ExecutorSettings(kernels="torch", max_rows=64, threads=1, memory_fraction=0.5, graphs=graphs_on)
    store = graph_memory.GraphMemoryStore(file)
    fingerprint = fingerprint_of(settings, weights=folder.card.weights_fingerprint)
    pages = []
    for graphs in ({GraphPhase.DECODE: 1_000_000}, {GraphPhase.DECODE: 1_000_000, GraphPhase.PREFILL: 500_000}):
        store.write(fingerprint, graphs)
        free(20_000_000, 15_000_000)
        (pool,) = build_tp_model_worker(folder, settings).worker_info().sub_pools
        pages.append(pool.num_pages)
    assert pages == [4_000_000 // pool.bytes_per_page, 3_500_000 // pool.bytes_per_page]


def test_a_start_that_cannot_have_its_pools_names_the_smallest_setting(tmp_path, free):
    free(20_000_000, 5_000_000)
    with pytest.raises(InvalidRequest, match=r"memory_fraction is 0\.5, the smallest that works is 0\.751"):
        build_tp_model_worker(tiny_folder(tmp_path), ExecutorSettings(kernels="torch", threads=1, memory_fraction=0.5))


def test_no_more_rows_are_offered_than_two_tokens_each(tmp_path):
    settings = ExecutorSettings(kernels="torch", threads=1, num_pages=4)
    assert build_tp_model_worker(tiny_folder(tmp_path), settings).worker_info().limits.max_rows == 3 * PAGE // 2
