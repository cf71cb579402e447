import asyncio
import logging
from dataclasses import replace

import pytest

from protos.forwardplane.v1.worker_pb2 import DrainNotice, ExecuteReply, Gap, NeedFull, ResultMessage, Stale
from protos.wire.codec import checksum, encode_result
from protos.wire.enums import Feature, GraphPhase, WorkerState
from protos.wire.errors import DataFault, StaleEpoch
from protos.wire.result import ForwardResult
from protos.wire.worker_info import Buckets
from scheduler_svc.core.events import (
    BucketsChanged,
    ResultReceived,
    WorkerAttached,
    WorkerDoubted,
    WorkerLost,
    WorkerTrusted,
)
from scheduler_svc.links.epoch import FileEpoch
from scheduler_svc.links.exchange import MAX_FRUITLESS_STREAMS
from tests.support.core_harness import small_info
from tests.support.fake_worker_server import NOTHING, FakeWorkerServer
from tests.support.link_rig import LIMIT_S, SESSION, expected_of, rig
from tests.support.plans import CORE_FEATURES


async def test_a_worker_is_attached_and_answers_plans_in_order():
    async with rig() as r:
        (attached,) = await r.listener.until(WorkerAttached)
        assert (attached.worker, attached.info, attached.epoch, attached.term) == ("w0", r.server.info, 1, 1)
        assert (r.link.state, r.link.info, r.metric("worker_up", worker="w0")) == (
            WorkerState.SERVING,
            attached.info,
            1,
        )
        r.send()
        r.send()
        assert r.link.num_in_flight == 2
        results = await r.listener.until(ResultReceived, 2)
        assert [event.result.identity.seq for event in results] == [1, 2]
        assert results[0].result.rows.handles.tolist() == r.plans[0].rows.handles.tolist()
        assert r.link.num_in_flight == 0
        assert (r.link.counts.plans, r.link.counts.plan_rows) == (2, 2)
        assert sum(counts.misses.total() for counts in r.link.counts.graphs.values()) == 2
        assert r.metric("plan_rtt_seconds_count", worker="w0") == 2
        assert r.metric("plan_overhead_seconds_count", worker="w0") == 2
        assert r.metric("plan_bytes_count", encoding="full") == 2
        assert r.metric("plans_in_flight", worker="w0") == 0
        assert r.metric("worker_state", worker="w0", state="serving") == 1
        assert r.metric("epoch") == 1


async def test_a_link_that_is_stopped_tells_that_its_worker_is_lost():
    async with rig() as r:
        await r.listener.until(WorkerAttached)
    assert r.listener.events[-1] == WorkerLost("w0", died=False)
    assert (r.link.info, r.metric("worker_up", worker="w0")) == (None, 0)


async def test_a_worker_that_appears_later_is_attached(free_port, caplog):
    caplog.set_level(logging.INFO)
    server = FakeWorkerServer(small_info())
    port = free_port()
    async with rig(server=server, absent_on=port) as r:
        async with asyncio.timeout(LIMIT_S):
            while (r.metric("attach_refusals_total", worker="w0", reason="NO_SERVER") or 0) < 2:
                await asyncio.sleep(0.005)
        said = [record for record in caplog.records if record.msg.startswith("worker cannot be attached")]
        assert [record.levelname for record in said] == ["INFO"]
        await server.start(port)
        (attached,) = await r.listener.until(WorkerAttached)
        assert attached.term >= 3


async def test_a_broken_stream_is_opened_again_and_its_plans_are_sent_again():
    async with rig() as r:
        await r.listener.until(WorkerAttached)
        r.server.released.clear()
        r.send()
        r.send()
        await asyncio.sleep(0.05)
        r.server.break_streams()
        r.server.released.set()
        await r.listener.until(ResultReceived, 2)
        r.send()
        results = await r.listener.until(ResultReceived, 3)
        assert [event.result.identity.seq for event in results] == [1, 2, 3]
        assert not [event for event in r.listener.events if isinstance(event, WorkerLost)]
        assert [plan.identity.seq for plan in r.server.worker.executed] == [1, 2, 3]
        assert r.server.attaches == [(1, 1)]
        assert r.server.openings == [(1, 1, 1), (1, 1, 2)]
        assert r.metric("plan_streams_reopened_total", worker="w0") == 1


