"""Every field of a caller's request, found in the schema, at its borders: good, or refused by its own name."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from protos.forwardplane.v1 import generate_pb2 as pb
from protos.forwardplane.v1.bridge_pb2 import CoreModel
from protos.wire.errors import CallerError
from scheduler_svc.edge.model_facts import ModelFacts, model_facts
from scheduler_svc.edge.validate_request import (
    validate_abort,
    validate_detokenize,
    validate_generate,
    validate_tokenize,
)
from tests.support.edge_harness import tiny_card

WIDTH = 300
CONTEXT = 100
NAN, INF = float("nan"), float("inf")
FLOATS = (0.0, -0.0, -1.0, NAN, INF, -INF, 1e-30, 3e38, -3e38)
INTEGERS = (
    0,
    -1,
    1,
    WIDTH - 1,
    WIDTH,
    CONTEXT,
    CONTEXT + 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
)
KINDS = {
    FieldDescriptor.CPPTYPE_FLOAT: FLOATS,
    FieldDescriptor.CPPTYPE_INT32: INTEGERS,
    FieldDescriptor.CPPTYPE_INT64: INTEGERS,
    FieldDescriptor.CPPTYPE_UINT32: INTEGERS,
    FieldDescriptor.CPPTYPE_UINT64: INTEGERS,
    FieldDescriptor.CPPTYPE_ENUM: INTEGERS,
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_STRING: ("", "a", "\0", "é" * 5000),
}

CAPS = {
    "chat.messages": 256,
    "tokens.ids": CONTEXT,
    "sampling.logit_bias": 300,
    "sampling.allowed_token_ids": 4096,
    "sampling.banned_token_ids": 4096,
    "stop.stop_strings": 32,
    "stop.stop_token_ids": 64,
    "choice.texts": 1024,
    "resume": 16,
}
IDS = ("tokens.ids", "sampling.allowed_token_ids", "sampling.banned_token_ids", "stop.stop_token_ids")
INTERVALS = {
    "sampling.temperature": (0, 100),
    "sampling.top_p": (1e-30, 1),
    "sampling.top_k": (0, WIDTH),
    "sampling.min_p": (0, 1),
    "sampling.repetition_penalty": (1e-30, 10),
    "sampling.frequency_penalty": (-2, 2),
    "sampling.presence_penalty": (-2, 2),
    "sampling.seed": (0, 2**64 - 1),
    "sampling.n": (1, 16),
    "stop.max_tokens": (1, CONTEXT),
    "stop.min_tokens": (0, CONTEXT),
    "logprobs": (0, 20),
    "prompt_logprobs.top": (0, 20),
    "prompt_logprobs.start": (0, CONTEXT),
    "hidden_states": (0, 2),
    "priority": (-10, 10),
}


def facts() -> ModelFacts:
    said = CoreModel(context_tokens=CONTEXT, logits_width=WIDTH, max_logprobs=20, serving=True)
    return model_facts(tiny_card(2), said, has_chat_template=True)


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def leaves(message: Any, path: str = "") -> Iterator[tuple[str, FieldDescriptor]]:
    for field in message.fields:
        if field.message_type is None or field.is_repeated:
            yield path + field.name, field
        elif not is_map(field):
            yield from leaves(field.message_type, path + field.name + ".")


FIELDS = dict(leaves(pb.GenerateRequest.DESCRIPTOR))
SCALARS = {path: field for path, field in FIELDS.items() if not field.is_repeated}
LISTS = {path: field for path, field in FIELDS.items() if field.is_repeated}


def request_with(path: str) -> tuple[pb.GenerateRequest, Message, str]:
    """A good request, the message in it that holds the field, and the field's own name."""
    request = pb.GenerateRequest(text="a")
    *outer, name = path.split(".")
    holder: Any = request
    for part in outer:
        holder = getattr(holder, part)
        holder.SetInParent()
    return request, holder, name


