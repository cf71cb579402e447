from dataclasses import asdict, fields

import numpy as np
import pytest

from protos.client.load_messages import GraphUse, load_from
from protos.forwardplane.v1 import sampling_pb2
from protos.forwardplane.v1.bridge_pb2 import (
    CancelStream,
    Grammar,
    ResolvedSampling,
    StreamError,
    StreamUpdate,
    SubmitStream,
)
from protos.forwardplane.v1.generate_pb2 import WorkerLoad
from protos.wire.enums import FinishReason, GraphPhase, GraphRefusal, WorkerState
from protos.wire.errors import InternalFault, QueueFull, error_classes
from scheduler_svc.bridge.convert import (
    add_finish,
    add_tokens,
    cancelled,
    error_from_message,
    error_to_message,
    load_to_message,
    model_to_message,
    submitted,
)
from scheduler_svc.bridge.views import GraphView, LoadView, ModelView, WorkerView
from scheduler_svc.core import events
from scheduler_svc.core.events import RequestFinished, Sampling, StreamKey, TokenLogprob, TokensReleased, Usage

STREAM = StreamKey(3, 9)


def submit_message(**changes) -> SubmitStream:
    values = {
        "stream_id": 9,
        "request_id": "request",
        "prompt_ids": np.array([5, 6], "<i4").tobytes(),
        "sampling": ResolvedSampling(temperature=0.5, top_k=4, top_p=0.25, min_p=0.125, seed=2**64 - 1),
        "max_tokens": 7,
        "min_tokens": 2,
        "stop_token_ids": np.array([1, 2], "<u4").tobytes(),
        "deadline_ms": 1500,
        "output_logprobs": True,
        "top_logprobs": 3,
        "grammar": Grammar(kind="regex", source="a+"),
    }
    return SubmitStream(**(values | changes))


def test_every_field_of_a_submit_reaches_the_spec():
    spec = submitted(submit_message(), edge=3, now=100.0).spec
    assert spec.stream == STREAM
    assert spec.request_id == "request"
    assert spec.prompt_ids.tolist() == [5, 6]
    assert spec.sampling == Sampling(
        temperature=0.5, top_k=4, top_p=0.25, min_p=0.125, seed=2**64 - 1, repetition_penalty=0.0
    )
    assert (spec.max_tokens, spec.min_tokens, spec.deadline_s) == (7, 2, 101.5)
    assert spec.stop_token_ids == {1, 2}
    assert (spec.output_logprobs, spec.top_logprobs) == (True, 3)
    assert spec.grammar == events.Grammar("regex", "a+")


def test_every_rule_of_a_submit_reaches_the_spec():
    rules = ResolvedSampling(
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=0.25,
        sample_index=7,
        bias_ids=np.array([3, 9], "<u4").tobytes(),
        bias_values=np.array([1.5, -100], "<f4").tobytes(),
        allowed_ids=np.array([3, 4], "<u4").tobytes(),
        banned_ids=np.array([4], "<u4").tobytes(),
    )
    message = submit_message(sampling=rules)
    message.ClearField("grammar")
    spec = submitted(message, edge=3, now=0.0).spec
    assert spec.sampling == Sampling(
        top_p=0.0,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=0.25,
        sample_index=7,
        bias=((3, 1.5), (9, -100.0)),
        allowed_ids=(3, 4),
        banned_ids=(4,),
    )
    assert spec.grammar is None


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": b""},
        {"prompt_ids": b"abc"},
        {"stop_token_ids": b"abcde"},
        {"sampling": ResolvedSampling(allowed_ids=b"abc")},
        {"sampling": ResolvedSampling(banned_ids=b"abc")},
        {"sampling": ResolvedSampling(bias_ids=b"abcd")},
        {"sampling": ResolvedSampling(bias_ids=b"abcd", bias_values=b"abc")},
        {"grammar": Grammar(kind="poem", source="a")},
    ],
)
def test_what_an_edge_must_not_send_is_a_fault(changes):
    with pytest.raises(InternalFault):
        submitted(submit_message(**changes), edge=3, now=0.0)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (sampling_pb2.FINISH_REASON_STOP, FinishReason.STOP),
        (sampling_pb2.FINISH_REASON_DEADLINE, FinishReason.DEADLINE),
        (sampling_pb2.FINISH_REASON_ABORT, FinishReason.ABORT),
        (sampling_pb2.FINISH_REASON_UNSPECIFIED, FinishReason.ABORT),
    ],
)
def test_a_cancellation_keeps_its_reason(sent, reason):
    event = cancelled(CancelStream(stream_id=9, reason=sent), edge=3)
    assert (event.stream, event.reason) == (STREAM, reason)


