"""The worker service on loopback over a fake executor: every rule of the plan channel, as a scheduler sees it."""

import asyncio
import contextlib
import random

import pytest

from protos.forwardplane.v1.worker_pb2 import DrainRequest, ExecuteRequest
from protos.service.lifecycle import ExitCode
from protos.wire.codec import checksum, decode_plan, encode_plan
from protos.wire.enums import RowStatus
from protos.wire.errors import (
    DataFault,
    DeviceFault,
    Draining,
    EngineError,
    InternalFault,
    InvalidRequest,
    Loading,
    ProtocolMismatch,
    StaleEpoch,
    SyncError,
    UnsupportedFeature,
    WindowFull,
    WrongIncarnation,
)
from protos.wire.validate import validate_plan
from tests.support.fake_executor import FakeExecutor
from tests.support.plans import INCARNATION, decode, extend, make_info, make_limits, make_plan, with_element, with_value
from tests.support.running_worker import running_service
from tests.support.waiting import until
from tests.support.worker_client import WorkerClient
from worker_svc.config import ObservabilityConfig, ServerConfig
from worker_svc.rpc.listeners import Listeners
from worker_svc.rpc.service import WorkerService


@contextlib.asynccontextmanager
async def serving(*, window=1, build=None, **options):
    """A running service, its executor and a client; the exit code is checked at the end."""
    executor = FakeExecutor(make_info(limits=make_limits(window=window)), **options)
    server = ServerConfig(port=0, health_port=0)
    listeners = Listeners(server, ObservabilityConfig(metrics_port=0))
    service = WorkerService(build or (lambda: executor), listeners, server)
    async with running_service(service) as running:
        client = WorkerClient(service.listeners.port)
        try:
            yield executor, client, service
        finally:
            executor.may_run.set()
            await client.close()
    is_fatal = options.get("fault") is not None and not isinstance(options["fault"], UnsupportedFeature)
    assert running.result() == (ExitCode.FAULT if is_fatal else ExitCode.OK)
    assert executor.is_closed == (build is None)


@contextlib.asynccontextmanager
async def opened(**options):
    async with serving(**options) as (executor, client, _):
        await client.attached()
        stream, expected_seq = await client.open()
        assert expected_seq == 1
        yield executor, client, stream


def plan(seq, cached=0):
    return make_plan([decode(cached) if cached else extend(0, 5)], seq=seq, info=make_info())


# --- attach


async def test_attach_answers_what_the_worker_is_and_plans_run_on_the_device_thread():
    async with serving() as (executor, client, _):
        assert await client.attached() == executor.worker_info()
        stream, _ = await client.open()
        result = await stream.run(plan(1))
        assert result.rows.statuses.tolist() == [RowStatus.TOKEN]
        assert result.timings.parse_ns > 0
        assert result.timings.receive_ns > 0
        assert result.timings.wait_ns > 0
        assert executor.threads == {"device"}


