"""OpenAI's requests to ours and back, without a server."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from protos.forwardplane.v1.generate_pb2 import GenerateChunk, GenerateRequest
from protos.forwardplane.v1.sampling_pb2 import Finish, FinishReason, TokenLogprob, TopLogprob, Usage
from protos.wire.errors import EngineError, InvalidRequest, UnsupportedFeature, error_classes
from scheduler_svc.edge.http_front.asked import asked_of_chat, asked_of_completion
from scheduler_svc.edge.http_front.closed_fields import parse_fields
from scheduler_svc.edge.http_front.generate_requests import callers_words
from scheduler_svc.edge.http_front.http_errors import STATUSES, error_reply
from scheduler_svc.edge.http_front.openai_requests import ChatRequest, CompletionRequest, Message
from scheduler_svc.edge.http_front.replies import ChatAnswer, CompletionAnswer, Head
from scheduler_svc.edge.http_front.token_logprobs import CompletionLogprobs, chat_logprobs
from tests.support.tiny_tokenizer import text_tokenizer

HEAD = Head(request_id="r", created=1, model="m", fingerprint="fp")
MESSAGES = [{"role": "user", "content": "a"}]
FULL = {
    "model": "m",
    "user": "u",
    "cache_salt": "s",
    "priority": -1,
    "n": 3,
    "logit_bias": {"5": 1, "7": -2.5},
    "allowed_token_ids": [4, 5],
    "banned_token_ids": [6],
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "seed": 7,
    "max_tokens": 5,
    "min_tokens": 2,
    "stop": ["a", "b"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "skip_special_tokens": False,
}

GRAMMARS = {
    "json_schema": '{"type":"array"}',
    "regex": "a+",
    "ebnf": 'start: "a"',
    "choice": ["a", "b"],
}
GRPC_ONLY = {"hidden_states", "prompt_logprobs.start", "resume"}
"""What OpenAI's API has no field for."""
IN_CALLERS_WORDS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "choice": "choice"}


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("model", "params"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsBase),
        (CompletionRequest, completion_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_openais_client_is_used_or_refused_by_name(model, params) -> None:
    known = set(model.model_fields) | set(model.neutral)
    assert set(params.__annotations__) <= known
    assert not set(model.model_fields) & set(model.neutral)


def test_every_field_of_a_generation_can_be_asked_for() -> None:
    (chat,) = asked_of_chat(body(messages=MESSAGES, logprobs=True, top_logprobs=3, **FULL)).generations
    text = asked_of_completion(body(prompt="a", echo=True, logprobs=2, **FULL)).generations[0]
    ids = asked_of_completion(body(prompt=[1], logprobs=0)).generations[0]
    shaped = [_shaped(**{IN_CALLERS_WORDS[kind]: value}) for kind, value in GRAMMARS.items()]
    found = {name for message in (chat, text, ids, *shaped) for name in _set_fields(message)}
    assert set(_all_fields(GenerateRequest())) - GRPC_ONLY == found


def _shaped(**asked: object) -> GenerateRequest:
    (made,) = asked_of_chat(body(messages=MESSAGES, structured_outputs=asked)).generations
    return made


def _set_fields(message, path: str = ""):
    for field, value in message.ListFields():
        yield path + field.name
        if field.message_type is not None and not field.is_repeated:
            yield from _set_fields(value, f"{path}{field.name}.")


def _all_fields(message, path: str = ""):
    for field in message.DESCRIPTOR.fields:
        yield path + field.name
        if field.message_type is not None and not field.is_repeated:
            yield from _all_fields(getattr(message, field.name), f"{path}{field.name}.")


def test_values_arrive_as_they_were_sent() -> None:
    (made,) = asked_of_chat(body(messages=MESSAGES, logprobs=True, top_logprobs=3, **FULL)).generations
    assert (made.model, made.client_tag, made.logprobs, made.keep_special_tokens) == ("m", "u", 3, True)
    sampling, stop = made.sampling, made.stop
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.5, 5, 0.5)
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.5, 0.5, 0.5)
    assert (sampling.seed, stop.max_tokens, stop.min_tokens, stop.ignore_eos) == (7, 5, 2, True)
    assert (list(stop.stop_strings), list(stop.stop_token_ids)) == (["a", "b"], [5])
    assert (sampling.n, dict(sampling.logit_bias)) == (3, {5: 1, 7: -2.5})
    assert (list(sampling.allowed_token_ids), list(sampling.banned_token_ids)) == ([4, 5], [6])