async def test_a_worker_whose_stream_is_broken_is_doubted_until_it_is_open_again():
    async with rig() as r:
        await r.listener.until(WorkerAttached)
        r.server.break_streams()
        await r.listener.until(WorkerTrusted)
        assert [type(event) for event in r.listener.events] == [WorkerAttached, WorkerDoubted, WorkerTrusted]


async def test_a_restarted_worker_is_dead_at_once_and_attached_again():
    async with rig() as r:
        await r.listener.until(WorkerAttached)
        r.server.info = replace(r.server.info, incarnation=b"another-process!")
        r.server.break_streams()
        (lost,) = await r.listener.until(WorkerLost)
        assert lost.died
        await r.listener.until(WorkerAttached, 2)


async def test_a_stream_that_breaks_again_and_again_without_a_result_ends_the_term():
    async with rig() as r:
        await r.listener.until(WorkerAttached)
        r.server.answer = lambda plan: DataFault("the checksum is wrong")
        r.send()
        await r.listener.until(WorkerLost)
        assert r.server.openings[: MAX_FRUITLESS_STREAMS + 1] == [
            (1, 1, number) for number in range(1, MAX_FRUITLESS_STREAMS + 2)
        ]


async def test_plans_for_a_lost_worker_go_nowhere():
    async with rig() as r:
        await r.listener.until(WorkerAttached)
        r.server.released.clear()
        r.send()
        await r.server.stop()
        await r.listener.until(WorkerLost)
        await asyncio.sleep(0)
        r.send()
        assert r.link.num_in_flight == 0


@pytest.mark.parametrize(
    ("answer", "reason", "nack"),
    [
        (ExecuteReply(gap=Gap(expected_seq=1, received_seq=2)), "SYNC_ERROR", "gap"),
        (ExecuteReply(stale=Stale(seq=1, expected_seq=2)), "SYNC_ERROR", "stale"),
        (ExecuteReply(need_full=NeedFull(seq=1)), "SYNC_ERROR", "need_full"),
        (ExecuteReply(), "SYNC_ERROR", "unknown"),
        (DataFault("the checksum is wrong"), "DATA_FAULT", None),
        (ExecuteReply(result=ResultMessage(body=b"abc", crc32=0)), "DATA_FAULT", None),
        (ExecuteReply(result=ResultMessage(body=b"\xff", crc32=checksum(b"\xff"))), "DATA_FAULT", None),
    ],
    ids=lambda value: str(value)[:20] if not isinstance(value, ExecuteReply) else value.WhichOneof("reply"),
)
async def test_an_answer_that_is_no_result_ends_the_term(answer, reason, nack):
    async with rig() as r:
        await r.listener.until(WorkerAttached)
        r.server.answer = lambda plan: answer
        r.send()
        await r.listener.until(WorkerLost)
        assert not [event for event in r.listener.events if isinstance(event, ResultReceived)]
        await r.listener.until(WorkerAttached, 2)
        assert r.metric("worker_losses_total", worker="w0", reason=reason) == 1
        if nack is not None:
            assert r.metric("plan_nacks_total", reason=nack) == (2 if nack == "gap" else 1), "a gap is filled once"


async def test_a_plan_whose_base_is_gone_is_sent_in_full_and_the_core_hears_nothing():
    server = FakeWorkerServer(small_info(window=2, features=CORE_FEATURES | {Feature.DELTAS}))
    async with rig(server=server, session=replace(SESSION, min_delta_bytes=0)) as r:
        await r.listener.until(WorkerAttached)
        got = []
        r.server.answer = lambda plan: got.append((plan.identity.seq, plan.delta is not None)) or _answer(r, plan)
        r.send()
        await r.listener.until(ResultReceived, 1)
        r.send()
        r.send()
        results = await r.listener.until(ResultReceived, 3)
        assert [event.result.identity.seq for event in results] == [1, 2, 3]
        assert got[:4] == [(1, False), (2, True), (3, True), (2, False)]
        assert got[4:] == [(3, True)]
        assert r.metric("plan_nacks_total", reason="need_full") == 1
        assert r.metric("plan_resends_total") == 2
        assert r.metric("plan_bytes_count", encoding="delta") == 2
        assert not [event for event in r.listener.events if isinstance(event, WorkerLost)]