async def test_attach_races_leave_the_highest_pair_in_charge():
    async with serving() as (executor, client, _):
        await client.attached(epoch=1, term=1)
        pairs = [(epoch, term) for epoch in range(2, 6) for term in range(1, 4)]
        random.Random(5).shuffle(pairs)
        answers = await asyncio.gather(*(client.attach(epoch, term) for epoch, term in pairs), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        assert all(isinstance(error, StaleEpoch) for error in refused)
        with pytest.raises(StaleEpoch) as caught:
            await client.attach(5, 2)
        assert (caught.value.highest_epoch, caught.value.highest_term) == (5, 3)
        resets = executor.resets
        assert await client.attach(5, 3) == executor.worker_info()
        assert executor.resets == resets, "an identical retry resets nothing"
        with pytest.raises(StaleEpoch):
            await client.open(epoch=5, term=2)
        stream, _ = await client.open(epoch=5, term=3)
        stream.call.cancel()


async def test_a_new_pair_waits_for_the_running_plan_and_ends_the_old_stream():
    async with opened() as (executor, client, stream):
        executor.may_run.clear()
        await stream.send(plan(1))
        await until(lambda: executor.threads, timeout_s=30)
        attaching = asyncio.create_task(client.attach(8, 1))
        with pytest.raises(StaleEpoch):
            await stream.read()
        await asyncio.sleep(0.02)
        assert not attaching.done()
        executor.may_run.set()
        await attaching
        again, expected_seq = await client.open(epoch=8, term=1)
        assert expected_seq == 1
        again.call.cancel()


async def test_a_peer_of_another_protocol_is_refused():
    async with serving() as (_, client, _):
        await client.attached()
        with pytest.raises(ProtocolMismatch):
            await client.attach(9, 9, protocol=(2, 5))


async def test_attach_while_loading_is_refused_and_reports_say_so():
    with_device = FakeExecutor(make_info())
    with_device.may_run.clear()

    def slow_build():
        assert with_device.may_run.wait(30)
        return with_device

    async with serving(build=slow_build) as (_, client, _):
        with pytest.raises(Loading):
            await client.attach()
        with pytest.raises(Loading):
            await client.open()
        call = client.report()
        report = await call.read()
        assert (report.state, report.incarnation) == (1, b"")
        with_device.may_run.set()
        while report.state != 3:
            report = await call.read()
        assert report.incarnation == INCARNATION
        call.cancel()
    assert with_device.is_closed


# --- the stream


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"epoch": 6}, StaleEpoch),
        ({"epoch": 8}, InvalidRequest),
        ({"incarnation": bytes(16)}, WrongIncarnation),
        ({"number": 1}, SyncError),
    ],
)
async def test_a_stream_of_another_life_ends(wrong, error):
    async with opened() as (_, client, stream):
        with pytest.raises(error):
            await client.open(**{"number": 2, **wrong})
        assert (await stream.run(plan(1))).rejection is None


async def test_plans_run_in_order_and_duplicates_get_the_stored_result():
    async with opened() as (executor, _, stream):
        tokens = [(await stream.run(plan(seq, cached=seq + 4))).rows.token_ids.tolist() for seq in range(1, 5)]
        for seq in (4, 2, 3):
            again = await stream.run(plan(seq, cached=seq + 4))
            assert again.rows.token_ids.tolist() == tokens[seq - 1]
        assert [done.identity.seq for done in executor.executed] == [1, 2, 3, 4]


async def test_a_gap_is_answered_and_a_forgotten_plan_is_stale():
    async with opened() as (executor, _, stream):
        await stream.send(plan(3))
        reply = await stream.read()
        assert (reply.gap.expected_seq, reply.gap.received_seq) == (1, 3)
        for seq in range(1, 8):
            await stream.run(plan(seq))
        await stream.send(plan(1))
        reply = await stream.read()
        assert (reply.stale.seq, reply.stale.expected_seq) == (1, 8)
        assert executor.calls == 7


async def test_a_reopened_stream_gets_the_running_plans_result_once():
    async with opened(window=2) as (executor, client, stream):
        executor.may_run.clear()
        await stream.send(plan(1))
        await until(lambda: executor.threads, timeout_s=30)
        await stream.send(plan(2))
        again, expected_seq = await client.open(2)
        assert expected_seq == 2
        with pytest.raises(SyncError):
            await stream.read()
        await again.send(plan(1))
        await again.send(plan(2))
        executor.may_run.set()
        assert [(await again.result()).identity.seq for _ in range(2)] == [1, 2]
        assert executor.calls == 2


async def test_a_lost_stream_is_reopened_and_nothing_runs_twice():
    async with opened() as (executor, client, stream):
        executor.may_run.clear()
        await stream.send(plan(1))
        await until(lambda: executor.threads, timeout_s=30)
        stream.call.cancel()
        executor.may_run.set()
        await until(lambda: executor.calls == 1, timeout_s=30)
        again, expected_seq = await client.open(2)
        assert expected_seq == 2
        assert (await again.run(plan(1))).identity.seq == 1
        assert executor.calls == 1


