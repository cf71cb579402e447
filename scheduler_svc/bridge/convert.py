"""Bridge messages <-> the core's events and instructions. Pure; the only code of the core's shell that reads them."""

from types import MappingProxyType

import numpy as np

from protos.forwardplane.v1 import bridge_pb2, generate_pb2, plan_pb2, sampling_pb2
from protos.wire.enums import FinishReason
from protos.wire.errors import EngineError, InternalFault, error_classes
from scheduler_svc.bridge.convert_prompts import prompt_wants
from scheduler_svc.bridge.views import GraphView, LoadView, ModelView, WorkerView
from scheduler_svc.core.events import (
    CacheFlushed,
    Grammar,
    ReaderPaused,
    ReaderResumed,
    RequestCancelled,
    RequestFinished,
    RequestSpec,
    RequestSubmitted,
    Sampling,
    StreamKey,
    TokenLogprob,
    TokensReleased,
)
from scheduler_svc.text.grammar_source import GrammarKind

_IDS = np.dtype("<i4")
_UNSIGNED_IDS = np.dtype("<u4")
_VALUES = np.dtype("<f4")
_CANCEL_REASONS = MappingProxyType({int(reason): reason for reason in (FinishReason.STOP, FinishReason.DEADLINE)})


def submitted(message: bridge_pb2.SubmitStream, *, edge: int, now: float) -> RequestSubmitted:
    """The event of a submitted stream; its deadline starts `now`.

    Raises:
        InternalFault: an edge sent something that its own checks exclude.
    """
    sampling = message.sampling
    ids = (message.prompt_ids, message.output_ids, message.stop_token_ids, sampling.allowed_ids, sampling.banned_ids)
    if any(len(column) % _IDS.itemsize for column in (*ids, sampling.bias_ids, sampling.bias_values)):
        raise InternalFault("an edge sent a column of a broken length", field="prompt_ids")
    prompt_ids = np.frombuffer(message.prompt_ids, _IDS)
    if len(sampling.bias_ids) != len(sampling.bias_values):
        raise InternalFault("an edge sent a bias of two lengths", field="bias_ids")
    if len(prompt_ids) == 0:
        raise InternalFault("an edge sent an empty prompt", field="prompt_ids")
    spec = RequestSpec(
        stream=StreamKey(edge, message.stream_id),
        request_id=message.request_id,
        prompt_ids=prompt_ids,
        sampling=_sampling(sampling),
        max_tokens=message.max_tokens,
        deadline_s=now + message.deadline_ms / 1000,
        min_tokens=message.min_tokens,
        stop_token_ids=frozenset(_ids(message.stop_token_ids)),
        output_logprobs=message.output_logprobs,
        top_logprobs=message.top_logprobs,
        isolation_domain=message.isolation_domain,
        priority=message.priority,
        share_domain=message.share_domain,
        share=message.share if message.HasField("share") else 1.0,
        grammar=_grammar(message.grammar) if message.HasField("grammar") else None,
        prompt_wants=prompt_wants(message.prompt_wants) if message.HasField("prompt_wants") else None,
    )
    output_ids = tuple(np.frombuffer(message.output_ids, _IDS).tolist())
    return RequestSubmitted(spec, output_ids, message.traceparent)


def cancelled(message: bridge_pb2.CancelStream, *, edge: int) -> RequestCancelled:
    """The event of a cancelled stream. An unknown reason counts as an abort."""
    reason = _CANCEL_REASONS.get(int(message.reason), FinishReason.ABORT)
    return RequestCancelled(StreamKey(edge, message.stream_id), reason)


def paused(message: bridge_pb2.PauseStream, *, edge: int) -> ReaderPaused | ReaderResumed:
    """The event of a reader that fell behind or caught up."""
    stream = StreamKey(edge, message.stream_id)
    return ReaderPaused(stream) if message.paused else ReaderResumed(stream)


def id_bytes(token_ids: tuple[int, ...]) -> bytes:
    """i32 little-endian, of ids, which are not negative."""
    if len(token_ids) == 1:
        return token_ids[0].to_bytes(_IDS.itemsize, "little")
    return np.asarray(token_ids, _IDS).tobytes()


def add_tokens(update: bridge_pb2.StreamUpdate, released: TokensReleased) -> None:
    """Append newly released tokens to a stream's update."""
    if not update.token_ids:
        update.first_pos = released.first_pos
    if released.first_pos == 0 and released.cached_tokens:
        update.usage.cached_tokens = released.cached_tokens
    update.token_ids += id_bytes(released.token_ids)
    if released.logprobs:
        pairs = zip(released.token_ids, released.logprobs, strict=True)
        update.logprobs.extend(_logprob(token_id, logprob) for token_id, logprob in pairs)


