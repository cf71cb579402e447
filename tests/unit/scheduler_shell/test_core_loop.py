import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from protos.wire.enums import FinishReason, WorkerState
from protos.wire.errors import StaleEpoch, UnavailableError
from protos.wire.result import PlanTimings
from scheduler_svc.bridge.convert import error_from_message
from scheduler_svc.bridge.next_tokens import next_tokens_from_message
from scheduler_svc.core.events import (
    CacheFlushRequested,
    Grammar,
    RequestCancelled,
    RequestSubmitted,
    ResultReceived,
    WorkerAttached,
    WorkerLost,
)
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.links.statistics import LinkCounts
from scheduler_svc.loop import CoreLoop
from scheduler_svc.metrics import PREFIX, create_metrics
from tests.support.core_harness import make_spec, mask_answer, oracle, small_info
from tests.support.fake_worker import FakeWorker

LIMIT_S = 30.0
EDGE = 0


class Link:
    """Answers each plan at the next turn of the event loop."""

    def __init__(self, info):
        self.worker = "w0"
        self.counts = LinkCounts()
        self.info = info
        self.state = WorkerState.SERVING
        self.num_in_flight = 0
        self.executor = FakeWorker(info)
        self.listener = None
        self.holds = False
        self.forward_ns = 0

    def send(self, plan):
        self.counts.sent(rows=plan.rows.num_rows, size=1)
        if not self.holds:
            result = replace(self.executor.execute(plan), timings=PlanTimings(forward_ns=self.forward_ns))
            asyncio.get_running_loop().call_soon(self.listener.worker_event, ResultReceived("w0", result))


class Edges:
    """Collects what is sent to the one edge."""

    def __init__(self):
        self.messages = []
        self.connected = [EDGE]
        self.changed = asyncio.Event()

    def send(self, messages):
        self.messages.extend(messages[edge] for edge in messages if edge in self.connected)
        self.changed.set()

    def connections(self):
        return self.connected

    async def until(self, found):
        """The first truthy answer of `found(messages)`."""
        async with asyncio.timeout(LIMIT_S):
            while not (answer := found(self.messages)):
                self.changed.clear()
                await self.changed.wait()
        return answer


class Masks:
    """Answers each question at the next turn of the event loop."""

    def __init__(self):
        self.listener = None
        self.forgotten = []

    def ask(self, wanted):
        asyncio.get_running_loop().call_soon(self.listener.masks_ready, [mask_answer(wanted)])

    def forget(self, stream):
        self.forgotten.append(stream)


class Rig:
    def __init__(self, info, clock=time.monotonic):
        self.registry = CollectorRegistry()
        self.metrics = create_metrics(self.registry)
        self.link = Link(info)
        self.edges = Edges()
        self.loop = CoreLoop(CoreSettings(max_waiting_requests=2), metrics=self.metrics, clock=clock)
        self.link.listener = self.loop
        self.masks = Masks()
        self.masks.listener = self.loop
        self.loop.connect(links={"w0": self.link}, edges=self.edges, masks=self.masks)
        self.running = None

    def attach(self):
        self.loop.worker_event(WorkerAttached("w0", self.link.info, 1, 1))

    def await_a_worker(self):
        """From now on requests wait: a worker is known, and gone."""
        self.attach()
        self.loop.worker_event(WorkerLost("w0"))

    def submit(self, *specs):
        self.loop.edge_events([RequestSubmitted(spec) for spec in specs])

    def updates(self, stream_id):
        return [
            update for message in self.edges.messages for update in message.updates if update.stream_id == stream_id
        ]

    async def end_of(self, stream_id):
        def last(messages):
            return next((u for u in self.updates(stream_id) if u.HasField("finish") or u.HasField("error")), None)

        return await self.edges.until(last)

    def tokens(self, stream_id):
        found = []
        for message in self.edges.messages:
            if message.HasField("next_tokens"):
                found += [
                    token for stream, _, token in next_tokens_from_message(message.next_tokens) if stream == stream_id
                ]
            for update in message.updates:
                if update.stream_id == stream_id:
                    found += np.frombuffer(update.token_ids, "<i4").tolist()
        return found

    def metric(self, name, **labels):
        return self.registry.get_sample_value(PREFIX + name, labels)


@asynccontextmanager
async def rig(**changes):
    made = Rig(small_info(), **changes)
    made.running = asyncio.create_task(made.loop.run())
    try:
        yield made
    finally:
        made.running.cancel()
        await asyncio.wait({made.running})