def refusal(check: Callable[..., None], request: Message) -> CallerError | None:
    """What is wrong with it; anything but an error of the taxonomy escapes."""
    try:
        check(request, facts())
    except CallerError as error:
        return error
    return None


def problem(request: pb.GenerateRequest) -> CallerError | None:
    return refusal(validate_generate, request)


def test_the_schema_has_what_this_test_knows_of() -> None:
    assert set(LISTS) == set(CAPS)
    numbers = {path for path, field in SCALARS.items() if field.cpp_type not in _WORDS}
    assert numbers == set(INTERVALS)


_WORDS = (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_BOOL)
CASES = [(path, value) for path, field in SCALARS.items() for value in KINDS[field.cpp_type]]


@pytest.mark.parametrize(("path", "value"), CASES, ids=[f"{path}-{str(value)[:12]}" for path, value in CASES])
def test_a_scalar_is_good_or_refused_by_its_name(path: str, value: object) -> None:
    request, holder, name = request_with(path)
    try:
        setattr(holder, name, value)
    except ValueError:
        return  # does not fit the wire type: cannot arrive
    error = problem(request)
    if path in INTERVALS:
        low, high = INTERVALS[path]
        stored = getattr(holder, name)
        assert (error is None) == (low <= stored <= high), error
    if error is not None:
        assert error.field == path
        assert error.status in ("INVALID_ARGUMENT", "NOT_FOUND")


@pytest.mark.parametrize("path", CAPS)
@pytest.mark.parametrize("beyond", [0, 1])
def test_a_list_is_good_at_its_cap_and_refused_beyond(path: str, beyond: int) -> None:
    request, holder, name = request_with(path)
    count = CAPS[path] + beyond
    if path == "chat.messages":
        holder.messages.extend(pb.ChatMessage(role="user", content="a") for _ in range(count))
    elif path == "sampling.logit_bias":
        holder.logit_bias.update(dict.fromkeys(range(count), 0.0))
    elif path in IDS:
        getattr(holder, name).extend([1] * count)
    elif path == "resume":
        holder.resume.extend([pb.ResumedSample(ticket=b"t")] * count)
    else:
        getattr(holder, name).extend(["a"] * count)
    error = problem(request)
    assert (error is None) == (beyond == 0), error
    if error is not None:
        assert error.field == path
        assert str(CAPS[path]) in error.message


@pytest.mark.parametrize("path", IDS)
@pytest.mark.parametrize(("token_id", "is_good"), [(0, True), (WIDTH - 1, True), (WIDTH, False), (-1, False)])
def test_an_id_is_below_the_width_of_the_logits(path: str, token_id: int, *, is_good: bool) -> None:
    request, holder, name = request_with(path)
    getattr(holder, name).append(token_id)
    error = problem(request)
    assert (error is None) == is_good
    if error is not None:
        assert error.field == f"{path}[0]"


@pytest.mark.parametrize(("token_id", "is_good"), [(0, True), (WIDTH - 1, True), (WIDTH, False), (-1, False)])
@pytest.mark.parametrize(
    ("value", "fits"), [(100, True), (-100, True), (100.01, False), (NAN, False), (INF, False), (-INF, False)]
)
def test_a_bias_has_known_ids_and_bounded_values(token_id: int, value: float, *, is_good: bool, fits: bool) -> None:
    request, holder, _ = request_with("sampling.logit_bias")
    holder.logit_bias[token_id] = value
    error = problem(request)
    assert (error is None) == (is_good and fits)
    if error is not None:
        assert error.field == f"sampling.logit_bias[{token_id}]"


CALLS = {
    "Tokenize": (pb.TokenizeRequest, validate_tokenize, pb.TokenizeRequest(text="a")),
    "Detokenize": (pb.DetokenizeRequest, validate_detokenize, pb.DetokenizeRequest()),
    "Abort": (pb.AbortRequest, validate_abort, pb.AbortRequest(request_id="r")),
}
"""Other calls with a request of their own: its class, its check, and a good one."""
WRAPPED = {"GenerateOnce": {"requests"}, "Embed": {"requests", "pooling", "normalize"}}
"""Calls that hold requests of `Generate`, and what they have beside them (`test_edge_prompts`)."""