def test_tokens_of_one_step_join_one_update():
    update = StreamUpdate()
    add_tokens(update, TokensReleased(stream=STREAM, first_pos=4, token_ids=(10, 11)))
    add_tokens(update, TokensReleased(stream=STREAM, first_pos=6, token_ids=(12,)))
    assert update.first_pos == 4
    assert np.frombuffer(update.token_ids, "<i4").tolist() == [10, 11, 12]


def test_logprobs_name_their_tokens():
    update = StreamUpdate()
    logprob = TokenLogprob(logprob=-0.5, top_ids=(10, 20), top_values=(-0.5, -1.0))
    add_tokens(update, TokensReleased(stream=STREAM, first_pos=0, token_ids=(10,), logprobs=(logprob,)))
    (sent,) = update.logprobs
    assert (sent.token_id, sent.logprob) == (10, -0.5)
    assert [(top.token_id, top.logprob) for top in sent.top] == [(10, -0.5), (20, -1.0)]


@pytest.mark.parametrize("stop_token_id", [None, 0, 2])
def test_a_finish_says_what_matched(stop_token_id):
    update = StreamUpdate()
    usage = Usage(prompt_tokens=1, cached_tokens=2, output_tokens=3)
    add_finish(
        update,
        RequestFinished(stream=STREAM, reason=FinishReason.STOP, usage=usage, stop_token_id=stop_token_id),
    )
    assert update.finish.reason == sampling_pb2.FINISH_REASON_STOP
    assert update.finish.HasField("stop_token_id") == (stop_token_id is not None)
    assert (update.usage.prompt_tokens, update.usage.cached_tokens, update.usage.output_tokens) == (1, 2, 3)


@pytest.mark.parametrize("error_class", error_classes().values(), ids=lambda cls: cls.__name__)
def test_every_error_comes_back_as_the_same_class(error_class):
    error = error_class("what is wrong")
    error.field, error.retry_after_ms = "top_p", 250
    back = error_from_message(error_to_message(error))
    assert type(back) is error_class
    assert (back.message, back.field, back.retry_after_ms) == ("what is wrong", "top_p", 250)


def test_an_unknown_error_is_a_fault_of_ours():
    assert type(error_from_message(StreamError(reason="NEW", message="m"))) is InternalFault


def test_a_hint_survives():
    assert error_to_message(QueueFull("full", retry_after_ms=1000)).retry_after_ms == 1000


def test_the_model_view_is_sent_whole():
    view = ModelView(
        context_tokens=1,
        capacity_tokens=4,
        logits_width=2,
        dtype="float32",
        numerics="fast",
        max_logprobs=3,
        max_waiting_requests=5,
        max_waiting_tokens=1 << 40,
        serving=True,
    )
    message = model_to_message(view)
    assert {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields} == {
        name: getattr(view, name) for name in ModelView.__dataclass_fields__
    }


def test_the_load_view_is_sent_whole():
    names = [name for name in WorkerView.__dataclass_fields__ if name not in ("name", "state", "graphs")]
    texts = {"device", "dtype", "numerics", "kernels"}
    values = {name: name if name in texts else index + 1 for index, name in enumerate(names)}
    graphs = (
        GraphView(phase=GraphPhase.DECODE, replays=5, real_tokens=6, padded_tokens=7, live=8, dead=9, planned=18),
        GraphView(
            phase=GraphPhase.PREFILL,
            padded_tokens=3,
            graph_bytes=12,
            capture_ms=13,
            misses=((GraphRefusal.DISABLED, 2), (GraphRefusal.OVER_MAX_TOKENS, 9)),
        ),
    )
    worker = WorkerView(name="w", state=WorkerState.SERVING, graphs=graphs, **values)
    view = LoadView(requests_running=1, requests_waiting=2, kv_usage=0.5, workers=(worker, WorkerView(name="gone")))
    message = load_to_message(view)
    assert (message.requests_running, message.requests_waiting, message.kv_usage) == (1, 2, 0.5)
    sent = {field.name: getattr(message.workers[0], field.name) for field in WorkerLoad.DESCRIPTOR.fields}
    read = load_from(message).workers[0]
    assert sent.pop("graphs")
    assert {field.name for field in fields(GraphView)} == {field.name for field in fields(GraphUse)}
    assert [asdict(use) for use in read.graphs] == [asdict(graph) for graph in graphs]
    totals = {"graph_replays": 5, "graph_misses": 11, "padded_tokens": 10}
    assert sent == {"name": "w", "state": int(WorkerState.SERVING), **values, **totals}
    assert {name: getattr(read, name) for name in totals} == totals
    assert (message.workers[1].name, message.workers[1].state) == ("gone", 0)
