"""Who is placed, waits or is refused when deadlines are at stake; a step of R rows takes 0.1 s + R * 10 ms here."""

import pytest

from scheduler_svc.core.cost_model import PlanShape
from scheduler_svc.core.events import RequestRefused
from scheduler_svc.core.outlook import Work
from scheduler_svc.core.output_lengths import OutputLengths
from scheduler_svc.core.prompt_hits import PromptHits
from scheduler_svc.core.queue_hint import forecast
from scheduler_svc.core.sent_away import SentAway
from tests.support.core_harness import CoreHarness, make_spec, small_info


def measured_harness(**changes: object) -> CoreHarness:
    harness = CoreHarness()
    harness.attach(info=small_info(num_pages=400, max_tokens=512, **changes))
    for tokens in range(1, 41):
        harness.state.workers["w0"].measured(PlanShape(tokens, 0), 0.1 + 0.010 * tokens)
    for _ in range(300):
        harness.state.foresight.outputs.ended(1000, by_itself=False)
    return harness


def running(harness: CoreHarness) -> list[int]:
    return [request.spec.stream.stream_id for request in harness.state.workers["w0"].running.values()]


def outlook(harness: CoreHarness):
    return harness.state.foresight.outlook(harness.state.workers["w0"], now=harness.now)


def test_nothing_is_said_before_enough_was_measured():
    harness = CoreHarness()
    harness.attach()
    harness.submit(*[make_spec(stream, deadline_s=0.001) for stream in range(1, 9)])
    assert not outlook(harness).is_known
    assert len(running(harness)) == 8


def test_a_row_more_is_not_placed_when_it_would_make_a_running_one_late():
    harness = measured_harness()
    harness.submit(make_spec(1, prompt=1, max_tokens=100, deadline_s=30.0))
    harness.submit(make_spec(2, prompt=1, max_tokens=100, deadline_s=1000.0))
    assert running(harness) == [1, 2]
    harness.now = 18.0  # 0.12 s are left for each token of the first, a step of three rows takes 0.13 s
    harness.submit(make_spec(3, prompt=1, max_tokens=10, deadline_s=1000.0))
    assert running(harness) == [1, 2]
    assert harness.state.gauges().waiting == 1

    harness.cancel(1)
    assert running(harness) == [2, 3]


def test_a_row_that_is_lost_anyway_is_not_waited_for():
    harness = measured_harness()
    harness.submit(make_spec(1, prompt=1, max_tokens=100, deadline_s=30.0))
    harness.submit(make_spec(2, prompt=1, max_tokens=100, deadline_s=1000.0))
    harness.now = 25.0
    harness.submit(make_spec(3, prompt=1, max_tokens=10, deadline_s=1000.0))
    assert running(harness) == [1, 2, 3]


def test_a_request_keeps_time_for_those_that_come_later():
    harness = measured_harness()
    harness.submit(make_spec(1, prompt=1, max_tokens=100, deadline_s=1000.0))
    harness.submit(make_spec(2, prompt=1, max_tokens=100, deadline_s=20.0))
    assert running(harness) == [1]
    assert harness.end(2) is None
    harness.submit(make_spec(3, prompt=1, max_tokens=100, deadline_s=60.0))
    assert running(harness) == [1], "the one that waits was passed over"

    harness.cancel(2)
    assert running(harness) == [1, 3]


@pytest.mark.parametrize(("max_tokens", "deadline_s"), [(1, 1.0), (1, 5.0), (20, 10.0), (100, 60.0)])
def test_a_long_generation_of_another_keeps_nobody_waiting(max_tokens, deadline_s):
    harness = measured_harness()
    harness.submit(make_spec(1, prompt=1, max_tokens=1000, deadline_s=100_000.0))
    harness.submit(make_spec(2, prompt=1, max_tokens=max_tokens, deadline_s=deadline_s))
    assert running(harness) == [1, 2]


def test_no_time_is_kept_for_what_waiting_cannot_help():
    harness = measured_harness()
    harness.submit(make_spec(1, prompt=1, max_tokens=100, deadline_s=1000.0))
    harness.submit(make_spec(2, prompt=1, max_tokens=100, deadline_s=16.0))  # 11.5 s even alone
    assert running(harness) == [1, 2]


def test_what_cannot_be_done_any_more_is_refused_when_its_turn_comes():
    harness = measured_harness(max_rows=1)
    harness.submit(make_spec(1, prompt=1, max_tokens=10, deadline_s=1000.0))
    harness.submit(make_spec(2, prompt=1, max_tokens=100, deadline_s=50.0))
    harness.submit(make_spec(3, prompt=1, max_tokens=10, deadline_s=1000.0))
    harness.now = 45.0
    harness.cancel(1)

    end = harness.end(2)
    assert isinstance(end, RequestRefused)
    assert (end.error.reason, end.error.field) == ("QUEUE_FULL", "deadline")
    assert end.error.retry_after_ms >= 1000
    harness.run()
    assert len(harness.output(3)) == 10
    harness.assert_balanced()


def test_a_retracted_request_is_never_refused_for_its_deadline():
    harness = measured_harness()
    harness.submit(make_spec(1, prompt=1, max_tokens=100, deadline_s=50.0))
    harness.lose()
    harness.now = 45.0
    harness.attach()
    for tokens in range(1, 41):
        harness.state.workers["w0"].measured(PlanShape(tokens, 0), 0.1 + 0.010 * tokens)
    harness.submit(make_spec(2, prompt=1, deadline_s=1000.0))
    assert harness.end(1) is None
    assert 1 in running(harness)