def _answer(r, plan):
    """Of a worker that forgot plan 1, and so drops plan 3 as well."""
    seq = plan.identity.seq
    if seq == 2 and plan.delta is not None:
        r.dropping = True
        return ExecuteReply(need_full=NeedFull(seq=2))
    if seq == 3 and r.dropping:
        r.dropping = False
        return NOTHING
    whole = r.plans[seq - 1]
    return result_reply(r.server.worker.execute(whole))


async def test_a_gap_is_filled_by_sending_from_the_expected_plan_on():
    async with rig() as r:
        await r.listener.until(WorkerAttached)
        lost = [2]

        def answer(plan):
            seq = plan.identity.seq
            if lost and seq == lost[0]:
                lost[0] += 100
                return NOTHING
            if seq == 3 and lost == [102]:
                lost.clear()
                return ExecuteReply(gap=Gap(expected_seq=2, received_seq=3))
            return None

        r.server.answer = answer
        r.send()
        await r.listener.until(ResultReceived, 1)
        r.send()
        r.send()
        results = await r.listener.until(ResultReceived, 3)
        assert [event.result.identity.seq for event in results] == [1, 2, 3]
        assert r.metric("plan_resends_total") == 2


async def test_a_result_that_comes_twice_is_counted_and_dropped():
    async with rig() as r:
        await r.listener.until(WorkerAttached)
        first = []

        def answer(plan):
            if plan.identity.seq == 1:
                first.append(r.server.worker.execute(plan))
                return result_reply(first[0])
            return result_reply(first[0]) if plan.identity.seq == 2 else None

        r.server.answer = answer
        r.send()
        await r.listener.until(ResultReceived, 1)
        r.send()
        async with asyncio.timeout(LIMIT_S):
            while not r.metric("late_results_total"):
                await asyncio.sleep(0.005)
        assert not [event for event in r.listener.events if isinstance(event, WorkerLost)]


def result_reply(result: ForwardResult) -> ExecuteReply:
    body = encode_result(result)
    return ExecuteReply(result=ResultMessage(body=body, crc32=checksum(body)))


@pytest.mark.parametrize("change", [{"epoch": 9}, {"term": 9}, {"incarnation": b"o" * 16}])
async def test_a_result_of_another_life_is_dropped_and_counted(change):
    async with rig() as r:
        await r.listener.until(WorkerAttached)

        def late(plan):
            r.server.answer = lambda plan: None
            result = r.server.worker.execute(plan)
            r.server.worker.reset()
            return result_reply(replace(result, identity=replace(result.identity, **change)))

        r.server.answer = late
        r.send()
        async with asyncio.timeout(LIMIT_S):
            while not r.metric("late_results_total"):
                await asyncio.sleep(0.005)
        assert r.link.num_in_flight == 1
        assert [type(event) for event in r.listener.events] == [WorkerAttached]


async def test_a_result_out_of_order_ends_the_term():
    async with rig() as r:
        await r.listener.until(WorkerAttached)

        def skips(plan):
            result = r.server.worker.execute(plan)
            return result_reply(replace(result, identity=replace(result.identity, seq=2)))

        r.server.answer = skips
        r.send()
        r.send()
        await r.listener.until(WorkerLost)
        assert r.metric("worker_losses_total", worker="w0", reason="SYNC_ERROR") == 1


async def test_a_worker_whose_reports_stop_is_lost():
    async with rig() as r:
        await r.listener.until(WorkerAttached)
        r.server.reports_stopped = True
        await r.listener.until(WorkerLost)


async def test_a_device_that_stands_still_is_lost_though_it_reports():
    async with rig() as r:
        await r.listener.until(WorkerAttached)
        r.server.released.clear()
        r.send()
        await r.listener.until(WorkerLost)


async def test_buckets_that_come_live_reach_the_core_once():
    pending = Buckets(phase=GraphPhase.DECODE, sizes=(1, 2), live=())
    live = replace(pending, live=(2,), graph_bytes=7)
    async with rig(server=FakeWorkerServer(replace(small_info(window=2), buckets=(pending,)))) as r:
        await r.listener.until(WorkerAttached)
        await asyncio.sleep(0.1)
        assert r.link.info.buckets == (pending,), "a worker that reports none keeps what it said"
        r.server.buckets = (live,)
        (event,) = await r.listener.until(BucketsChanged)
        assert event == BucketsChanged("w0", (live,))
        assert r.link.info.buckets == (live,)
        await asyncio.sleep(0.1)
        assert len(await r.listener.until(BucketsChanged)) == 1