def test_every_call_of_the_service_is_checked() -> None:
    service = pb.DESCRIPTOR.services_by_name["GenerationService"]
    for method in service.methods:
        names = {field.name for field in method.input_type.fields}
        if method.name in WRAPPED:
            assert names == WRAPPED[method.name]
        else:
            assert method.name == "Generate" or method.name in CALLS or not names, method.name


LISTED = {"chat.messages": 256, "token_ids": 1 << 20}


@pytest.mark.parametrize("call", CALLS)
def test_the_fields_of_other_calls_are_good_or_refused_by_their_names(call: str) -> None:
    kind, check, good = CALLS[call]
    check(good, facts())
    for path, field in leaves(kind.DESCRIPTOR):
        if field.is_repeated:
            assert path in LISTED, path
            continue
        for value in KINDS[field.cpp_type]:
            error = refusal(check, kind(**{path: value}))
            assert error is None or error.field == path


@pytest.mark.parametrize(("token_id", "is_good"), [(0, True), (WIDTH - 1, True), (WIDTH, False), (-1, False)])
def test_an_id_to_be_made_text_is_below_the_width_of_the_logits(token_id: int, *, is_good: bool) -> None:
    error = refusal(validate_detokenize, pb.DetokenizeRequest(token_ids=[5, token_id]))
    assert (error and error.field) == (None if is_good else "token_ids[1]")


@pytest.mark.parametrize("beyond", [0, 1])
def test_lists_of_other_calls_are_good_at_their_cap_and_refused_beyond(beyond: int) -> None:
    turns = [pb.ChatMessage(role="user", content="a")] * (LISTED["chat.messages"] + beyond)
    for request, check, path in (
        (pb.TokenizeRequest(chat=pb.ChatPrompt(messages=turns)), validate_tokenize, "chat.messages"),
        (pb.DetokenizeRequest(token_ids=[1] * (LISTED["token_ids"] + beyond)), validate_detokenize, "token_ids"),
    ):
        error = refusal(check, request)
        assert (error and error.field) == (path if beyond else None)


GRAMMARS = {"json_schema": "{}", "regex": "a", "ebnf": 'start: "a"', "choice": pb.ChoiceList(texts=["a"])}
CONFLICTS = [
    (pb.GenerateRequest(tokens=pb.TokenPrompt(ids=[1])), {"stop_strings": ["x"]}, "stop.stop_strings"),
    (pb.GenerateRequest(text="a"), {"min_tokens": 3, "max_tokens": 2}, "stop.min_tokens"),
    *(
        (pb.GenerateRequest(text="a", **{kind: value}), {"ignore_eos": True}, "stop.ignore_eos")
        for kind, value in GRAMMARS.items()
    ),
]


@pytest.mark.parametrize(("request_", "stop", "field"), CONFLICTS, ids=range(len(CONFLICTS)))
def test_options_that_conflict_are_refused_by_the_name_of_one(
    request_: pb.GenerateRequest, stop: dict[str, Any], field: str
) -> None:
    assert problem(request_) is None
    both = pb.GenerateRequest()
    both.CopyFrom(request_)
    for name, value in stop.items():
        if isinstance(value, list):
            getattr(both.stop, name).extend(value)
        else:
            setattr(both.stop, name, value)
    error = problem(both)
    assert error is not None
    assert (error.field, error.status) == (field, "INVALID_ARGUMENT")


def test_every_kind_of_grammar_is_known_here_and_the_wire_carries_one() -> None:
    (oneof,) = [one for one in pb.GenerateRequest.DESCRIPTOR.oneofs if one.name == "grammar"]
    assert {field.name for field in oneof.fields} == set(GRAMMARS)
