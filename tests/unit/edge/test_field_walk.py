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
from tests.support.request_fields import (
    BORDERS,
    BYTES,
    CAPS,
    CONTEXT,
    IDS,
    INF,
    INTERVALS,
    NAN,
    WIDTH,
    WORDS,
    Field,
    fields_of,
    fill,
    is_map,
    with_place,
)


def facts() -> ModelFacts:
    said = CoreModel(context_tokens=CONTEXT, logits_width=WIDTH, max_logprobs=20, serving=True)
    return model_facts(tiny_card(2), said, has_chat_template=True)


CALLS: dict[str, tuple[Callable[..., None], Callable[[], Message]]] = {
    "Generate": (validate_generate, lambda: pb.GenerateRequest(text="a")),
    "Tokenize": (validate_tokenize, lambda: pb.TokenizeRequest(text="a")),
    "Detokenize": (validate_detokenize, pb.DetokenizeRequest),
    "Abort": (validate_abort, lambda: pb.AbortRequest(request_id="r")),
}
"""What each call with fields of its own is checked by, and a good request."""
WRAPPED = {"GenerateOnce": {"requests"}, "Embed": {"requests", "pooling", "normalize"}}
"""Calls that hold requests of `Generate`, and what they have beside them (`test_edge_fields` sends them)."""
FIELDS = [(call, field) for call, (_, good) in CALLS.items() for field in fields_of(good().DESCRIPTOR)]
SCALARS = [(call, field) for call, field in FIELDS if not field.is_list]
LISTS = [(call, field) for call, field in FIELDS if field.is_list]
TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def named(cases: list[Any]) -> list[str]:
    return [f"{call}-{field.path}" for call, field in cases]


def refusal(call: str, request: Message) -> CallerError | None:
    """What is wrong with it; anything but an error of the taxonomy escapes."""
    try:
        CALLS[call][0](request, facts())
    except CallerError as error:
        return error
    return None


def problem(request: pb.GenerateRequest) -> CallerError | None:
    return refusal("Generate", request)


def test_s5_s8_no_call_takes_tensors_files_or_addresses() -> None:
    """Bytes are tickets, whose layout is fixed; nothing names what the server would have to fetch or read."""
    methods = pb.DESCRIPTOR.services_by_name["GenerationService"].methods
    fields = [field for method in methods for field in messages_below(method.input_type)]
    assert {field.full_name for field in fields if field.type == FieldDescriptor.TYPE_BYTES} == {
        "forwardplane.v1.ResumedSample.ticket"
    }
    words = ("url", "uri", "path", "file", "image", "template", "embeds", "tensor", "shape", "code", "handle")
    assert len(fields) > 40
    assert [field.full_name for field in fields if set(field.name.split("_")) & set(words)] == []


def messages_below(message: Any, seen: tuple[str, ...] = ()) -> Iterator[FieldDescriptor]:
    """Every field of a message and of those in it."""
    for field in message.fields:
        yield field
        if field.message_type is not None and field.message_type.full_name not in seen:
            yield from messages_below(field.message_type, (*seen, message.full_name))


def test_every_call_of_the_service_is_checked() -> None:
    service = pb.DESCRIPTOR.services_by_name["GenerationService"]
    for method in service.methods:
        names = {field.name for field in method.input_type.fields}
        if method.name in WRAPPED:
            assert names == WRAPPED[method.name]
        else:
            assert method.name in CALLS or not names, method.name


def test_what_each_field_may_be_is_known_here() -> None:
    assert {field.path for _, field in LISTS} == set(CAPS) - {"requests"}
    kinds = {field.path: field.description.type for _, field in FIELDS if not is_map(field.description)}
    numbers = {path for path, kind in kinds.items() if kind not in (*TEXTS, FieldDescriptor.TYPE_BOOL, _MESSAGE)} - set(
        IDS
    )
    assert numbers == set(INTERVALS)
    texts = {path for path, kind in kinds.items() if kind in TEXTS}
    assert texts == {*BYTES, *WORDS} - {"pooling"}


