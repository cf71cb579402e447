from dataclasses import replace

import numpy as np
import pytest

from protos.wire.enums import Feature, FinishReason, RowFailure, RowStatus
from protos.wire.result import ForwardResult, PlanRejection
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.events import RequestFinished, RequestRefused, ResultReceived, TokensReleased, Usage
from tests.support.core_harness import CoreHarness, make_spec, oracle, small_info
from tests.support.fake_worker import expected_logprob
from tests.support.plans import CORE_FEATURES, full_sub_pool, window_sub_pool


def make_harness(**changes: object) -> CoreHarness:
    harness = CoreHarness()
    harness.attach(info=small_info(**changes))
    return harness


def assert_right_output(harness: CoreHarness) -> None:
    for stream, spec in harness.specs.items():
        assert harness.outputs[stream] == oracle(harness.infos["w0"], spec)
    harness.assert_balanced()


def fail_at(harness: CoreHarness, seqs: set[int], failure: RowFailure) -> None:
    harness.fail_row = lambda plan, row: failure if plan.identity.seq in seqs else None


def first_positions(harness: CoreHarness) -> list[int]:
    return [int(plan.rows.first_positions[0]) for _, plan in harness.plans]


def test_the_end_tells_reason_usage_and_stop_id():
    harness = make_harness()
    whole = oracle(harness.infos["w0"], make_spec(1, max_tokens=6))
    harness.submit(make_spec(1, max_tokens=6, stop_token_ids=frozenset({whole[2]})), make_spec(2, max_tokens=2))
    harness.run()

    assert harness.end(1) == RequestFinished(
        stream=make_spec(1).stream,
        reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=5, cached_tokens=0, output_tokens=3),
        stop_token_id=whole[2],
    )
    assert harness.output(1) == whole[:3]
    assert (harness.end(2).reason, harness.end(2).stop_token_id) == (FinishReason.LENGTH, None)
    assert harness.state.counters.finished == {FinishReason.STOP: 1, FinishReason.LENGTH: 1}


@pytest.mark.parametrize(("min_tokens", "output_tokens"), [(0, 1), (1, 4), (9, 4)])
def test_stop_ids_do_not_end_before_min_tokens(min_tokens, output_tokens):
    harness = make_harness()
    first = oracle(harness.infos["w0"], make_spec(1))[0]

    harness.submit(make_spec(1, stop_token_ids=frozenset({first}), min_tokens=min_tokens))
    harness.run()

    assert len(harness.output(1)) == output_tokens


@pytest.mark.parametrize("failure", [RowFailure.NAN, RowFailure.CANARY])
def test_bad_numbers_are_retried_once_from_the_start(failure):
    harness = make_harness()
    fail_at(harness, {3}, failure)

    harness.submit(make_spec(1))
    harness.run()

    assert first_positions(harness) == [0, 5, 6, 0, 7]
    assert [int(plan.rows.attempts[0]) for _, plan in harness.plans] == [0, 0, 0, 1, 1]
    assert_right_output(harness)


def test_bad_numbers_twice_at_one_place_end_the_request():
    harness = make_harness()
    fail_at(harness, {2, 3}, RowFailure.NAN)

    harness.submit(make_spec(1))
    harness.run()

    end = harness.end(1)
    assert isinstance(end, RequestRefused)
    assert end.error.reason == "DATA_FAULT"
    assert len(harness.output(1)) == 1
    harness.assert_balanced()


def test_a_token_makes_the_retries_whole_again():
    harness = make_harness()
    fail_at(harness, {2, 4, 6}, RowFailure.NAN)

    harness.submit(make_spec(1))
    harness.run()

    assert harness.state.counters.failed_rows == 3
    assert_right_output(harness)


@pytest.mark.parametrize("failure", [RowFailure.DEPENDENCY, RowFailure.LIMIT])
def test_other_failures_are_retried_on_the_same_pages(failure):
    harness = make_harness()
    fail_at(harness, {3}, failure)

    harness.submit(make_spec(1))
    harness.run()

    assert first_positions(harness) == [0, 5, 6, 6, 7]
    assert_right_output(harness)


def test_a_row_that_always_fails_ends_with_an_error():
    harness = make_harness()
    fail_at(harness, set(range(1, 100)), RowFailure.LIMIT)

    harness.submit(make_spec(1))
    harness.run()

    assert len(harness.plans) == 4
    assert harness.end(1).error.reason == "INTERNAL_FAULT"


def test_dependants_of_a_failed_row_change_nothing():
    harness = make_harness(window=2)
    fail_at(harness, {2}, RowFailure.NAN)

    harness.submit(make_spec(1), make_spec(2))
    harness.run()

    assert harness.state.counters.late_rows >= 2
    assert_right_output(harness)


def test_a_rejected_plan_fails_the_row_it_names_and_retries_the_others():
    harness = make_harness(window=2)
    rejection = PlanRejection(reason="INVALID_PLAN", field="tokens.ids", row=1, message="no")
    harness.reject = lambda plan: rejection if plan.identity.seq == 2 else None

    harness.submit(make_spec(1), make_spec(2), make_spec(3))
    harness.run()

    end = harness.end(2)
    assert isinstance(end, RequestRefused)
    assert (end.error.reason, end.error.field, end.error.plan_seq) == ("INTERNAL_FAULT", "tokens.ids", 2)
    assert harness.state.counters.rejected_plans == 1
    info = harness.infos["w0"]
    assert [harness.output(stream) for stream in (1, 3)] == [oracle(info, make_spec(stream)) for stream in (1, 3)]
    harness.assert_balanced()


