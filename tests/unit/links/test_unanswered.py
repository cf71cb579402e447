from dataclasses import replace

from protos.wire.enums import Feature
from scheduler_svc.links.unanswered import UnansweredPlans
from tests.bench.test_bench_deltas import MOST_BYTES_A_ROW, MOST_FULL_BYTES, ROWS, step_plan
from tests.support import plans

INFO = plans.make_info(
    sub_pools=[plans.full_sub_pool(num_pages=260 * ROWS + 1)],
    limits=plans.make_limits(context_tokens=8192),
)
WITH_DELTAS = replace(INFO, features=INFO.features | {Feature.DELTAS})
WITHOUT_DELTAS = replace(INFO, features=INFO.features - {Feature.DELTAS})
CONTEXT, SMALL_CONTEXT = 4000, 1000


def sent(info, context):
    """A full plan and three that follow it, with the default bound."""
    unanswered = UnansweredPlans(info)
    return [unanswered.add(step_plan(info, seq, context + seq)) for seq in range(1, 5)]


def test_large_plans_go_as_changes_of_few_bytes_a_row():
    first, *others = sent(WITH_DELTAS, CONTEXT)
    assert not first.is_delta
    assert len(first.body) <= MOST_FULL_BYTES
    assert all(message.is_delta for message in others)
    assert max(len(message.body) for message in others) <= MOST_BYTES_A_ROW * ROWS


def test_plans_below_the_bound_go_in_full():
    assert not any(message.is_delta for message in sent(WITH_DELTAS, SMALL_CONTEXT))


def test_a_worker_without_deltas_gets_every_plan_in_full():
    assert not any(message.is_delta for message in sent(WITHOUT_DELTAS, CONTEXT))


def test_a_refused_plan_is_no_base_of_the_next():
    unanswered = UnansweredPlans(WITH_DELTAS)
    unanswered.add(step_plan(WITH_DELTAS, 1, CONTEXT))
    assert unanswered.add(step_plan(WITH_DELTAS, 2, CONTEXT + 1)).is_delta
    unanswered.answered(1, was_refused=False)
    unanswered.answered(2, was_refused=True)
    assert not unanswered.add(step_plan(WITH_DELTAS, 3, CONTEXT + 2)).is_delta
    assert unanswered.add(step_plan(WITH_DELTAS, 4, CONTEXT + 3)).is_delta
