"""Compiling happens beside the device: a prepared bucket is captured without compiling anything again."""

import threading

import pytest
import torch
from torch._dynamo.utils import counters

from protos.wire.enums import GraphPhase
from tests.support.forwards import CPU, Row
from tests.support.graph_bench import MODES, GraphBench
from tests.support.tiny_llama import tiny_folder
from worker_svc.batch.sink_batch import sink_batch
from worker_svc.graph_backends.compiled import why_not_compiled

pytestmark = [
    pytest.mark.skipif(why_not_compiled() is not None, reason="no C++ compiler"),
    pytest.mark.timeout(300),
]


def close(left, right) -> bool:
    return torch.allclose(left.logits, right.logits, atol=1e-3) and torch.equal(left.finite, right.finite)


def test_a_prepared_bucket_is_captured_without_compiling_and_steps_run_while_it_is_prepared(tmp_path) -> None:
    torch.set_num_threads(1)
    bench = GraphBench(tiny_folder(tmp_path), backends=("full", "compiled"), decode=(1,), prefill=(16,))
    bench.capture_one(bench.decode, 1)
    row: Row = bench.driver.row(list(range(40)))
    example = sink_batch(MODES[GraphPhase.PREFILL], num_sub_pools=1, device=CPU)
    work = bench.prefill.preparation(16, example=example)
    assert work is not None
    assert bench.decode.preparation(1, example=example) is None

    thread = threading.Thread(target=work)
    thread.start()
    steps = 0
    while thread.is_alive():
        step = bench.batch([row], [1], bucket=1)
        assert torch.equal(bench.replay(step).logits, bench.eager(step).logits)
        steps += 1
    thread.join()
    assert steps > 1

    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 0
    bench.capture_one(bench.prefill, 16)
    prompt = bench.batch([row], [9], bucket=16)
    assert close(bench.replay(prompt), bench.eager(prompt))
    assert counters["stats"]["unique_graphs"] == compiled
