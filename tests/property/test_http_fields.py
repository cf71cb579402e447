"""Every field of every body of the HTTP front, found in the models: good, or refused by its name in our own words.

Types and ranges, without a server: a body is read, mapped and checked as the front does it.
"""

import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.forwardplane.v1.bridge_pb2 import CoreModel
from protos.wire.errors import EngineError
from scheduler_svc.edge.http_front.asked import asked_of_chat, asked_of_completion
from scheduler_svc.edge.http_front.closed_fields import ClosedFields, parse_fields
from scheduler_svc.edge.http_front.http_errors import error_reply
from scheduler_svc.edge.http_front.openai_requests import ChatRequest, CompletionRequest, EmbeddingRequest
from scheduler_svc.edge.model_facts import ModelFacts, model_facts
from scheduler_svc.edge.validate_request import validate_generate
from tests.support.edge_harness import tiny_card

FOREIGN = ("pydantic", "input should", "http", "valid", "validation", "should ", "dict[", "str]", "typeerror")
"""What only the validator would say."""
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
GOOD: Mapping[type[ClosedFields], list[dict[str, Any]]] = {
    ChatRequest: [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [], "stream": True, "stream_options": {}},
        {"messages": [], "response_format": SCHEMA},
        {"messages": [], "response_format": {"type": "text"}},
        {"messages": [], "structured_outputs": {"json": {}}},
    ],
    CompletionRequest: [
        {"prompt": "a"},
        {"prompt": "a", "stream": True, "stream_options": {}},
        {"prompt": "a", "response_format": SCHEMA},
        {"prompt": "a", "structured_outputs": {"regex": "a"}},
    ],
    EmbeddingRequest: [{"input": "a"}],
}
"""Bodies in which every group of fields stands somewhere."""
WRONG = st.one_of(
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.sampled_from([0, -1, 1 << 31, 1 << 63, 1 << 64, math.nan, math.inf, -math.inf, 1e39]),
    st.booleans(),
    st.text(max_size=8),
    st.just({}),
    st.just([]),
    st.just({"a": 1}),
    st.dictionaries(st.sampled_from(["5", "-1", "x"]), st.sampled_from([1, "a", math.inf, None]), min_size=1),
    st.lists(st.one_of(st.integers(-2, 1 << 65), st.text(max_size=3), st.none(), st.just({})), max_size=3),
)


@cache
def groups(model: type[ClosedFields]) -> frozenset[type[ClosedFields]]:
    """The model and all that stand in it."""
    found = {model}
    for field in model.model_fields.values():
        for part in _parts(field.annotation):
            if isinstance(part, type) and issubclass(part, ClosedFields):
                found |= groups(part)
        for part in field.metadata:
            found |= {inner for inner in _parts(part) if isinstance(inner, type) and issubclass(inner, ClosedFields)}
    return frozenset(found)


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from _parts(inner)


def names(model: type[ClosedFields]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def places(model: type[ClosedFields]) -> Iterator[tuple[dict[str, Any], list[str | int], str]]:
    """A good body, the way to a group of fields in it, and the name of each field there."""
    for body in GOOD[model]:
        for way, group in objects(body):
            for one in groups(model):
                if isinstance(group, dict) and set(group) <= set(names(one)) and _fits(one, way):
                    yield from ((body, way, name) for name in names(one))


def objects(value: Any, way: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, dict):
        yield way, value
        for name, inner in value.items():
            yield from objects(inner, (*way, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from objects(inner, (*way, index))


def _fits(group: type[ClosedFields], way: tuple[str | int, ...]) -> bool:
    return PLACES[group.__name__] == tuple("*" if isinstance(step, int) else step for step in way)


PLACES = {
    "ChatRequest": (),
    "CompletionRequest": (),
    "EmbeddingRequest": (),
    "Message": ("messages", "*"),
    "TextPart": ("messages", "*", "content", "*"),
    "StreamOptions": ("stream_options",),
    "AnyText": ("response_format",),
    "AnyObject": ("response_format",),
    "BySchema": ("response_format",),
    "NamedSchema": ("response_format", "json_schema"),
    "StructuredOutputs": ("structured_outputs",),
}
CASES = list(
    {
        (model, ".".join(map(str, (*way, name)))): (body, way, name)
        for model in GOOD
        for body, way, name in places(model)
    }.items()
)


def facts() -> ModelFacts:
    said = CoreModel(context_tokens=100, logits_width=300, max_logprobs=20, serving=True)
    return model_facts(tiny_card(2), said, has_chat_template=True)


def checked(model: type[ClosedFields], body: bytes) -> None:
    if model is EmbeddingRequest:
        parse_fields(body, EmbeddingRequest)
        return
    asked = asked_of_chat(body) if model is ChatRequest else asked_of_completion(body)
    with asked.in_callers_words():
        for generation in asked.generations:
            validate_generate(generation, facts())


def changed(body: dict[str, Any], way: tuple[str | int, ...], name: str, value: Any) -> bytes:
    made = json.loads(json.dumps(body))
    holder = made
    for step in way:
        holder = holder[step]
    holder[name] = value
    return json.dumps(made).encode()


def test_every_group_of_fields_has_its_place_here() -> None:
    known = {group.__name__ for model in GOOD for group in groups(model)}
    assert known == set(PLACES)
    tested = {(model, path.split(".")[-1]) for (model, path), _ in CASES}
    for model in GOOD:
        for group in groups(model):
            assert {(model, name) for name in names(group)} <= tested, group


@pytest.mark.parametrize("case", CASES, ids=[f"{model.__name__}-{path}" for (model, path), _ in CASES])
def test_a_field_is_good_or_refused_by_its_name_in_our_words(case: Any) -> None:
    (model, path), (body, way, name) = case

    @settings(max_examples=40)
    @given(WRONG)
    def tried(value: Any) -> None:
        try:
            checked(model, changed(body, way, name, value))
        except EngineError as error:
            reply = error_reply(error)
            told = reply.body()["error"]
            assert set(told) == {"message", "type", "param", "code"}
            assert (reply.status, told["type"]) == (400, "invalid_request_error") or name == "model"
            assert not any(word in told["message"].lower() for word in FOREIGN), told
            assert path_of(told["param"]).startswith(expected(path)) or told["param"] in RELATED, told

    tried()


RELATED = (
    *("messages", "top_logprobs", "max_tokens", "stream_options", "prompt", "min_tokens", "stop", "logprobs"),
    *("structured_outputs", "response_format", "ignore_eos", "n"),
)
"""What contradicts another field, or is missing there, is told by that one's name."""


def expected(path: str) -> str:
    """The type of a format says which of several it is: a wrong one is a wrong format."""
    return "response_format" if path == "response_format.type" else path


def path_of(param: str | None) -> str:
    return (param or "").replace("[", ".").replace("]", "")


@pytest.mark.parametrize("case", CASES, ids=[f"{model.__name__}-{path}" for (model, path), _ in CASES])
def test_a_value_of_another_type_is_refused_by_its_path(case: Any) -> None:
    (model, path), (body, way, name) = case
    # A list of an object is no value of any field but those that hold anything.
    for value in ([{"a": [1]}], {"x": "y"}):
        if (name, type(value)) in ANYTHING:
            continue
        with pytest.raises(EngineError) as caught:
            checked(model, changed(body, way, name, value))
        error = caught.value
        assert path_of(error.field).startswith(expected(path)), (error.field, error.message)
        assert error.message.startswith(error.field)


ANYTHING = {("schema", dict), ("json", dict)}
