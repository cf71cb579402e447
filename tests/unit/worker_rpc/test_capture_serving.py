"""A worker service whose executor has something to capture: it serves meanwhile and says how far it is."""

import asyncio
import contextlib
import math
import threading
from dataclasses import replace

from protos.wire.enums import GraphPhase, WorkerState
from protos.wire.worker_info import Buckets
from tests.support.fake_executor import FakeExecutor
from tests.support.plans import decode, extend, make_info, make_limits, make_plan
from tests.support.running_worker import running_service
from tests.support.worker_client import WorkerClient
from worker_svc.config import ObservabilityConfig, ServerConfig
from worker_svc.executor import CaptureProgress, CaptureTotals
from worker_svc.rpc.capture_work import MIN_BUDGET_MS, UNKNOWN_BUDGET_MS, budget_ms
from worker_svc.rpc.listeners import Listeners
from worker_svc.rpc.service import WorkerService

PENDING = Buckets(phase=GraphPhase.DECODE, sizes=(1, 2), live=())


class FakeCaptures:
    """Two buckets of two pieces each. A piece runs for each release of `pieces`."""

    wait_s = 0.0

    def __init__(self):
        self.pieces = threading.Semaphore(0)
        self.progress = CaptureProgress(buckets=(PENDING,), is_done=False)

    def next_ms(self, *, is_idle):
        return None if self.progress.is_done else math.inf

    def capture_next(self, give_way, *, is_idle):
        assert self.pieces.acquire(timeout=30)
        give_way(1.0)
        assert self.pieces.acquire(timeout=30)
        live = self.progress.buckets[0].live
        live = (2,) if not live else (1, 2)
        self.progress = CaptureProgress(
            buckets=(replace(PENDING, live=live),),
            totals={GraphPhase.DECODE: CaptureTotals(captured=len(live), seconds=0.5, graph_bytes=99)},
            is_done=len(live) == 2,
        )


class CapturingFake(FakeExecutor):
    def __init__(self, captures):
        super().__init__(replace(make_info(limits=make_limits(window=1)), buckets=(PENDING,)))
        self.captures = captures


@contextlib.asynccontextmanager
async def serving(captures):
    server = ServerConfig(port=0, health_port=0)
    listeners = Listeners(server, ObservabilityConfig(metrics_port=0))
    service = WorkerService(lambda: CapturingFake(captures), listeners, server)
    async with running_service(service):
        client = WorkerClient(service.listeners.port)
        try:
            yield client, service
        finally:
            captures.pieces.release(100)
            await client.close()


async def report_with(reports, condition):
    async with asyncio.timeout(30):
        async for report in reports:
            if condition(report):
                return report
    raise AssertionError("the reports ended")


async def behind_a_piece(captures, call):
    """The outcome of `call`, which the device can serve only when the piece that runs now has ended."""
    asked = asyncio.create_task(call)
    await asyncio.sleep(0.1)
    assert not asked.done()
    captures.pieces.release(1)
    return await asked


def sample(service, name, **labels):
    return service.listeners.registry.get_sample_value(f"forwardplane_worker_{name}", labels)


async def test_plans_run_between_pieces_and_live_buckets_are_reported_as_they_appear():
    captures = FakeCaptures()
    async with serving(captures) as (client, service):
        reports = client.report()
        first = await report_with(reports, lambda report: report.capture_budget_ms > 0)
        assert first.state == WorkerState.CAPTURING
        assert first.capture_budget_ms == UNKNOWN_BUDGET_MS
        info = await behind_a_piece(captures, client.attached())
        assert info.buckets == (PENDING,)
        stream, _ = await client.open(incarnation=info.incarnation)
        await behind_a_piece(captures, stream.run(make_plan([extend(0, 5)], seq=1, info=make_info())))
        captured = await report_with(reports, lambda report: list(report.buckets[0].live) == [2])
        assert captured.state == WorkerState.CAPTURING
        assert captured.device_counter > first.device_counter
        await behind_a_piece(captures, stream.run(make_plan([decode(5)], seq=2, info=make_info())))
        captures.pieces.release(1)
        done = await report_with(reports, lambda report: list(report.buckets[0].live) == [1, 2])
        done = await report_with(reports, lambda report: report.capture_budget_ms == 0)
        assert done.state == WorkerState.SERVING
        assert (await client.attached(epoch=8)).buckets == (replace(PENDING, live=(1, 2)),)
        assert sample(service, "captured_graphs", phase="decode") == 2
        assert sample(service, "graph_memory_bytes", phase="decode") == 99
        assert sample(service, "capture_seconds_total", phase="decode") == 0.5
        assert sample(service, "failed_captures_total", phase="decode") == 0
        assert sample(service, "memory_bytes", kind="graphs") == 99
        assert sample(service, "startup_seconds", stage="capture") == 0.5


async def test_a_worker_that_leaves_gives_up_its_captures():
    captures = FakeCaptures()
    async with serving(captures) as (client, _):
        await report_with(client.report(), lambda report: report.capture_budget_ms > 0)
        captures.pieces.release(1)
    assert not captures.progress.is_done


def test_a_piece_announces_more_time_than_it_is_expected_to_take():
    assert budget_ms(math.inf) == UNKNOWN_BUDGET_MS
    assert budget_ms(1.0) == MIN_BUDGET_MS
    assert budget_ms(700.0) == 7000