def test_the_door_knows_how_long_the_queue_takes():
    harness = measured_harness(max_rows=1)
    harness.submit(*[make_spec(stream, prompt=1, max_tokens=100, deadline_s=1000.0) for stream in range(1, 6)])
    # Four wait, each for about 12 s.
    harness.submit(
        make_spec(6, prompt=1, max_tokens=1, deadline_s=150.0), make_spec(7, prompt=1, max_tokens=1, deadline_s=200.0)
    )
    assert "it has 150.0 s, of which it may wait 37.5 s" in str(harness.end(6).error)
    assert harness.end(7) is None


def test_an_idle_worker_takes_what_may_be_too_late():
    harness = measured_harness()
    harness.submit(make_spec(1, prompt=1, max_tokens=100, deadline_s=12.0))
    assert running(harness) == [1]


def test_lengths_of_outputs_are_learnt_from_those_that_ended():
    lengths = OutputLengths()
    assert lengths.expected(1 << 20) == pytest.approx(256, rel=0.01)
    assert lengths.expected(10) == pytest.approx(10, rel=0.05)
    for _ in range(1000):
        lengths.ended(50, by_itself=True)
    assert lengths.expected(1 << 20) == pytest.approx(50, rel=0.01)
    for _ in range(1000):
        lengths.ended(64, by_itself=False)
    assert lengths.expected(1 << 20) > 100_000
    assert lengths.expected(64) == pytest.approx(64, rel=0.01)


def test_those_who_are_sent_away_are_told_to_come_one_after_the_other():
    sent = SentAway()

    def hint(now: float) -> float:
        return sent.hint_s(now, room_in_s=2.0, takes_s=0.5, patience_s=1.0)

    assert [hint(10.0) for _ in range(5)] == [2.0, 2.5, 3.0, 3.0, 3.0]
    assert hint(20.0) == 2.0


def test_a_model_that_says_tokens_cost_nothing_refuses_nobody_and_ends_nothing():
    harness = CoreHarness()
    harness.attach()
    worker = harness.state.workers["w0"]
    for index in range(60):  # all of the time goes to the context
        context = 1000 + 200 * index
        worker.measured(PlanShape(1 + index % 3, context), (context - 1000) * 2e-7 + 1e-6)
    assert outlook(harness).work_s(Work(1, 100.0, 10.0)) > 0
    harness.submit(*[make_spec(stream, deadline_s=600.0) for stream in range(1, 9)])
    assert len(running(harness)) == 8


def test_prompts_without_output_do_not_make_every_step_as_long_as_all_of_them():
    harness = measured_harness()
    harness.submit(*[make_spec(stream, prompt=300, max_tokens=1, deadline_s=600.0) for stream in range(1, 5)])
    look = outlook(harness)
    # A step computes its rows and at most the prefill of the largest plan measured: 0.1 s + (5 + 40) * 10 ms.
    assert look.takes_s(0, 100) <= 100 * 0.56 + 1200 * 0.011


def test_prompts_that_wait_behind_one_row_are_not_taken_for_one_token_a_step():
    harness = measured_harness()
    harness.submit(make_spec(1, prompt=1, max_tokens=100, deadline_s=1000.0))
    look = outlook(harness)
    # 1,500 tokens of prompts: 15 s of computing and 1,500 / 40 plans' 0.1 s, not 1,500 steps of 0.11 s.
    assert look.work_s(Work(5, 1500.0, 10.0)) == pytest.approx(15.1 + 0.1 * 1510 / 40, rel=0.05)
    assert look.work_s(Work(0, 0.0, 0.0)) == 0.0


def test_a_queue_is_worked_off_with_no_more_rows_than_there_is_room_memory_and_time_for():
    harness = measured_harness(max_rows=32)
    few = outlook(harness).work_s(Work(20, 20.0, 1000.0))
    assert few == pytest.approx(1020 * 0.010 + 50 * 0.1, rel=0.05)
    assert outlook(measured_harness(max_rows=4)).work_s(Work(20, 20.0, 1000.0)) > 2 * few
    long_rows = outlook(harness).work_s(Work(20, 20.0, 20 * 800.0))  # the pool holds 2 of them
    assert long_rows > 8 * few

    harness.submit(make_spec(1, prompt=1, max_tokens=100, deadline_s=20.0))  # in time with steps of at most 0.2 s
    assert outlook(harness).work_s(Work(20, 20.0, 1000.0)) > 1.3 * few


def test_of_prompts_that_were_mostly_cached_little_is_expected_to_be_computed():
    harness = measured_harness(max_rows=2)
    harness.submit(*[make_spec(stream, prompt=100, max_tokens=50, deadline_s=1000.0) for stream in range(1, 9)])
    before = forecast(harness.state, make_spec(9, deadline_s=1000.0))
    for _ in range(300):
        harness.state.foresight.prompts.placed(1000, cached_tokens=900)
    after = forecast(harness.state, make_spec(9, deadline_s=1000.0))
    assert before is not None
    assert after is not None
    assert after.wait_s < 0.8 * before.wait_s

    hits = PromptHits()
    assert hits.cached_share == 0.0
    for _ in range(1000):
        hits.placed(900, cached_tokens=899)
    assert 0.99 < hits.cached_share < 1.0
