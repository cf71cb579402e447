"""Spans of requests' lives in the core's shell: one stage after the other, and whatever ends, ends its spans."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Histogram

from protos.wire.enums import FinishReason
from protos.wire.errors import QueueFull
from protos.wire.result import PlanTimings
from scheduler_svc.core.events import (
    RequestFinished,
    RequestRefused,
    RequestSubmitted,
    ResultReceived,
    StreamKey,
    TokensReleased,
    Usage,
    WorkerLost,
)
from scheduler_svc.request_traces import RequestTraces
from tests.support.plans import decode, make_plan
from tests.support.results import make_result
from tests.support.span_receiver import in_memory

CALL = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
WORKER = "worker:1"
USAGE = Usage(prompt_tokens=3, cached_tokens=0, output_tokens=2)


def traces(*, plan_ratio=1.0, off=False):
    spans, exporter = in_memory()
    histogram = Histogram("queue_seconds", "x", registry=CollectorRegistry())
    return RequestTraces(histogram, None if off else spans, plan_ratio=plan_ratio), exporter


def submit(made, stream, handle, *, traceparent=CALL):
    spec = SimpleNamespace(stream=StreamKey(0, stream), request_id=f"r{stream}", prompt_ids=(1, 2, 3))
    made.submitted(RequestSubmitted(spec, traceparent=traceparent), handle, now=1.0)


def plan(*handles, seq=1):
    return make_plan([decode(5, handle=handle) for handle in handles], seq=seq)


def names(exporter):
    return [span.name for span in exporter.get_finished_spans()]


def test_a_life_is_queue_prefill_decode_and_ends_with_what_came_of_it():
    made, exporter = traces(plan_ratio=0.0)
    submit(made, 1, 7)
    assert made.planned(WORKER, plan(7), now=2.0).identity.traceparent == ""
    made.told(TokensReleased(StreamKey(0, 1), 0, (5,)))
    made.told(TokensReleased(StreamKey(0, 1), 1, (6,)))
    made.told(RequestFinished(stream=StreamKey(0, 1), reason=FinishReason.LENGTH, usage=USAGE))
    assert names(exporter) == ["queue", "prefill", "decode"]
    decoded = exporter.get_finished_spans()[-1]
    assert decoded.attributes["forwardplane.finish_reason"] == "length"
    assert decoded.attributes["forwardplane.output_tokens"] == 2


def test_a_plan_of_several_traced_requests_belongs_to_one_and_is_linked_to_the_others():
    made, exporter = traces()
    submit(made, 1, 7)
    other = CALL.replace("cd", "ef")
    submit(made, 2, 8, traceparent=other)
    submit(made, 3, 9, traceparent="")
    sent = made.planned(WORKER, plan(9, 7, 8), now=2.0)
    result = make_result(timings=PlanTimings(forward_ns=5_000_000))
    made.worker_event(ResultReceived(WORKER, replace(result, identity=sent.identity)))
    (span,) = [span for span in exporter.get_finished_spans() if span.name == "plan"]
    assert sent.identity.traceparent.split("-")[2] == f"{span.context.span_id:016x}"
    assert f"{span.parent.span_id:016x}" == "cd" * 8
    assert [f"{link.context.span_id:016x}" for link in span.links] == ["ef" * 8]
    assert span.attributes["forwardplane.plan.forward_seconds"] == pytest.approx(0.005)


def test_plans_without_a_traced_request_and_unsampled_plans_go_as_they_are():
    made, _ = traces()
    submit(made, 1, 7, traceparent="")
    whole = plan(7)
    assert made.planned(WORKER, whole, now=2.0) is whole
    rare, exporter = traces(plan_ratio=0.25)
    submit(rare, 1, 7)
    sampled = [rare.planned(WORKER, plan(7, seq=seq), now=2.0).identity.traceparent for seq in range(1, 401)]
    assert 60 <= sum(map(bool, sampled)) <= 140
    assert names(exporter) == ["queue"]


def test_whatever_ends_ends_its_spans():
    made, exporter = traces()
    for stream in (1, 2):
        submit(made, stream, stream)
    made.planned(WORKER, plan(1), now=2.0)
    made.worker_event(WorkerLost("another"))
    made.worker_event(WorkerLost(WORKER, died=True))
    made.told(RequestRefused(StreamKey(0, 1), QueueFull("full")))
    made.told(RequestRefused(StreamKey(0, 2), QueueFull("full")))
    made.told(RequestRefused(StreamKey(0, 3), QueueFull("never came")))
    ended = {span.name: span.attributes.get("error.type") for span in exporter.get_finished_spans()}
    assert ended == {"queue": "QUEUE_FULL", "plan": "WORKER_LOST", "prefill": "QUEUE_FULL"}
    assert (made._lives, made._queued, made._by_handle, made._plans) == ({}, {}, {}, {})


def test_without_traces_only_queue_times_are_kept():
    made, exporter = traces(off=True)
    submit(made, 1, 7)
    whole = plan(7)
    assert made.planned(WORKER, whole, now=2.5) is whole
    assert made._queue_seconds._sum.get() == 1.5
    assert names(exporter) == []
