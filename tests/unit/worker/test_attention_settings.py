"""A worker's attention back-ends, chosen by settings: the same plans, and start-up refuses what cannot work."""

import logging

import numpy as np
import pytest
import torch

from protos.wire.errors import UnsupportedFeature
from tests.support.plan_driver import PlanDriver, Request
from tests.support.tiny_llama import Shape, tiny_folder
from worker_svc.build import build_tp_model_worker
from worker_svc.runners.executor_settings import ExecutorSettings

SETTINGS = {"num_pages": 40, "max_rows": 16, "max_tokens": 128, "threads": 1}
WIDE = Shape(head_dim=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"), WIDE)


def requests():
    rng = np.random.default_rng(5)
    return [Request(prompt_ids=rng.integers(0, 250, 5 + 11 * n).tolist(), max_new=6, top_logprobs=2) for n in range(5)]


def run(folder, budget, **options):
    worker = build_tp_model_worker(folder, ExecutorSettings(**(SETTINGS | options)))
    done = requests()
    PlanDriver(worker, budget_tokens=budget).run(*done)
    return worker.worker_info(), done


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("native", "native"), ("torch", "native"), ("native", "torch"), ("tiled", "torch"), ("auto", "native")],
)
def test_every_pair_follows_the_reproducible_worker(folder, prefill, decode):
    _, known = run(folder, 32, numerics="reproducible")
    _, found = run(folder, 32, numerics="fast", prefill_attention=prefill, decode_attention=decode, kernels="torch")
    for mine, theirs in zip(found, known, strict=True):
        assert mine.token_ids == theirs.token_ids
        torch.testing.assert_close(torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), atol=5e-3, rtol=0)


def test_native_attention_keeps_the_promise_of_reproducible_numerics(folder):
    options = {"numerics": "reproducible", "prefill_attention": "native", "decode_attention": "native"}
    info, known = run(folder, 128, **options)
    _, chunked = run(folder, 16, **options)
    assert info.kernels == "torch, native attention"
    for mine, theirs in zip(chunked, known, strict=True):
        assert (mine.token_ids, mine.logprobs, mine.top) == (theirs.token_ids, theirs.logprobs, theirs.top)


def test_pages_have_the_order_and_the_type_that_the_back_end_reads(folder):
    info, _ = run(folder, 128, kernels="torch", decode_attention="native")
    assert info.kernels == "torch, torch prefill and native decode attention"
    assert info.fingerprints.kv_layout.endswith(".native.float16")
    assert info.sub_pools[0].bytes_per_page == 2 * WIDE.num_layers * WIDE.num_kv_heads * WIDE.head_dim * 16 * 2
    plain, _ = run(folder, 128, kernels="torch")
    assert (plain.kernels, plain.fingerprints.kv_layout.endswith("page16.float32")) == ("torch", True)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"decode_attention": "native", "page_size": 32, "kernels": "torch"}, "page_size"),
        ({"prefill_attention": "flashinfer", "kernels": "torch"}, "prefill_attention"),
        ({"prefill_attention": "torch", "numerics": "reproducible"}, "prefill_attention"),
        ({"prefill_attention": "torch", "kernels": "native"}, "kernels"),
        ({"decode_attention": "paged", "kernels": "torch"}, "decode_attention"),
    ],
)
def test_start_up_refuses_what_cannot_work(folder, change, field):
    with pytest.raises(UnsupportedFeature) as caught:
        build_tp_model_worker(folder, ExecutorSettings(**(SETTINGS | change)))
    assert caught.value.field == field


def test_a_back_end_that_is_not_there_is_replaced_and_announced(tmp_path, caplog):
    """Heads of 8 are too narrow for the native kernels, of attention as of everything else."""
    with caplog.at_level(logging.WARNING, logger="worker_svc.runners"):
        worker = build_tp_model_worker(tiny_folder(tmp_path), ExecutorSettings(**SETTINGS))
    assert worker.worker_info().kernels == "torch"
    passed_over = [record.why for record in caplog.records if record.message == "attention back-end passed over"]
    assert len(passed_over) == 2
    assert all("no kernel for heads" in why for why in passed_over)
