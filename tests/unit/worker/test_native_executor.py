"""The worker on the native kernels: the same plans, the same promises, chosen and refused by name."""

import logging
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch

from kernels.errors import NativeUnavailable
from protos.wire.enums import RowFailure
from protos.wire.errors import UnsupportedFeature
from tests.support.golden import cases
from tests.support.model import model_folder
from tests.support.plan_driver import PlanDriver, Request
from tests.support.tiny_llama import Shape, tiny_folder
from worker_svc.build import build_tp_model_worker
from worker_svc.runners import native_weights
from worker_svc.runners.executor_settings import ExecutorSettings
from worker_svc.runners.graph_settings import GraphSettings

CASES = cases("smollm2_greedy.json")
SETTINGS = {"numerics": "fast", "num_pages": 600, "max_rows": 64, "max_tokens": 2048, "threads": 2}


@pytest.fixture(scope="module")
def worker():
    built = build_tp_model_worker(model_folder(), ExecutorSettings(kernels="native", **SETTINGS))
    yield built
    built.close()


def requests(count):
    ids = np.random.default_rng(11).integers(100, 40000, (count, 40))
    return [
        Request(
            prompt_ids=ids[index, : 5 + 2 * index].tolist(),
            max_new=6,
            temperature=0.8 * (index % 2),
            seed=index,
            top_logprobs=2,
        )
        for index in range(count)
    ]


def of_choice(caplog):
    """Lines of what chose the kernels."""
    return [record for record in caplog.records if record.name == "worker_svc.runners.device_side"]


@pytest.mark.model
def test_the_info_names_the_kernels_and_half_precision_pages(worker):
    info = worker.worker_info()
    assert info.kernels.startswith("native ")
    assert info.sub_pools[0].bytes_per_page == 30 * 2 * 3 * 64 * 16 * 2
    assert info.fingerprints.kv_layout.endswith("float16")


@pytest.mark.model
@pytest.mark.parametrize("budget", [16, 64, 512, 2048])
def test_alone_among_mates_and_in_any_chunks_a_request_has_the_same_bits(worker, budget):
    together = requests(16)
    PlanDriver(worker, budget_tokens=budget).run(*together)
    for index in (0, 7, 15):
        alone = requests(16)[index]
        PlanDriver(worker, budget_tokens=2048, page_seed=index + 1).run(alone)
        assert together[index].token_ids == alone.token_ids
        assert (together[index].logprobs, together[index].top) == (alone.logprobs, alone.top)


@pytest.mark.model
def test_greedy_rows_that_leave_no_logits_choose_as_those_that_do(worker):
    """Among rows that sample and rows that return log-probabilities, so that logits are written for some only."""
    with_logits, without = requests(12), requests(12)
    for request in without[::2]:
        request.top_logprobs = 0
    PlanDriver(worker, budget_tokens=64).run(*with_logits)
    PlanDriver(worker, budget_tokens=64).run(*without)
    assert [request.token_ids for request in without] == [request.token_ids for request in with_logits]
    for greedy in with_logits[::2]:
        assert [top[0][0] for top in greedy.top] == greedy.token_ids
    assert [request.top for request in without[1::2]] == [request.top for request in with_logits[1::2]]


@pytest.mark.model
def test_threads_that_change_from_step_to_step_change_no_token(worker):
    """Without a number of threads the worker tries counts on its way; 40 steps of one size see several tries."""
    settings = SETTINGS | {"threads": None, "num_pages": 60}
    free = build_tp_model_worker(model_folder(), ExecutorSettings(kernels="native", **settings))
    try:
        got, expected = (Request(prompt_ids=[5, 6, 7], max_new=40, temperature=0.7) for _ in range(2))
        PlanDriver(free).run(got)
        PlanDriver(worker).run(expected)
        assert got.token_ids == expected.token_ids
    finally:
        free.close()