async def test_a_request_goes_through_and_is_counted():
    async with rig() as r:
        spec = make_spec(1, prompt=7, max_tokens=5)
        r.attach()
        r.submit(spec)
        last = await r.end_of(1)
        assert r.tokens(1) == oracle(r.link.info, spec)
        assert last.finish.reason == int(FinishReason.LENGTH)
        assert (last.usage.prompt_tokens, last.usage.output_tokens) == (7, 5)
        assert r.metric("requests_finished_total", reason="length") == 1
        assert (r.metric("prompt_tokens_total"), r.metric("output_tokens_total")) == (7, 5)
        assert r.metric("scheduled_tokens_total", phase="prefill") == 7
        assert r.metric("scheduled_tokens_total", phase="decode") == 4
        assert (r.metric("batch_rows_count"), r.metric("queue_seconds_count")) == (5, 1)
        assert (r.metric("requests_running"), r.metric("requests_waiting")) == (0, 0)
        assert (r.metric("kv_pages"), r.metric("kv_pages_used"), r.metric("kv_usage_ratio")) == (64, 0, 0)


async def test_a_plan_is_written_before_edges_hear_of_the_tokens_of_the_one_before():
    async with rig() as r:
        happened = []
        send_plan, tell_edges = r.link.send, r.edges.send

        def send(plan):
            asyncio.get_running_loop().call_soon(happened.append, "written")
            send_plan(plan)

        def tell(messages):
            if any(message.updates or message.HasField("next_tokens") for message in messages.values()):
                happened.append("told")
            tell_edges(messages)

        r.link.send, r.edges.send = send, tell
        r.attach()
        r.submit(make_spec(1, max_tokens=4))
        await r.end_of(1)
        assert happened == ["written"] + ["written", "told"] * 3 + ["told"]


async def test_a_grammars_masks_are_asked_for_and_its_stream_forgotten():
    async with rig() as r:
        r.attach()
        spec = make_spec(3, max_tokens=4, grammar=Grammar("regex", "abc"))
        r.submit(spec)
        await r.end_of(3)
        assert r.tokens(3) == oracle(r.link.info, spec)
        assert r.masks.forgotten == [spec.stream]


async def test_queue_time_runs_until_the_first_plan():
    async with rig() as r:
        r.await_a_worker()
        r.submit(make_spec(1))
        await r.edges.until(lambda _: r.metric("requests_waiting") == 1)
        await asyncio.sleep(0.03)
        r.attach()
        await r.end_of(1)
        assert r.metric("queue_seconds_sum") >= 0.03


async def test_without_any_worker_a_request_is_refused():
    async with rig() as r:
        r.submit(make_spec(1))
        assert (await r.end_of(1)).error.reason == "LOADING"


async def test_a_full_queue_is_refused_with_its_class():
    async with rig() as r:
        r.await_a_worker()
        r.submit(*[make_spec(index) for index in range(1, 4)])
        last = await r.end_of(3)
        assert last.error.reason == "QUEUE_FULL"
        assert last.error.retry_after_ms > 0
        assert r.metric("request_rejections_total", reason="QUEUE_FULL") == 1


async def test_the_core_is_woken_for_a_deadline_and_not_before():
    async with rig() as r:
        r.await_a_worker()
        now = time.monotonic()
        r.submit(make_spec(1, deadline_s=now + 0.05))
        last = await r.end_of(1)
        assert last.finish.reason == int(FinishReason.DEADLINE)
        assert time.monotonic() >= now + 0.05
        assert r.metric("step_build_seconds_count") <= 3


async def test_an_idle_loop_does_not_step():
    async with rig() as r:
        r.attach()
        await r.edges.until(lambda messages: messages)
        steps = r.metric("step_build_seconds_count")
        await asyncio.sleep(0.1)
        assert r.metric("step_build_seconds_count") == steps


async def test_edges_learn_what_is_served_and_when_it_ends():
    async with rig() as r:
        r.loop.edge_connected(EDGE)
        first = await r.edges.until(lambda messages: messages[:1])
        assert not first[0].model.serving
        r.attach()
        await r.edges.until(lambda messages: len(messages) == 2)
        model = r.edges.messages[1].model
        assert (model.serving, model.logits_width) == (True, r.link.info.logits_width)
        assert (model.context_tokens, model.max_logprobs) == (1024, r.link.info.limits.max_logprobs)
        assert (model.max_waiting_requests, model.max_waiting_tokens) == (2, CoreSettings().max_waiting_tokens)
        r.loop.worker_event(WorkerLost("w0"))
        await r.edges.until(lambda messages: len(messages) == 3)
        model = r.edges.messages[2].model
        assert not model.serving
        assert (model.capacity_tokens, model.context_tokens) == (64 * 4, 1024)


