"""Requests that were on a worker when it died: tried alone, and ended only when that keeps killing workers."""

import pytest

from scheduler_svc.core.events import ReaderPaused, RequestRefused, WorkerLost
from scheduler_svc.core.settings import CoreSettings
from tests.support.core_harness import CoreHarness, make_spec, oracle, small_info

INFO = small_info(window=2)


def running(*specs, budget=64) -> CoreHarness:
    harness = CoreHarness(CoreSettings(budget_tokens=budget))
    harness.attach(info=INFO)
    harness.submit(*specs)
    return harness


def die(harness, name="w0"):
    harness.pending[name].clear()
    harness.step(WorkerLost(name, died=True))
    harness.attach(name)


def rows_in_flight(harness, name="w0"):
    return [plan.rows.handles.tolist() for plan in harness.pending[name]]


def test_struck_requests_are_alone_on_the_device_until_they_have_passed():
    specs = [make_spec(number, prompt=5, max_tokens=6) for number in (1, 2)]
    harness = running(*specs)
    harness.deliver()
    die(harness)
    alone = []
    while harness.state.workers["w0"].standing.struck:
        assert len(harness.pending["w0"]) == 1, "the only plan in flight"
        alone.append(rows_in_flight(harness)[0])
        harness.deliver()
    assert alone, "nobody was tried alone"
    assert all(len(rows) == 1 for rows in alone)
    harness.run()
    assert [harness.outputs[spec.stream] for spec in specs] == [oracle(INFO, spec) for spec in specs]


def test_others_take_turns_with_the_struck_ones():
    harness = running(make_spec(1, prompt=40, max_tokens=4), budget=4)
    for _ in range(9):
        harness.deliver()
    die(harness)
    harness.submit(make_spec(2, prompt=3, max_tokens=20))
    served = []
    while harness.state.workers["w0"].standing.struck:
        served.append(rows_in_flight(harness)[0])
        harness.deliver()
    assert all(len(rows) == 1 for rows in served)
    assert [1] in served
    assert [2] in served, "who shares the device waits for one plan of a struck request at most, once placed"
    harness.run()
    assert harness.outputs[make_spec(1).stream] == oracle(INFO, make_spec(1, prompt=40, max_tokens=4))


def test_two_deaths_fail_nobody_and_a_third_alone_ends_the_request():
    innocent, poison = make_spec(1, prompt=5, max_tokens=30), make_spec(2, prompt=5, max_tokens=30)
    harness = running(innocent, poison)
    deaths = 0
    for _ in range(200):
        if poison.stream in harness.ends:
            break
        handles = [handle for rows in rows_in_flight(harness) for handle in rows]
        if 2 in handles:
            die(harness)
            deaths += 1
        else:
            harness.deliver()
    end = harness.ends[poison.stream]
    assert isinstance(end, RequestRefused)
    assert end.error.reason == "SUSPECTED_POISON"
    assert deaths == 3
    harness.run()
    assert harness.outputs[innocent.stream] == oracle(INFO, innocent)


def test_nobody_who_had_company_is_ended_however_often_workers_died():
    specs = [make_spec(number, prompt=5, max_tokens=8) for number in (1, 2)]
    harness = running(*specs)
    harness.deliver()
    for request in harness.state.streams.values():
        request.trouble.strikes = 5
    die(harness)
    assert not harness.ends
    harness.run()
    assert [harness.outputs[spec.stream] for spec in specs] == [oracle(INFO, spec) for spec in specs]


def test_a_request_that_passed_is_not_blamed_for_later_deaths():
    spec = make_spec(1, prompt=5, max_tokens=40)
    harness = running(spec)
    for _ in range(6):
        for _ in range(4):
            harness.deliver()
        assert not harness.state.workers["w0"].standing.struck
        die(harness)
    harness.run()
    assert harness.outputs[spec.stream] == oracle(INFO, spec)


@pytest.mark.parametrize("died", [False, True])
def test_only_an_unplanned_death_strikes(died):
    harness = running(make_spec(1))
    harness.pending["w0"].clear()
    harness.step(WorkerLost("w0", died=died))
    harness.attach("w0")
    assert bool(harness.state.workers["w0"].standing.struck) is died


def test_a_struck_request_that_cannot_run_holds_up_nobody():
    harness = running(make_spec(1, prompt=5, max_tokens=9))
    harness.deliver()
    die(harness)
    harness.step(ReaderPaused(make_spec(1).stream))
    harness.deliver()
    harness.submit(make_spec(2, max_tokens=4))
    for _ in range(20):
        if not harness.pending["w0"]:
            break
        harness.deliver()
    assert make_spec(2).stream in harness.ends
