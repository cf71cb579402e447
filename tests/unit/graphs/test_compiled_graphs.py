"""Compiling happens beside the device: a prepared bucket is captured without compiling anything again."""

import threading
import time

import pytest
import torch
from torch._dynamo.utils import counters

from protos.wire.enums import ForwardMode, GraphPhase
from tests.support.forwards import CPU
from worker_svc.batch.sink_batch import sink_batch
from worker_svc.device.tape import TapeDevice
from worker_svc.forward_context import ForwardContext
from worker_svc.graph_backends.compiled import CompiledBackend, why_not_compiled
from worker_svc.graph_backends.kept_tensors import KeptTensors
from worker_svc.kv.sub_pools import LayerPlace
from worker_svc.model_runner import ModelRunner
from worker_svc.runners.eligibility import GraphShapes
from worker_svc.runners.prefill_graph import PrefillGraphRunner
from worker_svc.runners.static_buffers import StaticBuffers

pytestmark = [
    pytest.mark.skipif(why_not_compiled() is not None, reason="no C++ compiler"),
    pytest.mark.timeout(300),
]


def first(hidden, context):
    states = hidden.unsqueeze(1) * 2
    attended = context.attend(states, states, states, place=LayerPlace(sub_pool=0, layer=0))
    return hidden + attended.squeeze(1).cos()


def second(hidden, context):
    return first(hidden * 3, context) * 4


class Model:
    """Two layers of next to nothing, each with a marked call."""

    def hidden_states(self, input_ids, positions, context):
        hidden = torch.stack((input_ids, positions), dim=-1).float().sin()
        return second(first(hidden, context), context)

    def logits(self, hidden):
        return hidden


class Attention:
    """Remembers which threads asked it for what."""

    def __init__(self):
        self.threads = []

    def plan(self, batch):
        return batch.num_tokens

    def run(self, queries, keys, values, *, layer, metadata):
        self.threads.append(threading.current_thread().name)
        return queries + metadata + layer


def test_a_prepared_bucket_is_captured_without_compiling_and_the_context_serves_meanwhile():
    attention = Attention()
    context = ForwardContext(attention)
    runner = PrefillGraphRunner(
        ModelRunner(Model()),
        context,
        backend=CompiledBackend(kept=KeptTensors(TapeDevice()), breaks=context.breaks),
        shapes=GraphShapes(phase=GraphPhase.PREFILL, sizes=(16,), slots=4),
        buffers=StaticBuffers(max_tokens=16, device=CPU),
    )
    example = sink_batch(ForwardMode.EXTEND, num_sub_pools=1, device=CPU)
    work = runner.preparation(16, example=example)
    thread = threading.Thread(target=work, name="beside")
    counters.clear()
    thread.start()
    steps = 0
    while thread.is_alive():
        runner._model_runner.forward(example, context)
        steps += 1
        time.sleep(0.02)
    assert steps > 1
    assert attention.threads.count("beside") == 2
    assert set(attention.threads) == {"beside", "MainThread"}

    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 1
    runner.capture(16, example=example)
    assert counters["stats"]["unique_graphs"] == compiled
