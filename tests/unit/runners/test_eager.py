import torch

from tests.support import plans
from tests.support.tiny_model import FlatTranslator
from worker_svc.batch.builder import BatchBuilder
from worker_svc.forward_context import ForwardContext
from worker_svc.model_runner import ModelRunner
from worker_svc.runners.eager import EagerRunner


class RecordingAttention:
    def __init__(self):
        self.planned = []

    def plan(self, batch):
        self.planned.append(batch)
        return batch


class CountingModel:
    """Hidden state of a token: its id, its position."""

    def hidden_states(self, input_ids, positions, context):
        return torch.stack([input_ids.float(), positions.float()], dim=1)

    def logits(self, hidden):
        return hidden * 2


def eager_of(attention):
    return EagerRunner(ModelRunner(CountingModel()), ForwardContext(attention))


def batch_of(plan):
    builder = BatchBuilder(translator=FlatTranslator(16), page_sizes=(16,), device=torch.device("cpu"))
    (batch,) = builder.build(plan)
    return batch


def test_it_runs_the_model_runner_on_the_batch():
    attention = RecordingAttention()
    batch = batch_of(plans.make_mixed_plan())
    output = eager_of(attention).forward(batch)
    assert attention.planned == [batch]
    assert output.logits[:, 1].tolist() == [40, 66, 16]
    assert output.last_hidden[:, 1].tolist() == [20, 33, 31, 8]
    assert output.finite.tolist() == [True] * 4


def test_it_never_refuses_and_counts_no_replay():
    runner = eager_of(RecordingAttention())
    for plan in (plans.make_mixed_plan(), plans.make_decode_plan(3), plans.make_idle_plan()):
        assert runner.refusal(batch_of(plan)) is None
    assert not runner.replays_graphs