async def test_a_plan_over_the_window_is_refused_in_its_place():
    async with opened(window=1) as (executor, _, stream):
        executor.may_run.clear()
        await stream.send(plan(1))
        await stream.send(plan(2))
        await stream.send(plan(9))
        assert (await stream.read()).gap.expected_seq == 3
        executor.may_run.set()
        assert (await stream.result()).rejection is None
        assert (await stream.result()).rejection.reason == WindowFull.reason
        assert (await stream.run(plan(3))).rejection is None


async def test_a_caller_that_ends_its_requests_gets_the_last_result_first():
    async with opened() as (_, _, stream):
        await stream.send(plan(1))
        await stream.call.done_writing()
        assert (await stream.result()).identity.seq == 1
        assert not await stream.read()


async def test_a_caller_that_does_not_read_is_not_listened_to():
    async with opened() as (executor, _, stream):
        await stream.run(plan(1))
        for _ in range(200):
            await stream.send(plan(1))
        for _ in range(200):
            assert (await stream.result()).identity.seq == 1
        assert executor.calls == 1


# --- bad plans


@pytest.mark.parametrize(
    ("path", "index", "value"),
    [
        ("tokens.ids", 0, 49152),
        ("tokens.ids", 0, -1),
        ("page_tables.0.indices", 0, 0),
        ("page_tables.0.indices", 0, 1024),
        ("rows.seq_lens", 0, 2**31 - 1),
        ("rows.first_positions", 0, -5),
    ],
)
async def test_an_invalid_plan_is_refused_in_order_and_the_device_untouched(path, index, value):
    async with opened() as (executor, _, stream):
        result = await stream.run(with_element(plan(1), path, index, value))
        assert result.rejection.reason == "INVALID_PLAN"
        assert result.rejection.field
        assert executor.calls == 0
        assert (await stream.run(plan(2))).rejection is None


async def test_a_plan_that_needs_what_is_not_here_is_refused():
    async with opened() as (executor, _, stream):
        wanted = with_value(plan(1), "identity.required_features", (9999,))
        assert (await stream.run(wanted)).rejection.reason == UnsupportedFeature.reason
        assert executor.calls == 0


@pytest.mark.parametrize(("body", "crc32"), [(b"junk", 1), (b"\xff" * 50, checksum(b"\xff" * 50)), (b"", 0)])
async def test_unreadable_bytes_end_the_stream_and_consume_no_seq(body, crc32):
    async with opened() as (executor, client, stream):
        await stream.send_bytes(body, crc32)
        with pytest.raises((DataFault, WrongIncarnation)):
            await stream.read()
        again, expected_seq = await client.open(2)
        assert (expected_seq, executor.calls) == (1, 0)
        assert (await again.run(plan(1))).rejection is None


async def test_an_empty_message_and_a_plan_before_the_opening_end_the_call():
    async with serving() as (_, client, _):
        await client.attached()
        for request, error in ((ExecuteRequest(), DataFault), (None, InvalidRequest)):
            stream = type((await client.open(client_number(client)))[0])(client.stub.Execute())
            await (stream.write(request) if request else stream.send(plan(1)))
            with pytest.raises(error):
                await stream.read()


def client_number(client):
    client.number = getattr(client, "number", 0) + 1
    return client.number


async def test_mutated_plans_never_reach_the_device():
    """Bytes changed at random, half of them under a right checksum: refused or ended, and a good plan still runs."""
    draw = random.Random(20240)
    async with serving() as (executor, client, _):
        await client.attached()
        stream, expected_seq = await client.open(client_number(client))
        refusals, ends = [], []
        for _ in range(400):
            rows = [extend(0, draw.randrange(1, 40)) for _ in range(draw.randrange(1, 16))]
            body = mutated(encode_plan(make_plan(rows, seq=expected_seq, info=make_info())), draw)
            entered = executor.entered
            try:
                await stream.send_bytes(body, checksum(body) if draw.random() < 0.8 else draw.getrandbits(32))
                refusals.append(await stream.read())
                expected_seq += refusals[-1].HasField("result")
            except EngineError as error:
                ends.append(error)
                stream, expected_seq = await client.open(client_number(client))
            if executor.entered != entered:
                validate_plan(decode_plan(body), executor.worker_info())
        assert not [error for error in ends if isinstance(error, InternalFault)]
        assert min(len(refusals), len(ends)) > 60
        assert (await stream.run(plan(expected_seq))).rejection is None


