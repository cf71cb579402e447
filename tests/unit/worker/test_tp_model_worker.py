from dataclasses import replace

import numpy as np
import pytest

from protos.wire.digest import plan_digest
from protos.wire.enums import Feature, ForwardMode, GraphRefusal, RowFailure, RowStatus
from protos.wire.errors import DeviceFault, UnsupportedFeature
from protos.wire.plan import LogprobColumns, SamplingColumns, WriteWindow
from tests.support import oracle, plans
from tests.support.plan_driver import PlanDriver, Request
from tests.support.tiny_model import POISON, WIDTH, HistoryRunner, history_logits, tiny_worker

INFO = plans.make_info(logits_width=WIDTH, features=frozenset({Feature.OUTPUT_LOGPROBS}))


def prompt(seed, length):
    ids = np.random.default_rng(seed).integers(0, WIDTH, length)
    return [int(token_id) for token_id in ids if token_id != POISON]


def greedy(prompt_ids, count):
    history = list(prompt_ids)
    for _ in range(count):
        history.append(int(history_logits(history).argmax()))
    return history[len(prompt_ids) :]


def status_names(result):
    return [RowStatus(int(status)).name for status in result.rows.statuses]


@pytest.mark.parametrize("budget", [16, 17, 64, 2048])
def test_greedy_is_the_models_whatever_the_chunks_and_mates(budget):
    requests = [Request(prompt_ids=prompt(seed, 5 + 13 * seed), max_new=6) for seed in range(5)]
    driver = PlanDriver(tiny_worker(INFO), budget_tokens=budget)
    assert driver.run(*requests) == [greedy(request.prompt_ids, 6) for request in requests]
    modes = {outcome.mode.name for result in driver.results for outcome in result.forwards}
    assert "DECODE" in modes
    assert modes <= {"EXTEND", "DECODE", "MIXED"}
    assert ("MIXED" in modes) == (budget < 100)


def test_seeded_sampling_is_the_oracles_alone_and_with_mates():
    options = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 2**63 + 5, "sample_index": 3}

    def request(seed):
        return Request(prompt_ids=prompt(seed, 20), max_new=5, **options)

    alone = PlanDriver(tiny_worker(INFO)).run(request(1))[0]
    history = list(request(1).prompt_ids)
    for token_id in alone:
        position = len(history) - 1
        assert token_id == oracle.sampled_id(history_logits(history), position=position, **options)
        history.append(token_id)
    mates = [request(seed) for seed in range(2, 8)] + [Request(prompt_ids=prompt(9, 30), max_new=5)]
    assert PlanDriver(tiny_worker(INFO), budget_tokens=16).run(*mates, request(1))[-1] == alone


def test_forced_ids_and_logprobs():
    request = Request(prompt_ids=prompt(3, 9), max_new=4, forced_ids=[5, 6, 7, 8], top_logprobs=5)
    PlanDriver(tiny_worker(INFO)).run(request)
    for step in range(4):
        expected = oracle.log_softmax(history_logits([*request.prompt_ids, *[5, 6, 7, 8][:step]]))
        best = np.argsort(-expected, kind="stable")[:5]
        assert [token_id for token_id, _ in request.top[step]] == best.tolist()
        assert [value for _, value in request.top[step]] == pytest.approx(expected[best], abs=1e-6)
        assert request.logprobs[step] == request.top[step][0][1]


def test_the_result_echoes_every_row():
    plan = plans.make_plan(
        [plans.decode(0, handle=2**64 - 1, attempt=7), plans.extend(0, 16, samples=0, handle=4, attempt=2**32 - 1)],
        info=INFO,
        seq=9,
        mode=ForwardMode["EXTEND"],
    )
    result = tiny_worker(INFO).execute(plan)
    assert result.identity == plan.identity
    assert result.rows.handles.tolist() == [2**64 - 1, 4]
    assert result.rows.attempts.tolist() == [7, 2**32 - 1]
    assert result.rows.positions.tolist() == [0, 15]
    assert status_names(result) == ["TOKEN", "NONE"]
    assert result.rows.token_ids[1] == 0
    assert result.rows.failures is None
    assert result.rows.finite.tolist() == [1, 1]
    assert result.plan_digest == plan_digest(plan)
    assert result.rejection is None
    assert not np.shares_memory(result.rows.handles, plan.rows.handles)


def test_a_row_that_is_not_finite_fails_and_its_mates_do_not():
    rows = [plans.extend(0, 3, ids=[1, 2, 3]), plans.extend(0, 2, ids=[POISON, 4])]
    rows += [plans.extend(0, 1, ids=[POISON], samples=0), plans.extend(0, 2, ids=[5, 6])]
    logprobs = LogprobColumns(output_wanted=plans.u8(1, 1, 0, 1), output_top_counts=plans.u8(2, 2, 0, 1))
    result = tiny_worker(INFO).execute(plans.make_plan(rows, info=INFO, logprobs=logprobs))
    assert status_names(result) == ["TOKEN", "FAILED", "FAILED", "TOKEN"]
    assert result.rows.failures.tolist() == [0, RowFailure.NAN, RowFailure.NAN, 0]
    assert result.rows.finite.tolist() == [1, 0, 0, 1]
    assert result.rows.token_ids.tolist() == [
        history_logits([1, 2, 3]).argmax(),
        0,
        0,
        history_logits([5, 6]).argmax(),
    ]
    assert result.logprobs.output[1] == 0
    assert result.logprobs.output_top_indptr.tolist() == [0, 2, 2, 2, 3]