def test_what_is_not_sent_stays_absent() -> None:
    (made,) = asked_of_chat(body(messages=MESSAGES)).generations
    assert set(_set_fields(made)) == {"chat", "chat.messages", "sampling", "stop"}
    nothing = dict.fromkeys([*FULL, *ChatRequest.neutral, "logprobs", "top_logprobs", "stream", "stream_options"])
    assert asked_of_chat(body(messages=MESSAGES, **nothing)).generations == [made]


def test_what_the_output_has_to_match_arrives_as_it_was_sent() -> None:
    for kind, value in GRAMMARS.items():
        made = _shaped(**{IN_CALLERS_WORDS[kind]: value})
        assert made.WhichOneof("grammar") == kind
        assert value == (list(made.choice.texts) if kind == "choice" else getattr(made, kind))
    schema = {"type": "object", "properties": {"é": {"const": 1.5}}}
    named = {"type": "json_schema", "json_schema": {"name": "a-b_1", "schema": schema, "strict": True}}
    for fields in ({"response_format": named}, {"structured_outputs": {"json": schema}}):
        (made,) = asked_of_completion(body(prompt="a", **fields)).generations
        assert json.loads(made.json_schema) == schema
    (made,) = asked_of_chat(body(messages=MESSAGES, response_format={"type": "json_object"})).generations
    assert json.loads(made.json_schema) == {"type": "object"}
    (made,) = asked_of_chat(body(messages=MESSAGES, response_format={"type": "text"})).generations
    assert made.WhichOneof("grammar") is None


@pytest.mark.parametrize("best_of", [None, 2])
def test_best_of_may_only_say_the_number_of_samples_again(best_of: int | None) -> None:
    (made,) = asked_of_completion(body(prompt="a", n=2, best_of=best_of)).generations
    assert made.sampling.n == 2
    for n in (None, 1, 3):
        with pytest.raises(UnsupportedFeature) as caught:
            asked_of_completion(body(prompt="a", n=n, best_of=2))
        assert caught.value.field == "best_of"