def mutated(body, draw):
    changed = bytearray(body)
    kind = draw.randrange(3)
    if kind == 0:
        for _ in range(draw.randrange(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
    elif kind == 1:
        del changed[draw.randrange(len(changed)) :]
    else:
        at = draw.randrange(len(changed))
        changed[at:at] = draw.randbytes(draw.randrange(1, 9))
    return bytes(changed)


# --- reports, drain, faults


async def test_reports_follow_the_device_and_nothing_else():
    async with opened() as (executor, client, stream):
        call = client.report()
        before = await call.read()
        assert (before.epoch, before.term, before.last_finished_seq) == (7, 3, 0)
        assert before.resident_bytes > 1 << 20
        executor.may_run.clear()
        await stream.send(plan(1))
        report = before
        while not (report.last_started_seq == 1 and report.plan_age_ms >= 30):
            report = await call.read()
        assert report.last_finished_seq == 0
        assert report.device_counter == before.device_counter
        executor.may_run.set()
        await stream.result()
        while report.last_finished_seq != 1:
            report = await call.read()
        assert (report.device_counter, report.plan_age_ms) == (before.device_counter + 1, 0)
        call.cancel()


async def test_drain_is_announced_on_the_stream_and_in_reports():
    async with opened() as (_, client, stream):
        reply = await client.stub.Drain(DrainRequest(reason="rollout"))
        assert reply.state == 4
        assert (await stream.read()).drain.reason == "rollout"
        assert (await stream.run(plan(1))).rejection is None
        with pytest.raises(Draining):
            await client.attach(99, 1)


async def test_a_stopping_worker_finishes_the_running_plan_and_ends_its_streams():
    async with serving() as (executor, client, service):
        await client.attached()
        stream, _ = await client.open()
        report = client.report()
        executor.may_run.clear()
        await stream.send(plan(1))
        await until(lambda: executor.threads, timeout_s=30)
        service.lifecycle.request_stop("test")
        assert (await stream.read()).HasField("drain")
        executor.may_run.set()
        assert (await stream.result()).identity.seq == 1
        with pytest.raises(Draining):
            await stream.read()
        states = [message.state async for message in report]
        assert states[-1] == 4


async def test_a_device_fault_ends_the_stream_and_the_process_and_its_cause_is_logged(caplog):
    fault = DeviceFault("broke")
    fault.__cause__ = RuntimeError("what the device said")
    async with opened(fault_at_seq=2, fault=fault) as (_, _, stream):
        assert (await stream.run(plan(1))).rejection is None
        await stream.send(plan(2))
        with pytest.raises(DeviceFault):
            await stream.read()
    assert "what the device said" in caplog.text


async def test_a_bug_below_the_executor_is_a_fault_too(caplog):
    async with opened(fault_at_seq=1, fault=KeyError("bug")) as (_, _, stream):
        await stream.send(plan(1))
        with pytest.raises(InternalFault):
            await stream.read()
    assert "unexpected error" in caplog.text


async def test_an_executor_may_still_refuse_a_plan():
    async with opened(fault_at_seq=1, fault=UnsupportedFeature("not here", field="rows")) as (executor, _, stream):
        result = await stream.run(plan(1))
        assert (result.rejection.reason, result.rejection.field) == ("UNSUPPORTED", "rows")
        assert (await stream.run(plan(2))).rejection is None
        assert executor.calls == 1