_MESSAGE = FieldDescriptor.TYPE_MESSAGE


@pytest.mark.parametrize(("call", "field"), SCALARS, ids=named(SCALARS))
def test_s3_a_scalar_is_good_or_refused_by_its_name(call: str, field: Field) -> None:
    for value in BORDERS[field.description.type]:
        request = CALLS[call][1]()
        holder, name = with_place(request, field)
        try:
            setattr(holder, name, value)
        except ValueError:
            continue  # does not fit the wire type: cannot arrive
        error = refusal(call, request)
        if field.path in INTERVALS:
            low, high = INTERVALS[field.path]
            assert (error is None) == (low <= getattr(holder, name) <= high), (value, error)
        if field.path in WORDS:
            assert (error is None) == (value in WORDS[field.path])
        if error is not None:
            assert error.field == field.place, (value, error)
            assert error.status == ("NOT_FOUND" if field.path == "model" else "INVALID_ARGUMENT")


@pytest.mark.parametrize(("call", "field"), LISTS, ids=named(LISTS))
@pytest.mark.parametrize("beyond", [0, 1])
def test_s3_a_list_is_good_at_its_cap_and_refused_beyond(call: str, field: Field, beyond: int) -> None:
    request = CALLS[call][1]()
    holder, name = with_place(request, field)
    fill(holder, name, field, CAPS[field.path] + beyond)
    error = refusal(call, request)
    assert (error is None) == (beyond == 0), error
    if error is not None:
        assert error.field == field.place
        assert str(CAPS[field.path]) in error.message


SIZED = [(call, field) for call, field in FIELDS if field.path in BYTES]


@pytest.mark.parametrize(("call", "field"), SIZED, ids=named(SIZED))
def test_a_text_is_good_at_its_cap_in_bytes_and_refused_beyond(call: str, field: Field) -> None:
    least, most = BYTES[field.path]
    for size in {0, least, most, most + 1}:
        text = (
            b"x" * size
            if field.description.type == FieldDescriptor.TYPE_BYTES
            else "é" * (size // 2) + "x" * (size % 2)
        )
        request = CALLS[call][1]()
        holder, name = with_place(request, field)
        if field.is_list:
            getattr(holder, name).append(text)
        else:
            setattr(holder, name, text)
        error = refusal(call, request)
        assert (error is None) == (least <= size <= most), (size, error)
        if error is not None:
            assert error.field in (f"{field.place}[0]" if field.is_list else field.place, "chat")


ID_LISTS = [(call, field) for call, field in LISTS if field.path in IDS]


@pytest.mark.parametrize(("call", "field"), ID_LISTS, ids=named(ID_LISTS))
@pytest.mark.parametrize(("token_id", "is_good"), [(0, True), (WIDTH - 1, True), (WIDTH, False), (-1, False)])
def test_s4_an_id_is_below_the_width_of_the_logits(call: str, field: Field, token_id: int, *, is_good: bool) -> None:
    request = CALLS[call][1]()
    holder, name = with_place(request, field)
    try:
        getattr(holder, name).extend([1, token_id])
    except ValueError:
        return  # cannot arrive
    error = refusal(call, request)
    assert (error is None) == is_good
    if error is not None:
        assert error.field == f"{field.place}[1]"


@pytest.mark.parametrize(("token_id", "is_good"), [(0, True), (WIDTH - 1, True), (WIDTH, False), (-1, False)])
@pytest.mark.parametrize(
    ("value", "fits"), [(100, True), (-100, True), (100.01, False), (NAN, False), (INF, False), (-INF, False)]
)
def test_a_bias_has_known_ids_and_bounded_values(token_id: int, value: float, *, is_good: bool, fits: bool) -> None:
    request = pb.GenerateRequest(text="a")
    request.sampling.logit_bias[token_id] = value
    error = problem(request)
    assert (error is None) == (is_good and fits)
    if error is not None:
        assert error.field == f"sampling.logit_bias[{token_id}]"


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
