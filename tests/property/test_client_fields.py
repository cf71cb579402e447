"""Whatever a caller says that the wire cannot carry is refused by the client, with field, value and range.

The fields are found in the schema and in the options, so a new one is tested, or fails here.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.client.embed_messages import EmbedOptions, embed_request
from protos.client.messages import Chat, GenerateOptions, TokenIds
from protos.client.request_messages import generate_once_request, generate_request
from protos.client.wire_fields import filled
from protos.forwardplane.v1 import generate_pb2 as pb
from protos.wire.errors import InvalidRequest
from protos.wire.request_ranges import REQUEST_RANGES

REQUESTS = (
    pb.GenerateRequest,
    pb.GenerateOnceRequest,
    pb.EmbedRequest,
    pb.TokenizeRequest,
    pb.DetokenizeRequest,
    pb.AbortRequest,
)
BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(1 << 31), (1 << 31) - 1),
}
FLOATS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
OBJECTS = st.sampled_from([object(), b"\xff", [1], {"a": 1}])


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def leaves(message: Any, path: str = "") -> Iterator[tuple[str, FieldDescriptor]]:
    for field in message.fields:
        if field.message_type is None or is_map(field):
            yield path + field.name, field
        else:
            yield from leaves(field.message_type, path + field.name + ".")


FIELDS = [(kind, path, field) for kind in REQUESTS for path, field in leaves(kind.DESCRIPTOR)]


def bad_scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Values that one value of the field cannot be."""
    if field.cpp_type in BITS:
        low, high = BITS[field.cpp_type]
        return st.one_of(
            st.integers(max_value=low - 1), st.integers(min_value=high + 1), st.floats(), st.just("1"), OBJECTS
        )
    if field.cpp_type in FLOATS:
        return st.one_of(st.integers(min_value=10**400, max_value=10**400 + 9), st.text(), OBJECTS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.one_of(st.text(), st.floats(), OBJECTS)
    assert field.cpp_type == FieldDescriptor.CPPTYPE_STRING, f"{field.full_name}: a type this test does not know"
    return st.one_of(st.integers(), st.floats(), st.booleans(), st.just("\ud800"), st.just(object()), st.just([1]))


def nested(kind: Any, path: str, value: Any) -> tuple[dict[str, Any], str]:
    """What `filled` is given so that the field gets the value, and where it then stands."""
    place = []
    description = kind.DESCRIPTOR
    for name in path.split("."):
        field = description.fields_by_name[name]
        is_list = field.is_repeated and field.message_type is not None and not is_map(field)
        place.append(f"{name}[0]" if is_list else name)
        description = field.message_type
    given_value = value
    for name, where in zip(reversed(path.split(".")), reversed(place), strict=True):
        given_value = {name: [given_value] if where.endswith("[0]") else given_value}
    return given_value, ".".join(place)


@pytest.mark.parametrize(("kind", "path", "field"), FIELDS, ids=[f"{kind.__name__}-{path}" for kind, path, _ in FIELDS])
def test_every_field_is_refused_by_its_name(kind: Any, path: str, field: FieldDescriptor) -> None:
    @settings(max_examples=12)
    @given(st.data())
    def refused(data: st.DataObject) -> None:
        if is_map(field):
            value, place = data.draw(bad_entries(field))
        elif field.is_repeated:
            value, place = data.draw(bad_lists(field))
        else:
            value, place = data.draw(bad_scalars(field)), ""
        values, where = nested(kind, path, value)
        with pytest.raises(InvalidRequest) as caught:
            filled(kind(), values)
        assert caught.value.field == where + place
        assert caught.value.message.startswith(where + place)
        assert len(caught.value.message) < 300
        named = REQUEST_RANGES.get(path.removeprefix("requests."))
        if type(value) is int and not field.is_repeated and field.cpp_type in BITS and named is not None:
            assert named.shown() in caught.value.message

    refused()


def bad_lists(field: FieldDescriptor) -> st.SearchStrategy[tuple[Any, str]]:
    good = "a" if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else 1
    lists = st.builds(
        lambda before, bad: ([good] * before + [bad], f"[{before}]"), st.integers(0, 3), bad_scalars(field)
    )
    return st.one_of(lists, st.sampled_from([("abc", ""), (5, "")]))


def bad_entries(field: FieldDescriptor) -> st.SearchStrategy[tuple[Any, str]]:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    low, high = BITS[key.cpp_type]
    wide = st.one_of(st.integers(max_value=low - 1), st.integers(high + 1, 1 << 100))
    return st.one_of(
        wide.filter(lambda found: found.bit_length() <= 128).map(lambda found: ({1: 0.5, found: 0.5}, f"[{found}]")),
        bad_scalars(value).map(lambda found: ({7: found}, "[7]")),
        st.just(([1], "")),
    )


def test_every_number_of_a_request_has_a_range() -> None:
    numbers = {
        path.removeprefix("requests.")
        for _, path, field in FIELDS
        if is_map(field) or (field.cpp_type in (*BITS, *FLOATS) and field.cpp_type != FieldDescriptor.CPPTYPE_ENUM)
    }
    assert numbers == set(REQUEST_RANGES)


SAID: dict[str, Any] = {
    **{"temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.25, "repetition_penalty": 1.5},
    **{"frequency_penalty": 0.5, "presence_penalty": 0.5, "seed": 7, "n": 3, "logit_bias": {5: -1.5}},
    **{"allowed_token_ids": (5, 6), "banned_token_ids": (7,), "max_tokens": 9, "min_tokens": 2},
    **{"stop_strings": ("a",), "stop_token_ids": (5,), "ignore_eos": True, "logprobs": 0},
    **{"keep_special_tokens": True, "echo": True, "model": "m", "client_tag": "t", "cache_salt": "s", "priority": 2},
    **{"prompt_logprobs": 0, "prompt_logprobs_start": 3, "hidden_states": "last"},
    **{"json_schema": "{}", "regex": "a", "ebnf": "start: x", "choice": ("yes",)},
}
"""A good value of each option that asks for something."""


@settings(max_examples=200)
@given(st.lists(st.sampled_from(sorted(SAID)), max_size=6, unique=True))
def test_no_option_is_dropped_because_another_is_not_given(names: list[str]) -> None:
    assert set(SAID) == {option.name for option in fields(GenerateOptions)}

    def sent(chosen: list[str]) -> bytes | str:
        try:
            request = generate_request("x", GenerateOptions(**{name: SAID[name] for name in chosen}))
        except InvalidRequest as error:
            return error.field.partition(".")[0]
        return request.SerializeToString(deterministic=True)

    whole = sent(names)
    if isinstance(whole, str):
        assert whole in names or f"{whole}_start" in names
        return
    for name in names:
        assert sent([other for other in names if other != name]) != whole, name


@pytest.mark.parametrize("start", [0, 3])
def test_a_start_of_log_probabilities_that_are_not_asked_for_is_refused(start: int) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt_logprobs\.start needs prompt_logprobs") as caught:
        generate_request("x", GenerateOptions(prompt_logprobs_start=start))
    assert caught.value.field == "prompt_logprobs.start"


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_logprobs_start": 3},
        {"hidden_states": "all"},
        {"regex": "a", "json_schema": "{}"},
        {"n": -1},
        {"prompt_logprobs": -1},
        {"logit_bias": {-(2**70): 1.0}},
    ],
)
def test_one_of_several_prompts_is_refused_as_it_would_be_alone_by_its_place(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as alone:
        generate_request("x", GenerateOptions(**options))
    with pytest.raises(InvalidRequest) as listed:
        generate_once_request(["x"], GenerateOptions(**options))
    assert listed.value.field == f"requests[0].{alone.value.field}"
    message = alone.value.message
    begins = message.startswith(alone.value.field)
    assert listed.value.message == (f"requests[0].{message}" if begins else message)


PLACES = {
    **{name: f"sampling.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "seed", "n", "logit_bias")},
    **{name: f"sampling.{name}" for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")},
    **{name: f"sampling.{name}" for name in ("allowed_token_ids", "banned_token_ids")},
    **{name: f"stop.{name}" for name in ("max_tokens", "min_tokens", "stop_strings", "stop_token_ids", "ignore_eos")},
    "choice": "choice.texts",
    "prompt_logprobs": "prompt_logprobs.top",
    "prompt_logprobs_start": "prompt_logprobs.start",
}


@pytest.mark.parametrize("option", [option.name for option in fields(GenerateOptions)])
def test_every_option_is_refused_by_its_field(option: str) -> None:
    said = {option: object(), **({"prompt_logprobs": 1} if option == "prompt_logprobs_start" else {})}
    with pytest.raises(InvalidRequest) as caught:
        generate_request("x", GenerateOptions(**said))
    assert caught.value.field == PLACES.get(option, option)


@pytest.mark.parametrize("option", [option.name for option in fields(EmbedOptions)])
def test_every_option_of_an_embedding_is_refused_by_its_field(option: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        embed_request(["x"], EmbedOptions(**{option: object()}))
    assert caught.value.field.removeprefix("requests[0].") == option


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (5, "text"),
        ("\ud800", "text"),
        (Chat((("user", 5),)), "chat.messages[0].content"),
        (TokenIds((1, -(2**70))), "tokens.ids[1]"),
        (TokenIds((1, "2")), "tokens.ids[1]"),
    ],
)
def test_a_prompt_is_refused_by_its_field(prompt: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_once_request(["good", prompt], GenerateOptions())
    assert caught.value.field == f"requests[1].{field}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": -1}, "sampling.n is -1; allowed: [1, 16]"),
        ({"seed": 2**64}, f"sampling.seed is {2**64}; allowed: [0, {2**64 - 1}]"),
        ({"priority": 2**31}, "priority is 2147483648; allowed: [-10, 10]"),
        ({"top_k": 2**63}, f"sampling.top_k is {2**63}; allowed: [0, what the model allows]"),
        ({"n": 1.5}, "sampling.n is 1.5; a whole number is needed"),
        ({"stop_strings": "stop"}, "stop.stop_strings is of the type str; a list is needed"),
        ({"logit_bias": {5: 10**400}}, "sampling.logit_bias[5] is a number of 1329 bits; allowed: [-100, 100]"),
    ],
)
def test_what_is_said_of_a_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_request("x", GenerateOptions(**options))
    assert caught.value.message == message