def add_finish(update: bridge_pb2.StreamUpdate, finished: RequestFinished) -> None:
    """Make `update` the last one of its stream."""
    update.finish.reason = sampling_pb2.FinishReason.ValueType(finished.reason)
    if finished.stop_token_id is not None:
        update.finish.stop_token_id = finished.stop_token_id
    update.usage.prompt_tokens = finished.usage.prompt_tokens
    update.usage.cached_tokens = finished.usage.cached_tokens
    update.usage.output_tokens = finished.usage.output_tokens


def error_to_message(error: EngineError) -> bridge_pb2.StreamError:
    """An error as data: the stable name of its class, and its fields."""
    return bridge_pb2.StreamError(
        reason=error.reason, message=error.message, field=error.field, retry_after_ms=error.retry_after_ms
    )


def error_from_message(message: bridge_pb2.StreamError) -> EngineError:
    """An error of the same class; `InternalFault` when its name is unknown."""
    error = _ERROR_CLASSES.get(message.reason, InternalFault)(message.message)
    error.field = message.field
    error.retry_after_ms = message.retry_after_ms
    return error


def model_to_message(view: ModelView) -> bridge_pb2.CoreModel:
    """What edges are told of the model."""
    return bridge_pb2.CoreModel(
        context_tokens=view.context_tokens,
        capacity_tokens=view.capacity_tokens,
        logits_width=view.logits_width,
        dtype=view.dtype,
        numerics=view.numerics,
        max_logprobs=view.max_logprobs,
        max_hidden_states=view.max_hidden_states,
        max_hidden_mode=view.max_hidden_mode,
        max_waiting_requests=view.max_waiting_requests,
        max_waiting_tokens=view.max_waiting_tokens,
        serving=view.serving,
    )


def flushed_to_message(flushed: CacheFlushed) -> generate_pb2.FlushCacheReply:
    """The answer to a flush."""
    return generate_pb2.FlushCacheReply(freed_pages=flushed.freed_pages)


def load_to_message(view: LoadView) -> generate_pb2.GetLoadReply:
    """What callers are told of the load."""
    return generate_pb2.GetLoadReply(
        requests_running=view.requests_running,
        requests_waiting=view.requests_waiting,
        kv_usage=view.kv_usage,
        workers=[_worker_to_message(worker) for worker in view.workers],
    )


def _worker_to_message(view: WorkerView) -> generate_pb2.WorkerLoad:
    message = generate_pb2.WorkerLoad(graphs=[_graph_to_message(graph) for graph in view.graphs])
    for field in generate_pb2.WorkerLoad.DESCRIPTOR.fields:
        value = getattr(view, field.name)
        if value is not None and field.name != "graphs":
            setattr(message, field.name, value)
    return message


def _graph_to_message(view: GraphView) -> generate_pb2.GraphUse:
    return generate_pb2.GraphUse(
        phase=plan_pb2.GraphPhase.ValueType(view.phase),
        replays=view.replays,
        real_tokens=view.real_tokens,
        padded_tokens=view.padded_tokens,
        misses=[
            generate_pb2.GraphMisses(reason=plan_pb2.GraphRefusal.ValueType(reason), count=count)
            for reason, count in view.misses
        ],
        live=view.live,
        dead=view.dead,
        planned=view.planned,
        graph_bytes=view.graph_bytes,
        capture_ms=view.capture_ms,
    )


def _sampling(message: bridge_pb2.ResolvedSampling) -> Sampling:
    return Sampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        repetition_penalty=message.repetition_penalty,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        sample_index=message.sample_index,
        bias=tuple(zip(_ids(message.bias_ids), np.frombuffer(message.bias_values, _VALUES).tolist(), strict=True)),
        allowed_ids=_ids(message.allowed_ids),
        banned_ids=_ids(message.banned_ids),
    )


def _ids(column: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(column, _UNSIGNED_IDS).tolist())


def _grammar(message: bridge_pb2.Grammar) -> Grammar:
    if message.kind not in set(GrammarKind):
        raise InternalFault("an edge sent a grammar of an unknown kind", field="grammar")
    return Grammar(message.kind, message.source)


def _logprob(token_id: int, logprob: TokenLogprob) -> sampling_pb2.TokenLogprob:
    pairs = zip(logprob.top_ids, logprob.top_values, strict=True)
    top = [sampling_pb2.TopLogprob(token_id=top_id, logprob=value) for top_id, value in pairs]
    return sampling_pb2.TokenLogprob(token_id=token_id, logprob=logprob.logprob, top=top)


_ERROR_CLASSES = MappingProxyType(error_classes())
