"""A sender that repeats, leaves out and swaps plans at random: each runs once, in order; every answer is defined."""

import random

import pytest

from tests.unit.protocol.test_worker_protocol import STREAM, opened, plan, result
from worker_svc.protocol.messages import Execute, PlanResult, SequenceGapAnswer, StaleAnswer

PLANS = 40
WINDOW = 2


@pytest.mark.parametrize("seed", range(8))
def test_repeated_missing_and_swapped_plans_run_once_and_in_order(seed):
    draw = random.Random(seed)
    protocol, ran, answers = opened(window=WINDOW), [], []
    running: list[Execute] = []

    def carry_out(actions):
        for action in actions:
            if isinstance(action, Execute):
                running.append(action)
            else:
                answers.append(action.body)

    for _ in range(5000):
        if len(ran) == PLANS:
            break
        if running and draw.random() < 0.4:
            seq = running.pop().plan.identity.seq
            ran.append(seq)
            carry_out(protocol.plan_finished(result(seq)))
            continue
        seq = len(ran) + draw.randint(-6, WINDOW + 3)
        if seq > 0 and seq != len(ran) + WINDOW + 1:  # it keeps to the window: what is over it has its own answer
            carry_out(protocol.plan_received(STREAM, plan(seq)))
        assert len(running) <= 1

    assert ran == list(range(1, PLANS + 1))
    assert {type(answer) for answer in answers} == {PlanResult, SequenceGapAnswer, StaleAnswer}
    for answer in answers:
        if isinstance(answer, SequenceGapAnswer):
            assert answer.received_seq > answer.expected_seq
        elif isinstance(answer, StaleAnswer):
            assert answer.seq < answer.expected_seq - WINDOW
        else:
            assert answer.result.identity.seq in ran