def test_plans_that_are_always_rejected_end_their_requests():
    harness = make_harness()
    harness.reject = lambda plan: PlanRejection(reason="UNSUPPORTED", field="", row=None, message="no")

    harness.submit(make_spec(1))
    harness.run()

    assert harness.end(1).error.reason == "INTERNAL_FAULT"
    harness.assert_balanced()


def _other_life(result: ForwardResult) -> ForwardResult:
    return replace(result, identity=replace(result.identity, incarnation=bytes(16)))


def _other_term(result: ForwardResult) -> ForwardResult:
    return replace(result, identity=replace(result.identity, term=9))


def _other_epoch(result: ForwardResult) -> ForwardResult:
    return replace(result, identity=replace(result.identity, epoch=9))


def _later_seq(result: ForwardResult) -> ForwardResult:
    return replace(result, identity=replace(result.identity, seq=9))


@pytest.mark.parametrize("change", [_other_life, _other_term, _other_epoch, _later_seq])
def test_a_result_that_is_not_the_next_changes_nothing(change):
    harness = make_harness()
    harness.submit(make_spec(1))
    result = harness.execute()

    assert harness.step(ResultReceived("w0", change(result))) == []

    assert harness.state.counters.late_results == 1
    assert harness.state.gauges().workers[0].plans_in_flight == 1
    harness.step(ResultReceived("w0", result))
    harness.run()
    assert_right_output(harness)


def test_a_result_comes_once():
    harness = make_harness()
    harness.submit(make_spec(1, max_tokens=1))
    result = harness.execute()
    harness.step(ResultReceived("w0", result))

    assert harness.step(ResultReceived("w0", result), ResultReceived("elsewhere", result)) == []
    assert harness.state.counters.late_results == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"handles": np.array([99], np.uint64)},
        {"attempts": np.array([1], np.uint32)},
        {"positions": np.array([5], np.int32)},
        {"statuses": np.array([RowStatus.NONE], np.uint8)},
        {"statuses": np.array([0], np.uint8)},
        {"statuses": np.array([RowStatus.FAILED], np.uint8)},
        {"token_ids": np.array([97], np.int32)},
        {"token_ids": np.array([-1], np.int32)},
        {"statuses": np.array([RowStatus.FAILED], np.uint8), "failures": np.array([77], np.uint8)},
        {"handles": np.zeros(0, np.uint64)},
    ],
)
def test_an_answer_that_does_not_match_its_row_is_a_failed_row(changes):
    harness = make_harness()
    harness.submit(make_spec(1))
    result = harness.execute()
    assert result.rows is not None

    out = harness.step(ResultReceived("w0", replace(result, rows=replace(result.rows, **changes))))

    assert not [instruction for instruction in out if isinstance(instruction, TokensReleased)]
    assert harness.state.counters.failed_rows == 1
    harness.run()
    assert_right_output(harness)


def test_log_probabilities_come_with_the_tokens_of_those_who_asked():
    harness = make_harness()
    harness.submit(
        make_spec(1, output_logprobs=True, top_logprobs=3),
        make_spec(2),
        make_spec(3, output_logprobs=True),
    )
    harness.run()

    asked, not_asked, plain = [harness.logprobs[make_spec(stream).stream] for stream in (1, 2, 3)]
    assert [entry.logprob for entry in asked] == [expected_logprob(token) for token in harness.output(1)]
    assert [entry.top_ids for entry in asked] == [(t, (t + 1) % 97, (t + 2) % 97) for t in harness.output(1)]
    assert [entry.top_values[0] for entry in asked] == [entry.logprob for entry in asked]
    assert not_asked == []
    assert [entry.logprob for entry in plain] == [expected_logprob(token) for token in harness.output(3)]
    assert {entry.top_ids for entry in plain} == {()}


def test_one_step_may_take_several_results():
    harness = make_harness(window=2)
    harness.submit(make_spec(1))
    results = [harness.execute(), harness.execute()]

    out = harness.step(*[ResultReceived("w0", result) for result in results])

    released = [instruction.first_pos for instruction in out if isinstance(instruction, TokensReleased)]
    assert released == [0, 1]
    harness.run()
    assert_right_output(harness)


def test_a_window_sub_pool_gives_up_pages_as_the_sequence_goes_on():
    harness = CoreHarness()
    harness.attach(info=_hybrid_info())
    harness.submit(make_spec(1, prompt=12, max_tokens=20))
    harness.run()

    starts = [int(plan.page_tables[1].start_positions[0]) for _, plan in harness.plans]
    assert starts[0] == 0
    assert starts[-1] == 20
    assert_right_output(harness)


def _hybrid_info() -> WorkerInfo:
    return small_info(
        sub_pools=(
            full_sub_pool(num_pages=20, page_size=4),
            window_sub_pool(num_pages=200, page_size=4, window_tokens=6),
        ),
        features=CORE_FEATURES | {Feature.WINDOW_SUB_POOL},
    )


def test_rows_beside_a_rejected_one_are_not_blamed_however_often_it_happens():
    harness = make_harness()

    def reject_the_last(plan):
        rows = plan.rows.num_rows
        return PlanRejection(reason="INVALID_PLAN", field="top_ps", row=rows - 1, message="no") if rows > 1 else None

    harness.reject = reject_the_last
    harness.submit(*[make_spec(stream) for stream in range(1, 10)])
    harness.run()

    assert all(isinstance(harness.end(stream), RequestRefused) for stream in range(2, 10))
    assert harness.output(1) == oracle(harness.infos["w0"], make_spec(1))
    assert harness.state.counters.rejected_plans == 8
    harness.assert_balanced()
