"""Where new requests go when a worker is late, or its numbers are bad."""

from protos.wire.enums import RowFailure
from scheduler_svc.core.events import RequestRefused, WorkerDoubted, WorkerTrusted
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.worker_state import QUARANTINE_REQUESTS, QUARANTINE_WINDOW_S
from tests.support.core_harness import CoreHarness, make_spec, oracle, small_info

INFO = small_info()


def two_workers() -> CoreHarness:
    harness = CoreHarness(CoreSettings(budget_tokens=64))
    harness.attach("w0", INFO)
    harness.attach("w1", INFO)
    return harness


def bad_on(harness, name):
    """That worker's rows are not finite."""

    def failure(plan, row):
        return RowFailure.NAN if any(worker == name and sent is plan for worker, sent in harness.plans) else None

    harness.fail_row = failure


def on(harness, name):
    return [request.handle for request in harness.state.workers[name].running.values()]


def test_a_doubted_worker_gets_no_new_request_until_it_is_trusted():
    harness = two_workers()
    harness.step(WorkerDoubted("w0"))
    harness.submit(*[make_spec(number) for number in range(4)])
    assert (on(harness, "w0"), len(on(harness, "w1"))) == ([], 4)
    harness.step(WorkerTrusted("w0"))
    harness.submit(make_spec(9))
    assert len(on(harness, "w0")) == 1
    harness.run()


def test_the_only_worker_is_used_though_it_is_doubted():
    harness = CoreHarness()
    harness.attach("w0", INFO)
    harness.step(WorkerDoubted("w0"), WorkerDoubted("unknown"))
    harness.submit(make_spec(1))
    harness.run()
    assert harness.outputs[make_spec(1).stream] == oracle(INFO, make_spec(1))


def test_after_bad_numbers_a_row_is_tried_on_another_worker():
    harness = two_workers()
    bad_on(harness, "w0")
    spec = make_spec(1)
    harness.submit(spec)
    first = [name for name in ("w0", "w1") if on(harness, name)]
    assert first == ["w0"]
    harness.deliver("w0")
    assert (on(harness, "w0"), len(on(harness, "w1"))) == ([], 1)
    harness.run()
    assert harness.outputs[spec.stream] == oracle(INFO, spec)


def test_where_there_is_no_other_worker_it_is_tried_on_the_same_once():
    harness = CoreHarness()
    harness.attach("w0", INFO)
    bad_on(harness, "w0")
    harness.submit(make_spec(1))
    harness.run()
    end = harness.ends[make_spec(1).stream]
    assert isinstance(end, RequestRefused)
    assert end.error.reason == "DATA_FAULT"
    assert harness.state.counters.failed_rows == 2


def test_a_worker_with_bad_numbers_for_several_requests_gets_no_new_ones_for_a_while():
    harness = two_workers()
    bad_on(harness, "w0")
    number = 0
    while not harness.state.workers["w0"].standing.is_quarantined(harness.now):
        number += 1
        harness.submit(make_spec(number))
        harness.run()
        assert number <= 3 * QUARANTINE_REQUESTS
    assert number >= QUARANTINE_REQUESTS
    harness.submit(*[make_spec(100 + extra) for extra in range(4)])
    assert on(harness, "w0") == []
    harness.run()
    assert all(not isinstance(end, RequestRefused) for end in harness.ends.values())
    harness.now += QUARANTINE_WINDOW_S
    harness.submit(*[make_spec(200 + extra) for extra in range(4)])
    assert on(harness, "w0") != []


def test_one_request_alone_does_not_put_a_worker_away():
    harness = CoreHarness(CoreSettings(data_fault_retries=10))
    harness.attach("w0", INFO)
    bad_on(harness, "w0")
    harness.submit(make_spec(1))
    harness.run()
    assert harness.state.counters.failed_rows > QUARANTINE_REQUESTS
    assert not harness.state.workers["w0"].standing.is_quarantined(harness.now)