def test_several_forwards_of_a_plan():
    rows = [plans.extend(0, 3, ids=[1, 2, 3]), plans.extend(0, 2, ids=[3, 4]), plans.extend(0, 2, ids=[5, 6])]
    whole = plans.make_plan(rows, info=INFO, logprobs=LogprobColumns(output_top_counts=plans.u8(1, 3, 2)))
    forwards = (
        plans.whole_forward(rows[:1]),
        plans.whole_forward(rows[1:], row_begin=1, row_end=3),
    )
    split = replace(whole, forwards=forwards)
    one, two = tiny_worker(INFO).execute(whole), tiny_worker(INFO).execute(split)
    assert one.rows.token_ids.tolist() == two.rows.token_ids.tolist()
    assert one.logprobs.output_top_ids.tolist() == two.logprobs.output_top_ids.tolist()
    assert one.logprobs.output is None
    assert two.logprobs.output_top_indptr.tolist() == [0, 1, 4, 6]
    assert [outcome.real_tokens for outcome in two.forwards] == [3, 4]


def test_idle_runs_no_model():
    runner = HistoryRunner(INFO)
    result = tiny_worker(INFO, [runner]).execute(plans.make_idle_plan(info=INFO))
    assert runner.batches == []
    assert len(result.rows.handles) == 0
    (outcome,) = result.forwards
    assert (outcome.mode, outcome.real_tokens, outcome.forward_ns) == (ForwardMode["IDLE"], 0, 0)


def test_eager_forwards_carry_the_plans_reason_and_timings_add_up():
    rows = [plans.extend(0, 9)]
    forward = plans.whole_forward(rows, graph=GraphRefusal.OVER_MAX_TOKENS)
    result = tiny_worker(INFO).execute(plans.make_plan(rows, info=INFO, forwards=[forward]))
    (outcome,) = result.forwards
    assert outcome.graph is GraphRefusal.OVER_MAX_TOKENS
    assert (outcome.real_tokens, outcome.padded_tokens) == (9, 0)
    timings = result.timings
    assert timings.forward_ns == outcome.forward_ns > 0
    assert min(timings.host_to_device_ns, timings.sample_ns, timings.device_to_host_ns) > 0
    assert timings.receive_ns == timings.parse_ns == timings.wait_ns == 0


@pytest.mark.parametrize(
    "change",
    [
        {"forwards": (plans.whole_forward([plans.decode(4)], mode=ForwardMode["TARGET_VERIFY"]),)},
        {"forwards": (plans.whole_forward([plans.decode(4)], write_window=WriteWindow(run=(0, 1))),)},
        {"reserved": ("adapters",)},
        {"sampling": SamplingColumns(bias_indptr=plans.u32(0, 1))},
    ],
)
def test_what_has_no_executor_is_refused_before_the_device_is_touched(change):
    runner = HistoryRunner(INFO)
    plan = replace(plans.make_decode_plan(1, info=INFO), **change)
    with pytest.raises(UnsupportedFeature):
        tiny_worker(INFO, [runner]).execute(plan)
    assert runner.batches == []


class BrokenRunner(HistoryRunner):
    def forward(self, batch):
        raise RuntimeError("device-side assert")


def test_a_failing_device_is_a_device_fault():
    worker = tiny_worker(INFO, [BrokenRunner(INFO)])
    with pytest.raises(DeviceFault) as caught:
        worker.execute(plans.make_extend_plan([4], info=INFO, seq=5))
    assert caught.value.plan_seq == 5


def test_worker_info_is_one_object_and_reset_keeps_pages():
    worker = tiny_worker(INFO)
    assert worker.worker_info() is worker.worker_info() is INFO
    prompt_ids = prompt(2, 20)
    first = plans.make_plan([plans.extend(0, 10, ids=prompt_ids[:10], samples=0, pages=[4])], info=INFO)
    worker.execute(first)
    worker.reset()
    rest = plans.make_plan([plans.extend(10, len(prompt_ids) - 10, ids=prompt_ids[10:], pages=[4, 9])], info=INFO)
    assert worker.execute(rest).rows.token_ids.tolist() == greedy(prompt_ids, 1)


def test_a_closed_worker_runs_nothing():
    worker = tiny_worker(INFO)
    worker.close()
    with pytest.raises(AssertionError):
        worker.execute(plans.make_extend_plan([4], info=INFO))