async def test_a_failed_device_is_lost_at_its_report():
    async with rig() as r:
        await r.listener.until(WorkerAttached)
        r.server.state = WorkerState.FAILED
        await r.listener.until(WorkerLost)
        assert r.metric("worker_losses_total", worker="w0", reason="DEVICE_FAULT") == 1


async def test_a_notice_of_draining_is_shown_and_is_no_loss():
    async with rig(session=replace(SESSION, report_lost_s=LIMIT_S, plan_timeout_s=LIMIT_S)) as r:
        await r.listener.until(WorkerAttached)
        r.server.reports_stopped = True
        r.server.answer = lambda plan: ExecuteReply(drain=DrainNotice(reason="test"))
        r.send()
        async with asyncio.timeout(LIMIT_S):
            while r.link.state is not WorkerState.DRAINING:
                await asyncio.sleep(0.005)
        assert r.metric("worker_state", worker="w0", state="draining") == 1
        assert [type(event) for event in r.listener.events] == [WorkerAttached, WorkerDoubted]


async def test_a_new_term_that_does_not_begin_at_the_first_plan_is_not_used():
    server = FakeWorkerServer(small_info())
    server.expected_seq_at_open = 5
    async with rig(server=server) as r:
        async with asyncio.timeout(LIMIT_S):
            while len(server.attaches) < 2:
                await asyncio.sleep(0.005)
        assert r.listener.events == []
        server.expected_seq_at_open = 1
        await r.listener.until(WorkerAttached)


async def test_before_service_a_higher_epoch_is_overtaken():
    server = FakeWorkerServer(small_info())
    server.highest = (6, 40)
    async with rig(server=server) as r:
        (attached,) = await r.listener.until(WorkerAttached)
        assert attached.epoch == 7
        assert not [event for event in r.listener.events if isinstance(event, StaleEpoch)]


async def test_the_file_source_is_fenced_instead(tmp_path):
    server = FakeWorkerServer(small_info())
    server.highest = (6, 40)
    async with rig(server=server, epoch=FileEpoch(tmp_path / "epoch")) as r:
        (error,) = await r.listener.until(StaleEpoch)
        assert (error.highest_epoch, error.highest_term) == (6, 40)
        assert server.attaches == []


async def test_in_service_another_scheduler_fences_this_one():
    async with rig() as r:
        await r.listener.until(WorkerAttached)
        r.server.highest = (2, 1)
        r.send()
        (error,) = await r.listener.until(StaleEpoch)
        assert error.highest_epoch == 2
        assert [type(event) for event in r.listener.events] == [WorkerAttached, WorkerLost, StaleEpoch]
        assert r.server.attaches == [(1, 1)]


async def test_a_worker_of_another_model_is_refused_until_it_is_replaced(caplog):
    server = FakeWorkerServer(small_info())
    wanted = expected_of(server.info)
    fingerprints = server.info.fingerprints
    server.info = replace(server.info, fingerprints=replace(fingerprints, tokenizer="another"))
    async with rig(server=server, expected=wanted) as r:
        async with asyncio.timeout(LIMIT_S):
            while len(server.attaches) < 3:
                await asyncio.sleep(0.005)
        assert r.listener.events == []
        assert r.metric("attach_refusals_total", worker="w0", reason="INVALID_MODEL_FILE") >= 2
        assert len([record for record in caplog.records if record.msg.startswith("worker cannot be attached")]) == 1
        server.info = replace(server.info, fingerprints=fingerprints)
        await r.listener.until(WorkerAttached)


async def test_a_worker_the_core_cannot_plan_for_is_refused():
    server = FakeWorkerServer(small_info(modes=frozenset()))
    async with rig(server=server) as r:
        async with asyncio.timeout(LIMIT_S):
            while not r.metric("attach_refusals_total", worker="w0", reason="UNSUPPORTED"):
                await asyncio.sleep(0.005)
        assert r.listener.events == []