@pytest.mark.model
def test_the_canary_changes_no_bit_and_fails_a_row_on_a_swapped_page(worker):
    """In front of the kernels as in front of torch."""
    guarded = build_tp_model_worker(model_folder(), ExecutorSettings(kernels="native", kv_canary="refuse", **SETTINGS))
    plain, mine, hit = requests(3), requests(3), requests(3)
    PlanDriver(worker).run(*plain)
    PlanDriver(guarded, budget_tokens=16).run(*mine)
    assert [request.token_ids for request in mine] == [request.token_ids for request in plain]

    def swap(plan):
        if plan.identity.seq != 4:
            return plan
        table = plan.page_tables[0]
        indices = table.indices.copy()
        # Row 2 writes to another page of its own, so that only what it reads is another's.
        indices[table.indptr[2] - 1] = 599
        written = table.written_pages.copy()
        written[1] = 599
        return replace(plan, page_tables=(replace(table, indices=indices, written_pages=written),))

    driver = PlanDriver(guarded)
    driver.change = swap
    driver.run(*hit)
    guarded.close()
    assert [request.failure for request in hit] == [None, RowFailure.CANARY, None]
    assert [hit[index].token_ids for index in (0, 2)] == [plain[index].token_ids for index in (0, 2)]


@pytest.mark.model
def test_known_ids_are_followed_in_chunks_of_512_while_the_best_is_clear(worker):
    """Rounded activations flip near ties, so a run is held to the known ids only before the first gap below 0.5."""
    assert max(len(case["prompt_ids"]) for case in CASES) > 512
    followed = 0
    for case in CASES:
        gaps = [step[0][1] - step[1][1] for step in case["top5_logprobs"]]
        clear = next((step for step, gap in enumerate(gaps) if gap < 0.5), len(gaps))
        if clear == 0:
            continue
        request = Request(prompt_ids=case["prompt_ids"], max_new=clear)
        PlanDriver(worker, budget_tokens=512).run(request)
        assert request.token_ids == case["greedy_ids"][:clear]
        followed += clear
    assert followed > 0


def test_automatic_choice_falls_back_to_torch_and_says_why(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="worker_svc.runners.device_side"):
        built = build_tp_model_worker(
            tiny_folder(tmp_path), ExecutorSettings(dtype="bfloat16", **(SETTINGS | {"num_pages": 20}))
        )
    assert built.worker_info().kernels == "torch"
    assert [record.why for record in caplog.records] == [
        "the native kernels compute float32 on quantised weights, dtype is bfloat16"
    ]


def test_a_weight_type_without_a_native_product_falls_back_with_one_line(tmp_path, caplog):
    shape = Shape(hidden_size=64, intermediate_size=64, num_q_heads=2, num_kv_heads=1, head_dim=32)
    with caplog.at_level(logging.WARNING, logger="worker_svc.runners.device_side"):
        built = build_tp_model_worker(tiny_folder(tmp_path, shape), ExecutorSettings(**(SETTINGS | {"num_pages": 20})))
    assert built.worker_info().kernels == "torch, native attention"
    assert [record.why for record in of_choice(caplog)] == ["tensor type 0 has no native product"]


@pytest.mark.parametrize(
    "reason", ["this CPU lacks avx2", "no C++ compiler (g++, clang++, c++) is installed"], ids=["cpu", "compiler"]
)
def test_without_the_library_torch_computes_and_one_line_says_why(tmp_path, caplog, monkeypatch, reason):
    monkeypatch.setattr(native_weights, "load_native", lambda: NativeUnavailable(reason))
    with caplog.at_level(logging.WARNING, logger="worker_svc.runners.device_side"):
        built = build_tp_model_worker(tiny_folder(tmp_path), ExecutorSettings(**(SETTINGS | {"num_pages": 20})))
    assert built.worker_info().kernels == "torch"
    assert [record.why for record in of_choice(caplog)] == [reason]


@pytest.mark.model
def test_torchs_own_threads_stay_out_of_the_kernels_way():
    torch.set_num_threads(2)
    beside = build_tp_model_worker(model_folder(), ExecutorSettings(kernels="native", **(SETTINGS | {"num_pages": 20})))
    beside.close()
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"page_size": 8}])
def test_who_insists_on_native_kernels_hears_why_not(tmp_path, change):
    with pytest.raises(UnsupportedFeature) as caught:
        build_tp_model_worker(
            tiny_folder(tmp_path), ExecutorSettings(kernels="native", **(SETTINGS | {"num_pages": 20} | change))
        )
    assert caught.value.field == "kernels"


