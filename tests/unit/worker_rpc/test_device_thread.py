"""One thread, in order; every outcome reaches the loop; counters move when work has ended."""

import asyncio
import itertools
import threading

import pytest

from protos.wire.enums import RowFailure
from protos.wire.errors import DeviceFault, InternalFault, UnsupportedFeature
from tests.support.fake_executor import FakeExecutor
from tests.support.fake_worker import FakeWorker
from tests.support.plans import decode, extend, make_info, make_plan
from worker_svc.protocol.messages import Execute, Fence, IntakeTimes
from worker_svc.rpc.device_thread import DeviceThread
from worker_svc.rpc.device_work import DeviceWork


@pytest.fixture
async def device():
    thread = DeviceThread()
    yield thread
    await thread.stop()


async def test_work_runs_in_order_on_one_thread(device):
    order = []
    names = await asyncio.gather(
        *(
            device.submit(lambda number=number: order.append(number) or threading.current_thread().name)
            for number in (1, 2, 3)
        )
    )
    assert (order, set(names)) == ([1, 2, 3], {"device"})


async def test_errors_reach_who_waits_and_the_thread_goes_on(device, caplog):
    def fault():
        raise DeviceFault("broke")

    def bug():
        raise KeyError("bug")

    with pytest.raises(DeviceFault):
        await device.submit(fault)
    with pytest.raises(InternalFault) as caught:
        await device.submit(bug)
    assert caught.value.error_id in str(caplog.records[-1].__dict__)
    assert await device.submit(lambda: 5) == 5


async def test_who_stops_waiting_hurts_nobody(device):
    gate = threading.Event()
    waiting = device.submit(lambda: gate.wait(30))
    waiting.cancel()
    gate.set()
    assert await device.submit(lambda: 5) == 5


async def test_stop_finishes_what_was_submitted():
    device = DeviceThread()
    done = device.submit(lambda: "ran")
    await device.stop()
    assert done.result() == "ran"


async def test_offered_work_begins_when_the_running_work_ends_before_the_loop_is_told(device):
    gate, begun = threading.Event(), threading.Event()
    running = device.start(lambda: gate.wait(30))
    offered = device.offer(begun.set)
    assert not begun.is_set()
    gate.set()
    assert begun.wait(30), "while this coroutine held the loop"
    assert not running.future.done()
    assert not device.withdraw(offered)
    running.settle()
    assert running.future.done()
    await offered.future


async def test_an_offer_can_be_taken_back_or_insisted_on(device):
    gate = threading.Event()
    running = device.start(lambda: gate.wait(30))
    dropped = device.offer(lambda: "dropped")
    assert device.withdraw(dropped)
    kept = device.offer(lambda: "kept")
    device.insist(kept)
    gate.set()
    await running.future
    assert await kept.future == "kept"
    assert await device.submit(lambda: 5) == 5
    assert not dropped.future.done()


async def test_an_offer_does_not_begin_behind_work_that_failed(device):
    gate = threading.Event()

    def fault():
        gate.wait(30)
        raise DeviceFault("broke")

    running = device.start(fault)
    offered = device.offer(lambda: "ran")
    gate.set()
    with pytest.raises(DeviceFault):
        await running.future
    assert device.withdraw(offered)


def work_with(executor):
    ticks = itertools.count(1000, 100)
    return DeviceWork(executor, lambda: next(ticks))


def test_progress_moves_with_the_work():
    work = work_with(FakeExecutor(make_info()))
    work.reset(Fence(7, 3))
    assert (work.progress.fence, work.progress.device_counter) == (Fence(7, 3), 1)
    result = work.execute(Execute(make_plan([extend(0, 5)]), IntakeTimes(receive_ns=1, parse_ns=2, parsed_at_ns=1250)))
    timings = result.timings
    assert (timings.receive_ns, timings.parse_ns, timings.wait_ns) == (1, 2, 50)
    progress = work.progress
    assert (progress.last_started_seq, progress.last_finished_seq, progress.device_counter) == (1, 1, 2)
    assert (progress.busy_ns, progress.idle_ns, progress.is_busy) == (200, 200, False)
    work.reset(Fence(8, 1))
    assert (work.progress.last_started_seq, work.progress.last_finished_seq) == (0, 0)


def test_a_plan_under_way_is_seen_and_a_failed_one_does_not_count():
    seen = []

    class Failing(FakeExecutor):
        def execute(self, plan):
            seen.append(work.progress)
            raise DeviceFault("broke")

    work = work_with(Failing(make_info()))
    with pytest.raises(DeviceFault):
        work.execute(Execute(make_plan([extend(0, 5)]), IntakeTimes()))
    assert (seen[0].is_busy, seen[0].last_started_seq, seen[0].last_finished_seq) == (True, 1, 0)
    assert (work.progress.device_counter, work.progress.last_finished_seq) == (0, 0)


def test_a_bubble_is_the_wait_for_a_plan_that_carries_on_the_one_before():
    work = work_with(FakeExecutor(make_info()))
    one, two, other = make_plan([extend(0, 5, handle=4)]), [decode(5, handle=4), decode(9, handle=8)], [extend(0, 5)]
    work.execute(Execute(one, IntakeTimes()))
    assert (work.progress.idle_ns, work.progress.bubble_ns) == (100, 0)
    carried_on = work.execute(Execute(make_plan(two, seq=2), IntakeTimes()))
    assert (work.progress.idle_ns, work.progress.bubble_ns) == (200, 100)
    new = work.execute(Execute(make_plan(other, seq=3), IntakeTimes()))
    assert (work.progress.idle_ns, work.progress.bubble_ns) == (300, 100)
    assert (carried_on.timings.bubble_ns, new.timings.bubble_ns) == (100, 0), "each result says its own"
    work.reset(Fence(8, 1))
    work.execute(Execute(make_plan(other), IntakeTimes()))
    assert work.progress.bubble_ns == 100, "a new term carries on nothing"


def test_a_bug_in_staging_shows_in_the_plans_turn_and_a_refusal_at_once(caplog):
    class Staging(FakeExecutor):
        def stage(self, plan, digest=None):
            raise self.error

    executor = Staging(make_info())
    work = work_with(executor)
    executor.error = KeyError("bug")
    run = work.stage(make_plan([extend(0, 5)]))
    with pytest.raises(InternalFault):
        run()
    executor.error = UnsupportedFeature("no")
    with pytest.raises(UnsupportedFeature):
        work.stage(make_plan([extend(0, 5)]))


def test_failed_rows_are_counted_by_kind():
    failures = [RowFailure.NAN, RowFailure.CANARY, None, RowFailure.NAN]
    work = work_with(FakeWorker(make_info(), fail_row=lambda plan, row: failures[row]))
    work.execute(Execute(make_plan([decode(20) for _ in failures]), IntakeTimes()))
    assert (work.progress.nan_rows, work.progress.canary_hits) == (2, 1)