def test_a_field_that_is_given_twice_is_refused_wherever_it_is() -> None:
    for sent, named in (
        (b'{"messages": [], "messages": []}', "messages"),
        (b'{"messages": [{"role": "user", "content": "a", "role": "user"}]}', "messages[0].role"),
        (b'{"messages": [], "logit_bias": {"5": 1, "5": 2}}', "logit_bias[5]"),
        (b'{"messages": [], "\\u006e": 1, "n": 2}', "n"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            parse_fields(sent, ChatRequest)
        assert (caught.value.field, caught.value.message) == (named, f"{named} is given twice")


def test_a_message_that_came_from_a_reply_can_be_sent_back() -> None:
    sent = {"role": "assistant", "content": "a", **dict.fromkeys(Message.neutral)}
    (made,) = asked_of_chat(body(messages=[sent])).generations
    assert [(turn.role, turn.content) for turn in made.chat.messages] == [("assistant", "a")]


@pytest.mark.parametrize(
    ("path", "names"), [("messages[0].tool_calls", ("messages", "tool_calls")), ("tools", ("tools",))]
)
def test_a_field_that_is_not_offered_is_named_where_it_is(path: str, names: tuple[str, ...]) -> None:
    fields = {"messages": MESSAGES, "tools": [{}]} if names == ("tools",) else {}
    fields = fields or {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}
    with pytest.raises(UnsupportedFeature) as caught:
        parse_fields(body(**fields), ChatRequest)
    assert (caught.value.field, caught.value.message) == (path, f"{path} is not offered by this server")


def test_no_refusal_holds_what_was_sent() -> None:
    secrets = [{"messages": "secret"}, {"messages": [{"role": "secret", "content": "secret"}]}, {"seed": "secret"}]
    secrets += [{"messages": MESSAGES, "stop": ["secret", 5]}, {"messages": [{"role": "user", "content": ["secret"]}]}]
    for fields in secrets:
        with pytest.raises(InvalidRequest) as caught:
            parse_fields(body(**fields), ChatRequest)
        assert "secret" not in caught.value.message
    with pytest.raises(InvalidRequest) as caught:
        parse_fields(b'{"a": secret', ChatRequest)
    assert "secret" not in caught.value.message


def test_hostile_sizes_are_refused_quickly() -> None:
    many = {f"x{index}": None for index in range(100_000)}
    for fields in (
        {"prompt": [*range(200_000), "a"]},
        {"prompt": [5, *["a"] * 200_000]},
        {"prompt": "a", **many},
    ):
        with pytest.raises(InvalidRequest):
            parse_fields(body(**fields), CompletionRequest)


def test_a_completion_of_no_prompts_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        asked_of_completion(body(prompt=[]))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_any_json_is_understood_or_refused(data: st.DataObject) -> None:
    model, ask = data.draw(st.sampled_from([(ChatRequest, asked_of_chat), (CompletionRequest, asked_of_completion)]))
    nested = st.sampled_from(["type", "json_schema", "schema", "name", "json", "regex", "choice", "grammar", "5"])
    values = json_values | st.dictionaries(nested, json_values | st.dictionaries(nested, json_values), max_size=3)
    names = st.sampled_from(sorted({*model.model_fields, *model.neutral, "wibble"}))
    fields = {"messages": MESSAGES} if model is ChatRequest else {"prompt": "a"}
    fields |= data.draw(st.dictionaries(names, values, max_size=3))
    refusals: list[EngineError] = []
    try:
        generations = ask(json.dumps(fields).encode()).generations
    except EngineError as error:
        refusals, generations = [error], []
    assert bool(refusals) != bool(generations)
    for error in refusals:
        assert error.status in ("INVALID_ARGUMENT", "FAILED_PRECONDITION")
        assert error.field.partition(".")[0].partition("[")[0] in fields


@pytest.mark.parametrize(
    ("request_body", "field", "named"),
    [
        (body(prompt="a"), "requests[0].text", "prompt"),
        (body(prompt=["a", "b"]), "requests[1].text", "prompt[1]"),
        (body(prompt=[[1], [2]]), "requests[1].tokens.ids[3]", "prompt[1][3]"),
        (body(prompt=[1]), "requests[0].tokens.ids[3]", "prompt[3]"),
        (body(prompt=[[1]]), "requests[0].tokens.ids[3]", "prompt[0][3]"),
        (body(prompt=["a"]), "requests[0].text", "prompt[0]"),
        (body(prompt=["a", "b"]), "requests[1].prompt", "prompt[1]"),
        (body(prompt=["a", "b"]), "requests[1].sampling.top_p", "top_p"),
        (body(prompt="a", echo=True, logprobs=1), "requests[0].prompt_logprobs.top", "logprobs"),
        (body(prompt="a"), "requests[0].stop.stop_strings[2]", "stop[2]"),
        (body(prompt="a"), "requests[0].stop.stop_token_ids[2]", "stop_token_ids[2]"),
        (body(prompt="a"), "requests[0]", ""),
        (body(prompt="a"), "requests", "prompt"),
        (body(prompt="a"), "requests[0].model", "model"),
        (body(prompt="a"), "requests[0].sampling.logit_bias[5]", "logit_bias[5]"),
        (body(prompt="a", response_format={"type": "json_object"}), "requests[0].json_schema", "response_format"),
        (
            body(prompt="a", response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}),
            "requests[0].json_schema",
            "response_format.json_schema.schema",
        ),
        (body(prompt="a", structured_outputs={"choice": ["a"]}), "grammar", "structured_outputs.choice"),
        (body(prompt="a", structured_outputs={"json": {}}), "requests[0].json_schema", "structured_outputs.json"),
        (body(prompt="a", structured_outputs={"regex": "("}), "requests[0].regex", "structured_outputs.regex"),
        (body(prompt="a", structured_outputs={"grammar": "("}), "requests[0].ebnf", "structured_outputs.grammar"),
        (
            body(prompt="a", structured_outputs={"choice": ["a", ""]}),
            "requests[0].choice.texts[1]",
            "structured_outputs.choice[1]",
        ),
    ],
)
def test_fields_go_by_the_callers_names(request_body: bytes, field: str, named: str) -> None:
    request = parse_fields(request_body, CompletionRequest)
    for said in {field, field.partition("].")[2] or field}:
        with pytest.raises(InvalidRequest) as caught, callers_words(request):
            raise InvalidRequest(f"{said} is wrong", field=field)
        assert caught.value.field == named
        assert caught.value.message == f"{named} is wrong" or not named


def test_every_error_has_a_status_and_says_whether_to_come_again() -> None:
    for error_class in error_classes().values():
        reply = error_reply(error_class("why"))
        assert reply.status in (*STATUSES.values(), 413)
        again = reply.headers["x-should-retry"] == "true"
        assert again == (error_class.retry in ("later", "elsewhere"))
        assert ("retry-after" in reply.headers) == again
        assert reply.body()["error"]["message"] == "why"
    assert error_reply(error_classes()["QUEUE_FULL"]("x", retry_after_ms=2001)).headers["retry-after"] == "3"


def test_a_first_chunk_may_be_the_last() -> None:
    usage = Usage(prompt_tokens=2, output_tokens=1)
    finish = Finish(reason=FinishReason.FINISH_REASON_STOP, stop_token_id=5)
    chunk = GenerateChunk(request_id="r", text="x", token_ids=[5], finish=finish, usage=usage)
    chat = ChatAnswer(HEAD, None).events(0, chunk)
    assert [event["choices"][0]["delta"] for event in chat] == [{"role": "assistant", "content": "x"}, {}]
    assert [event["choices"][0]["finish_reason"] for event in chat] == [None, "stop"]
    (only,) = CompletionAnswer(HEAD, None).events(0, chunk)
    assert (only["choices"][0]["text"], only["choices"][0]["stop_reason"]) == ("x", 5)


def test_a_bad_end_is_no_finish_reason() -> None:
    chunk = GenerateChunk(text="x", token_ids=[5], finish=Finish(reason=FinishReason.FINISH_REASON_ABORT))
    for answer in (ChatAnswer(HEAD, None), CompletionAnswer(HEAD, None)):
        (event,) = answer.events(0, chunk)
        assert event["choices"][0]["finish_reason"] is None


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return text_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@given(text=st.text(max_size=12))
def test_offsets_are_where_each_tokens_text_begins(tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    writer = CompletionLogprobs(tokenizer, tokenizer.decoder(keep_special=False))
    items = [TokenLogprob(token_id=token_id) for token_id in ids]
    cut = len(items) // 2
    parts = [writer.of(items[:cut]), writer.of(items[cut:])]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    before = [len(_whole(b"".join(map(tokenizer.token_bytes, ids[:index])))) for index in range(len(ids))]
    assert offsets == before


def _whole(raw: bytes) -> str:
    return raw.decode("utf-8", "ignore")


def test_tokens_carry_their_bytes(tokenizer) -> None:
    items = [TokenLogprob(token_id=0xF0, logprob=float("-inf"), top=[TopLogprob(token_id=97, logprob=-1)])]
    (entry,) = chat_logprobs(items, tokenizer)["content"]
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("�", [0xF0], -9999.0)
    assert entry["top_logprobs"] == [{"token": "a", "bytes": [97], "logprob": -1.0}]
