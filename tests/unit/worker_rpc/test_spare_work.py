"""Spare work of the device thread: piece by piece between jobs, long pieces on an idle device, given up at the end."""

import asyncio
import math
import threading
import time

import pytest

from tests.support.waiting import until
from worker_svc.rpc.device_thread import DeviceThread

SHORT, LONG = 1.0, 1000.0


class Spare:
    """`count` stretches of `pieces` pieces each, `piece_ms` long by its own account."""

    def __init__(self, count=1, *, pieces=3, piece_ms=SHORT, max_wait_s=30.0):
        self.max_wait_s = max_wait_s
        self.seen: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.gave_up = 0
        self._left = count
        self._pieces = pieces
        self._piece_ms = piece_ms

    @property
    def is_done(self):
        return not self._left

    def next_piece_ms(self, *, is_idle):
        return self._piece_ms if self._left else None

    def run(self, give_way, *, is_idle):
        try:
            for piece in range(self._pieces):
                self.begun.set()
                assert self.gate.wait(30)
                self.seen.append("piece")
                if piece < self._pieces - 1:
                    give_way(self._piece_ms)
        except BaseException:
            self.gave_up += 1
            raise
        self._left -= 1


@pytest.fixture
async def device():
    thread = DeviceThread()
    yield thread
    await thread.stop()


async def test_spare_work_runs_to_its_end_on_an_idle_thread_which_then_serves_on(device):
    spare = Spare(2, piece_ms=math.inf)
    await device.submit(lambda: device.set_spare(spare))
    await until(lambda: spare.seen == ["piece"] * 6)
    assert await device.submit(lambda: 5) == 5


async def test_a_job_that_waits_runs_behind_one_short_piece(device):
    spare = Spare(pieces=4)
    spare.gate.clear()
    await device.submit(lambda: device.set_spare(spare))
    assert spare.begun.wait(30)
    jobs = [device.submit(lambda number=number: spare.seen.append(f"job {number}")) for number in (1, 2)]
    spare.gate.set()
    await asyncio.gather(*jobs)
    await until(lambda: spare.seen.count("piece") == 4)
    assert spare.seen == ["piece", "job 1", "piece", "job 2", "piece", "piece"]


async def test_offered_work_that_follows_a_job_inside_a_pause_comes_in_order(device):
    spare = Spare(pieces=3)
    spare.gate.clear()
    await device.submit(lambda: device.set_spare(spare))
    assert spare.begun.wait(30)
    running = device.start(lambda: spare.seen.append("job 1"))
    offered = device.offer(lambda: spare.seen.append("job 2"))
    spare.gate.set()
    await asyncio.gather(running.future, offered.future)
    await until(lambda: spare.seen.count("piece") == 3)
    assert spare.seen == ["piece", "job 1", "piece", "job 2", "piece"]


async def test_a_long_piece_waits_for_an_idle_device(device):
    spare = Spare(pieces=1, piece_ms=LONG)
    await device.submit(lambda: device.set_spare(spare))
    for _ in range(20):
        await device.submit(lambda: time.sleep(0.01))
        assert not spare.seen
    await until(lambda: spare.seen == ["piece"])


async def test_a_long_piece_waits_no_longer_than_it_may(device):
    spare = Spare(pieces=1, piece_ms=LONG, max_wait_s=0.1)
    await device.submit(lambda: device.set_spare(spare))
    began = time.monotonic()
    while not spare.seen:
        await device.submit(lambda: time.sleep(0.01))
        assert time.monotonic() - began < 30


async def test_jobs_inside_a_pause_may_fail_without_ending_the_spare_work(device):
    spare = Spare(pieces=3)
    spare.gate.clear()
    await device.submit(lambda: device.set_spare(spare))
    assert spare.begun.wait(30)

    def fails():
        raise KeyError("bug")

    failing = device.submit(fails)
    spare.gate.set()
    with pytest.raises(Exception, match="unexpected"):
        await failing
    await until(lambda: spare.seen == ["piece"] * 3)


async def test_spare_work_that_has_a_bug_is_dropped_and_jobs_go_on(device, caplog):
    class Broken(Spare):
        def run(self, give_way, *, is_idle):
            raise KeyError("bug")

    await device.submit(lambda: device.set_spare(Broken()))
    assert await device.submit(lambda: 5) == 5
    await until(lambda: "unexpected error" in caplog.text)


async def test_at_the_end_what_has_begun_is_given_up_before_the_last_job():
    device = DeviceThread()
    spare = Spare(5)
    spare.gate.clear()
    await device.submit(lambda: device.set_spare(spare))
    assert spare.begun.wait(30)
    device.end_spare()
    closing = device.submit(lambda: spare.seen.append("close"))
    spare.gate.set()
    await closing
    await device.stop()
    assert spare.seen == ["piece", "close"]
    assert spare.gave_up == 1


async def test_spare_work_that_is_prepared_elsewhere_is_looked_at_again_and_jobs_run_meanwhile(device):
    spare = Spare(1)
    ready = threading.Event()
    spare.next_piece_ms = lambda *, is_idle: SHORT if ready.is_set() and not spare.is_done else None
    await device.submit(lambda: device.set_spare(spare))
    for number in range(3):
        assert await device.submit(lambda number=number: number) == number
    assert spare.seen == []
    ready.set()
    await until(lambda: spare.is_done)
    assert await device.submit(lambda: 5) == 5
