"""Spans of one process, with the in-memory exporter; while traces are off, nothing of OpenTelemetry is loaded."""

import subprocess
import sys

import pytest
from opentelemetry.trace import SpanKind as OtelKind

from protos.service import tracing
from protos.service.tracing import SpanKind, SpanStart, TraceSettings, open_tracing
from protos.wire.errors import InvalidRequest
from tests.support.span_receiver import in_memory

CALLER = "00-" + "ab" * 16 + "-" + "cd" * 8
SAMPLED, UNSAMPLED = CALLER + "-01", CALLER + "-00"


def test_a_child_follows_its_parent_and_hands_itself_on():
    spans, exporter = in_memory()
    parent = spans.begin(SpanStart(name="call", kind=SpanKind.SERVER, parent=SAMPLED), {"a": 1})
    child = spans.begin(SpanStart(name="queue", parent=parent.traceparent, begin_ns=5, links=(SAMPLED, "x")), {})
    child.add({"b": ["x", "y"]})
    child.end(end_ns=9)
    parent.end(error="QUEUE_FULL")
    queue, call = exporter.get_finished_spans()
    assert f"{call.context.trace_id:032x}" == "ab" * 16 == f"{queue.context.trace_id:032x}"
    assert f"{call.parent.span_id:016x}" == "cd" * 8
    assert queue.parent.span_id == call.context.span_id
    assert (queue.start_time, queue.end_time) == (5, 9)
    assert [f"{link.context.span_id:016x}" for link in queue.links] == ["cd" * 8], "what is no traceparent is no link"
    assert dict(queue.attributes) == {"b": ("x", "y")}
    assert (call.kind, call.attributes["error.type"], call.status.is_ok) == (OtelKind.SERVER, "QUEUE_FULL", False)
    assert call.resource.attributes["service.name"] == "test"


@pytest.mark.parametrize("broken", ["", "00-zz-1", "ff-" + CALLER[3:] + "-01", "x" * 100])
def test_a_call_without_a_readable_parent_begins_a_trace(broken):
    spans, exporter = in_memory()
    spans.begin(SpanStart(name="call", parent=broken), {}).end()
    (call,) = exporter.get_finished_spans()
    assert call.parent is None


def test_the_callers_decision_wins_and_the_ratio_decides_for_the_others():
    spans, exporter = in_memory(ratio=0.0)
    for parent in ("", UNSAMPLED, SAMPLED):
        span = spans.begin(SpanStart(name=parent or "none", parent=parent), {})
        assert bool(span.traceparent) == (parent == SAMPLED), "who records nothing tells nobody to"
        span.end()
    assert [span.name for span in exporter.get_finished_spans()] == [SAMPLED]


def test_without_an_endpoint_there_are_none():
    assert open_tracing(TraceSettings(endpoint=None), service="x") is None


def test_without_the_package_the_setting_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(tracing, "_LIBRARY", "nothing_of_this_name.sdk")
    with pytest.raises(InvalidRequest, match=r"forwardplane\[tracing\]") as caught:
        open_tracing(TraceSettings(endpoint="http://h:1"), service="x")
    assert caught.value.field == "trace_endpoint"


def test_no_process_loads_opentelemetry_while_traces_are_off():
    modules = "scheduler_svc.app, scheduler_svc.edge.edge_app, worker_svc.app_simulated, protos.client.command"
    code = f"import sys, {modules}; print([name for name in sys.modules if 'opentelemetry' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
