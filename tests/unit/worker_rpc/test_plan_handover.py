"""A plan is handed to the device thread before the one in front of it ends; whatever happens then, order holds."""

import asyncio
import random
import threading
import time

import pytest
from prometheus_client import CollectorRegistry

from tests.support.fake_executor import FakeExecutor
from tests.support.plans import INCARNATION, extend, make_identity, make_info, make_limits, make_plan
from worker_svc.metrics import create_metrics
from worker_svc.protocol.messages import ArrivedPlan, AttachCall, StreamOpening
from worker_svc.rpc.device_thread import DeviceThread
from worker_svc.rpc.device_work import DeviceWork
from worker_svc.rpc.plan_observer import PlanObserver
from worker_svc.rpc.protocol_loop import LoopParts, ProtocolLoop

INFO = make_info(limits=make_limits(window=2, cached_results=4))


class Recording(FakeExecutor):
    """Which (epoch, seq) ran, and whether two ever ran at once."""

    def __init__(self, pause_s=lambda: 0.0):
        super().__init__(INFO)
        self.ran = []
        self.busy = threading.Lock()
        self.pause_s = pause_s

    def execute(self, plan):
        assert self.busy.acquire(blocking=False)
        try:
            time.sleep(self.pause_s())
            result = super().execute(plan)
            self.ran.append((plan.identity.epoch, plan.identity.seq))
            return result
        finally:
            self.busy.release()


class Rig:
    def __init__(self, executor):
        self.executor = executor
        self.device = DeviceThread()
        self.work = DeviceWork(executor, time.monotonic_ns)
        observer = PlanObserver(create_metrics(CollectorRegistry()))
        self.loop = ProtocolLoop(LoopParts(info=INFO, device=self.device, work=self.work, observer=observer))
        self.epoch = 0
        self.number = 0
        self.stream = None

    async def attach(self):
        self.epoch += 1
        self.number = 0
        await self.loop.attach(AttachCall(epoch=self.epoch, term=1, protocol_min=1, protocol_max=1))
        return await self.open()

    async def open(self):
        """The seq that the worker expects."""
        self.number += 1
        self.stream = self.loop.new_stream()
        opening = StreamOpening(epoch=self.epoch, term=1, incarnation=INCARNATION, stream_number=self.number)
        self.loop.open_stream(self.stream, opening)
        self.replies = self.stream.replies()
        return (await anext(self.replies)).opened.expected_seq

    def send(self, seq):
        identity = make_identity(epoch=self.epoch, term=1, seq=seq)
        plan = make_plan([extend(0, 3)], info=INFO, identity=identity)
        self.loop.receive(self.stream, ArrivedPlan(identity, plan))

    async def stop(self):
        await self.loop.stop("test")
        await self.device.stop()


@pytest.fixture
async def rig():
    made = Rig(Recording())
    yield made
    made.executor.may_run.set()
    await made.stop()


async def test_the_next_plan_begins_while_the_loop_is_busy(rig):
    await rig.attach()
    rig.executor.may_run.clear()
    rig.send(1)
    rig.send(2)
    rig.executor.may_run.set()
    _wait(lambda: rig.executor.ran == [(1, 1), (1, 2)])  # the loop has had no turn


async def test_a_stream_reopened_behind_a_plan_that_began_unseen_expects_the_one_after_it(rig):
    await rig.attach()
    rig.executor.may_run.clear()
    rig.send(1)
    rig.send(2)
    rig.executor.may_run.set()
    _wait(lambda: len(rig.executor.ran) == 2)
    assert await rig.open() == 3
    rig.send(1)
    rig.send(2)
    rig.send(3)
    results = [await anext(rig.replies) for _ in range(3)]
    assert all(reply.HasField("result") for reply in results)
    assert rig.executor.ran == [(1, 1), (1, 2), (1, 3)]


async def test_a_stream_reopened_before_that_takes_the_offer_back(rig):
    await rig.attach()
    rig.executor.may_run.clear()
    rig.send(1)
    rig.send(2)
    assert await rig.open() == 2
    rig.executor.may_run.set()
    _wait(lambda: rig.executor.ran == [(1, 1)])
    await asyncio.sleep(0.02)
    assert rig.executor.ran == [(1, 1)]


async def test_nothing_of_an_older_pair_begins_once_a_newer_one_is_heard_of(rig):
    await rig.attach()
    rig.executor.may_run.clear()
    rig.send(1)
    rig.send(2)
    attaching = asyncio.create_task(rig.attach())
    await asyncio.sleep(0)
    rig.executor.may_run.set()
    assert await attaching == 1
    assert rig.executor.ran == [(1, 1)]


def _wait(condition):
    """Without giving the event loop a turn."""
    limit = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


@pytest.mark.parametrize("seed", range(12))
async def test_at_random_moments_of_reopening_and_attaching_plans_run_once_and_in_order(seed):
    draw = random.Random(seed)
    rig = Rig(Recording(lambda: draw.choice([0, 0, 0.0005])))
    try:
        answered = await _random_life(rig, draw)
    finally:
        await rig.stop()
    assert sorted(rig.executor.ran) == rig.executor.ran
    for epoch in range(1, rig.epoch + 1):
        seqs = [seq for of, seq in rig.executor.ran if of == epoch]
        assert seqs == list(range(1, len(seqs) + 1))
    assert answered > 20


async def _random_life(rig, draw):
    next_seq = await rig.attach()
    in_flight, answered = [], 0
    for _ in range(150):
        move = draw.random()
        if move < 0.05:
            next_seq, in_flight = await rig.attach(), []
        elif move < 0.15:
            expected = await rig.open()
            assert not in_flight or in_flight[0] <= expected <= next_seq
            for seq in in_flight:
                rig.send(seq)
        elif move < 0.6 and len(in_flight) < 2:
            rig.send(next_seq)
            in_flight.append(next_seq)
            next_seq += 1
        elif in_flight:
            reply = await asyncio.wait_for(anext(rig.replies), 30)
            assert reply.HasField("result"), reply
            in_flight.pop(0)
            answered += 1
        if draw.random() < 0.3:
            await asyncio.sleep(draw.choice([0, 0.0005]))
    return answered