def test_windows_that_the_kernels_would_place_elsewhere_are_torchs(tmp_path, caplog):
    """They know every sixth layer as the full one; a file that says otherwise is not computed wrongly."""
    shape = Shape(architecture="gemma3", window=32, full_every=2, hidden_size=64, intermediate_size=64, num_layers=2)
    folder = tiny_folder(tmp_path, shape)
    with pytest.raises(UnsupportedFeature, match="sliding windows"):
        build_tp_model_worker(folder, ExecutorSettings(kernels="native", **(SETTINGS | {"num_pages": 20})))
    built = build_tp_model_worker(folder, ExecutorSettings(**(SETTINGS | {"num_pages": 20})))
    info = built.worker_info()
    assert info.kernels == "torch"
    assert [(pool.num_pages, pool.window_tokens) for pool in info.sub_pools] == [(20, 0), (16, 32)]
    assert info.fingerprints.kv_layout.count("layers1") == 2


@pytest.mark.parametrize("num_layers", [2, 5])
def test_a_gemma_of_windowed_layers_only_runs_on_the_kernels(tmp_path, num_layers):
    """Below six layers every one has a window, and one sub-pool keeps everything."""
    shape = Shape(
        architecture="gemma3", window=32, num_layers=num_layers, hidden_size=64, intermediate_size=64, head_dim=32
    )
    folder = tiny_folder(tmp_path, shape, is_quantised=True)
    settings = SETTINGS | {"num_pages": 40}
    found = {}
    for kernels in ("native", "torch"):
        built = build_tp_model_worker(folder, ExecutorSettings(kernels=kernels, **settings))
        try:
            assert [pool.window_tokens for pool in built.worker_info().sub_pools] == [0]
            request = Request(prompt_ids=list(range(5, 105)), max_new=4, top_logprobs=2)
            PlanDriver(built).run(request)
            found[kernels] = request
        finally:
            built.close()
    assert found["native"].token_ids == found["torch"].token_ids
    assert np.allclose(found["native"].logprobs, found["torch"].logprobs, atol=0.1)


def test_reproducible_numerics_are_torchs(tmp_path):
    built = build_tp_model_worker(
        tiny_folder(tmp_path), ExecutorSettings(**(SETTINGS | {"numerics": "reproducible", "num_pages": 20}))
    )
    assert built.worker_info().kernels == "torch"


@pytest.mark.model
def test_more_threads_than_cores_work_and_are_announced_as_are_settings_of_graphs_without_effect(worker, caplog):
    graphs = GraphSettings(graph="decode", debug_graph=True)
    changed = {"threads": 200, "num_pages": 20, "graphs": graphs}
    with caplog.at_level(logging.WARNING, logger="worker_svc.runners.device_side"):
        crowded = build_tp_model_worker(model_folder(), ExecutorSettings(kernels="native", **(SETTINGS | changed)))
    try:
        got, expected = (Request(prompt_ids=[5, 6, 7], max_new=3) for _ in range(2))
        PlanDriver(crowded).run(got)
        PlanDriver(worker).run(expected)
    finally:
        crowded.close()
    assert got.token_ids == expected.token_ids
    assert "64 threads" in crowded.worker_info().kernels
    threads, without_effect = caplog.records
    assert threads.threads == 200
    assert "replay no graphs" in without_effect.message
    assert without_effect.settings == {"graph": "decode", "debug_graph": True}


def test_one_core_is_announced(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda _: [0])
    settings = SETTINGS | {"numerics": "reproducible", "num_pages": 20, "threads": None}
    with caplog.at_level(logging.WARNING, logger="worker_svc.runners.device_side"):
        build_tp_model_worker(tiny_folder(tmp_path), ExecutorSettings(**settings))
    assert [record.cores for record in caplog.records] == [1]