async def test_a_load_question_is_answered_once():
    async with rig() as r:
        r.link.holds = True
        r.attach()
        r.submit(make_spec(1))
        await r.edges.until(lambda _: r.metric("requests_running") == 1)
        r.loop.load_wanted(EDGE)
        await r.edges.until(lambda messages: any(message.HasField("load") for message in messages))
        (load,) = [message.load for message in r.edges.messages if message.HasField("load")]
        (worker,) = load.workers
        assert (load.requests_running, load.requests_waiting) == (1, 0)
        assert 0 < load.kv_usage < 1
        assert (worker.name, worker.plans, worker.requests_running) == ("w0", 1, 1)
        assert (worker.pages, worker.state) == (64, int(WorkerState.SERVING))
        assert worker.pages_used > 0


async def test_a_lost_edge_takes_its_requests_along():
    async with rig() as r:
        r.link.holds = True
        r.attach()
        r.submit(make_spec(1))
        await r.edges.until(lambda _: r.metric("requests_running") == 1)
        r.submit(make_spec(2))  # not stepped yet
        r.edges.connected.clear()
        r.loop.edge_lost(EDGE)
        await r.edges.until(lambda _: r.metric("requests_finished_total", reason="abort") == 2)
        assert (r.metric("requests_running"), r.metric("kv_pages_used")) == (0, 0)


async def test_the_edge_of_a_request_is_known_from_its_arrival_to_its_end():
    async with rig() as r:
        r.link.holds = True
        r.attach()
        r.submit(make_spec(1))
        assert r.loop.edge_of("request-1") == EDGE
        await r.edges.until(lambda _: r.metric("requests_running") == 1)
        assert (r.loop.edge_of("request-1"), r.loop.edge_of("other")) == (EDGE, None)
        r.loop.edge_lost(EDGE)
        await r.edges.until(lambda _: r.metric("requests_running") == 0)
        assert r.loop.edge_of("request-1") is None


async def test_a_cancelled_request_ends_with_its_reason():
    async with rig() as r:
        r.await_a_worker()
        r.submit(make_spec(1))
        r.loop.edge_events([RequestCancelled(make_spec(1).stream, FinishReason.STOP)])
        last = await r.end_of(1)
        assert last.finish.reason == int(FinishReason.STOP)


async def test_a_fenced_scheduler_ends_its_streams_and_fails():
    async with rig() as r:
        r.await_a_worker()
        r.submit(make_spec(1))
        await r.edges.until(lambda _: r.metric("requests_waiting") == 1)
        r.loop.worker_fenced("w0", StaleEpoch("another", highest_epoch=4))
        last = await r.end_of(1)
        assert isinstance(error_from_message(last.error), UnavailableError)
        with pytest.raises(StaleEpoch):
            await r.running


async def test_an_error_in_a_step_ends_the_loop(monkeypatch):
    def broken(state, events, now):
        raise KeyError("a bug")

    monkeypatch.setattr("scheduler_svc.loop.step", broken)
    async with rig() as r:
        r.attach()
        with pytest.raises(KeyError):
            await r.running


async def test_loop_lag_is_the_time_an_event_waited():
    async with rig() as r:
        await asyncio.sleep(0)
        r.submit(make_spec(1))
        time.sleep(0.02)
        await r.edges.until(lambda _: r.metric("loop_lag_seconds_count"))
        assert r.metric("loop_lag_seconds_sum") >= 0.02


async def test_the_books_are_checked():
    async with rig() as r:
        r.attach()
        r.submit(make_spec(1))
        await r.end_of(1)
        assert r.metric("invariant_checks_total", outcome="ok") >= 1
        assert r.metric("invariant_checks_total", outcome="broken") == 0


async def test_a_flush_is_answered_to_the_edge_that_asked():
    async with rig() as r:
        r.attach()
        r.submit(make_spec(1, prompt=9))
        await r.end_of(1)
        r.loop.edge_events([CacheFlushRequested(EDGE)])
        await r.edges.until(lambda messages: any(message.HasField("flushed") for message in messages))
        assert sum(message.flushed.freed_pages for message in r.edges.messages) == 3
        assert r.metric("prefix_cache_evicted_pages_total") == 3
        assert r.metric("prefix_cache_queried_tokens_total") == 9


async def test_device_times_are_compared_with_what_was_predicted():
    async with rig() as r:
        r.link.forward_ns = 5_000_000
        r.attach()
        r.submit(make_spec(1, max_tokens=60))
        await r.end_of(1)
        assert 30 <= r.metric("step_prediction_ratio_count", worker="w0") <= 44
        assert r.metric("step_prediction_ratio_bucket", worker="w0", le="0.9") == 0
        assert r.metric("step_prediction_ratio_bucket", worker="w0", le="1.1") >= 30


async def test_who_waits_is_shown_by_reason():
    async with rig() as r:
        r.await_a_worker()
        r.submit(make_spec(1))
        await r.edges.until(lambda _: r.metric("requests_waiting_by_reason", reason="worker") == 1)
        r.attach()
        await r.end_of(1)
        assert r.metric("requests_waiting_by_reason", reason="worker") == 0
