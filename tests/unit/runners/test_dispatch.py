from dataclasses import replace

import pytest

from protos.wire.enums import GraphPhase, GraphRefusal
from tests.support import plans
from tests.support.tiny_model import FlatTranslator
from worker_svc.batch.builder import BatchBuilder
from worker_svc.runners.dispatch import RunnerDispatch


class FakeRunner:
    def __init__(self, refusal=None, *, replays_graphs=False):
        self._refusal = refusal
        self.replays_graphs = replays_graphs

    def refusal(self, batch):
        return self._refusal

    def forward(self, batch):
        raise AssertionError("choosing runs nothing")


def batch_of(graph):
    import torch

    plan = plans.make_decode_plan(2)
    plan = replace(plan, forwards=(replace(plan.forwards[0], graph=graph),))
    builder = BatchBuilder(translator=FlatTranslator(16), page_sizes=(16,), device=torch.device("cpu"))
    return builder.build(plan)[0]


BUCKET = plans.graph_choice(GraphPhase.DECODE, 4)


def test_the_first_runner_that_does_not_refuse_takes_it():
    refusing, graph, eager = FakeRunner(GraphRefusal.MODE), FakeRunner(replays_graphs=True), FakeRunner()
    chosen = RunnerDispatch([refusing, graph, eager]).choose(batch_of(BUCKET))
    assert chosen.runner is graph
    assert chosen.graph == BUCKET


@pytest.mark.parametrize("reason", list(GraphRefusal))
def test_a_refused_bucket_carries_the_refusing_runners_reason(reason):
    refusing, eager = FakeRunner(reason, replays_graphs=True), FakeRunner()
    chosen = RunnerDispatch([refusing, eager]).choose(batch_of(BUCKET))
    assert chosen.runner is eager
    assert chosen.graph is reason


def test_the_plans_own_reason_wins():
    refusing, eager = FakeRunner(GraphRefusal.MODE, replays_graphs=True), FakeRunner()
    chosen = RunnerDispatch([refusing, eager]).choose(batch_of(GraphRefusal.BUCKET_TOO_LARGE))
    assert chosen.graph is GraphRefusal.BUCKET_TOO_LARGE


def test_a_bucket_without_any_graph_runner_is_disabled():
    assert RunnerDispatch([FakeRunner()]).choose(batch_of(BUCKET)).graph is GraphRefusal.DISABLED


def test_a_last_runner_that_refuses_is_a_programming_error():
    with pytest.raises(AssertionError):
        RunnerDispatch([FakeRunner(GraphRefusal.DTYPE)]).choose(batch_of(BUCKET))
