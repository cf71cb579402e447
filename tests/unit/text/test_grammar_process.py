import io
import json
import struct

import numpy as np
import pytest

from scheduler_svc.text import grammar_process
from scheduler_svc.text.grammar_messages import (
    Call,
    Greeting,
    Question,
    Replies,
    Reply,
    decode_call,
    decode_greeting,
    decode_replies,
    encode_call,
    encode_greeting,
    encode_replies,
)
from scheduler_svc.text.grammar_process import (
    NOT_USABLE,
    READY,
    GrammarCache,
    GrammarRefused,
    GrammarRows,
    compile_grammar,
    serve,
)
from scheduler_svc.text.grammar_source import GrammarKind, GrammarSource, choice_source
from scheduler_svc.text.grammar_words import library_message
from tests.support.tiny_tokenizer import (
    EOS,
    byte_alphabet,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    write_tokenizer,
)

ROW, OTHER = (0, 1), (1, 1)
REGEX = GrammarSource(GrammarKind.REGEX, "[ab]{2}")


@pytest.fixture(scope="module", params=[byte_level_tokenizer, byte_fallback_tokenizer], ids=["bytes", "fallback"])
def tokenizer(request):
    return request.param()


@pytest.fixture
def greeting(tmp_path, tokenizer):
    return Greeting(
        tokenizer=str(write_tokenizer(tmp_path, tokenizer)),
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_ids=(tokenizer.token_to_id(EOS),),
        memory_bytes=1 << 30,
        cpu_s=5,
        cache_bytes=1 << 20,
    )


@pytest.fixture
def rows(greeting, monkeypatch):
    # The limit would be this process's.
    monkeypatch.setattr(grammar_process, "allow_processor_time", lambda seconds: None)
    return GrammarRows(greeting)


def ask(rows, *questions, ended=()):
    return rows.answer(Call(ended_rows=ended, questions=questions)).replies


def question(source=None, *, row=ROW, base=0, ids=()):
    return Question(row=row, source=source, base=base, ids=tuple(ids))


def allowed(reply):
    flags = np.unpackbits(np.frombuffer(reply.bits, np.uint8), bitorder="little")
    return set(np.flatnonzero(flags).tolist())


def tokens(tokenizer, *texts):
    return {token_id for token_id in range(tokenizer.get_vocab_size()) if tokenizer.decode([token_id]) in texts}


def one(tokenizer, text):
    (token_id,) = tokenizer.encode(text, add_special_tokens=False).ids
    return token_id


def test_masks_follow_the_tokens_and_end_with_end_of_sequence(rows, tokenizer):
    a, b = one(tokenizer, "a"), one(tokenizer, "b")
    eos = tokenizer.token_to_id(EOS)
    (first,) = ask(rows, question(REGEX))
    assert {a, b} <= allowed(first) <= tokens(tokenizer, "a", "b")
    (second,) = ask(rows, question(base=0, ids=(), source=REGEX))
    assert second.bits == first.bits
    (third,) = ask(rows, question(ids=[a], base=0, source=REGEX))
    assert eos not in allowed(third)
    (last,) = ask(rows, question(ids=[b], base=1))
    assert allowed(last) == {eos}


def test_a_reply_tells_how_long_its_grammar_was_compiled(rows, tokenizer):
    (first,) = ask(rows, question(REGEX))
    kept, bad, later = ask(
        rows,
        question(REGEX, row=OTHER),
        question(GrammarSource(GrammarKind.REGEX, "("), row=(2, 1)),
        question(ids=[one(tokenizer, "a")], base=0, source=None),
    )
    assert 0 < first.compile_s < 5
    assert 0 < bad.compile_s < 5
    assert kept.compile_s is later.compile_s is None


def test_rebuilt_from_all_tokens_a_row_has_the_same_mask(rows, tokenizer):
    source = GrammarSource(GrammarKind.JSON_SCHEMA, '{"type":"object","properties":{"a":{"type":"integer"}}}')
    ids = [one(tokenizer, char) for char in "{"]
    (begun,) = ask(rows, question(source))
    (after,) = ask(rows, question(ids=ids, base=0, source=source))
    (again,) = ask(rows, question(row=OTHER, ids=ids, source=source))
    assert after.bits == again.bits != begun.bits


def test_a_row_that_is_not_known_is_asked_for_from_the_beginning(rows, tokenizer):
    a = one(tokenizer, "a")
    ask(rows, question(REGEX))
    assert ask(rows, question(ids=[a], base=1)) == (Reply(),)
    assert ask(rows, question(row=OTHER, ids=[a], base=1)) == (Reply(),)
    assert ask(rows, question(ids=[a], base=0), ended=(ROW,)) == (Reply(),)


def test_a_token_that_the_grammar_forbids_is_refused(rows, tokenizer):
    (reply,) = ask(rows, question(REGEX, ids=[one(tokenizer, "!")]))
    assert reply.bits is None
    assert reply.refusal


@pytest.mark.parametrize(("text", "before"), [('start: EOS "a"', ""), ('start: "a" (EOS "b" | "c")', "a")])
def test_a_grammar_that_names_end_of_sequence_before_its_end_is_refused_there(rows, tokenizer, text, before):
    source = GrammarSource(GrammarKind.EBNF, text.replace("EOS", EOS))
    (reply,) = ask(rows, question(source, ids=[one(tokenizer, char) for char in before]))
    assert "names an end-of-sequence token" in reply.refusal
    assert ask(rows, question(ids=[], base=len(before))) == (Reply(),)


def test_a_grammar_may_name_end_of_sequence_at_its_end(rows, tokenizer):
    eos = tokenizer.token_to_id(EOS)
    (reply,) = ask(
        rows, question(GrammarSource(GrammarKind.EBNF, f'start: "a" | "a" {EOS}'), ids=[one(tokenizer, "a")])
    )
    assert allowed(reply) == {eos}


@pytest.mark.parametrize("texts", [["yes"], ["yes", "no"], ['"', "\\", "\n", "é🙂", "\0", "a|b*"]])
def test_a_choice_is_one_of_its_texts(rows, tokenizer, texts):
    eos = tokenizer.token_to_id(EOS)
    for index, text in enumerate(texts):
        left, source, base = text.encode(), choice_source(texts), 0
        (reply,) = ask(rows, question(source, row=(2, index)))
        while left:
            token_id = next(token for token in allowed(reply) if left.startswith(bytes_of(tokenizer, token)))
            left = left.removeprefix(bytes_of(tokenizer, token_id))
            (reply,) = ask(rows, question(source if base == 0 else None, row=(2, index), ids=[token_id], base=base))
            base += 1
        assert allowed(reply) == {eos}


def bytes_of(tokenizer, token_id):
    """Ids below 256 are the raw bytes; merges of the byte-level tokenizer need not be whole characters."""
    if token_id < 256:
        return bytes([token_id])
    alphabet = byte_alphabet()
    token = tokenizer.id_to_token(token_id)
    is_bytes = tokenizer.id_to_token(0) == alphabet[0] and all(char in alphabet for char in token)
    return bytes(map(alphabet.index, token)) if is_bytes else tokenizer.decode([token_id]).encode()


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (GrammarKind.REGEX, "(", "unclosed group"),
        (GrammarKind.REGEX, "(?=a)b", "look-ahead"),
        (GrammarKind.EBNF, "nope", "Expected token"),
        (GrammarKind.EBNF, "start: missing", "unknown name"),
        (GrammarKind.JSON_SCHEMA, "{", "Expecting property name"),
        (GrammarKind.JSON_SCHEMA, '{}, "lark_grammar": "start: x"', "Extra data"),
        (GrammarKind.JSON_SCHEMA, "[]", "not a JSON object"),
        (GrammarKind.JSON_SCHEMA, '{"a":' * 50_000 + "1" + "}" * 50_000, "nested too deeply"),
        (GrammarKind.JSON_SCHEMA, '{"type": "nothing"}', "type"),
    ],
)
def test_what_does_not_compile_is_refused_in_the_librarys_words(rows, kind, text, words):
    (reply,) = ask(rows, question(GrammarSource(kind, text)))
    assert reply.bits is None
    assert words in reply.refusal
    assert len(reply.refusal) <= 200


def test_what_the_library_quotes_is_left_out():
    told = 'at 1(8): invalid regex "my secret" (in regex): parse error:\n  my secret\nerror: it is "bad"'
    assert library_message(told) == 'line 1, column 8: error: it is "..."'
    assert library_message('expected "se') == 'expected "..."'
    assert library_message("Expected token ')', found 'se'") == "Expected token ')', found '...'"
    assert library_message("") == "it cannot be used"
    assert "secret" not in library_message("lookarounds not supported yet; WordUnicode in regex /\\bsecret/")
    assert library_message("NoExtensionBias") == "no text matches it"
    assert len(library_message("x" * 900)) == 200


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"if": {}, "then": {}}, 'Unimplemented keys: ["if", "then"]'),
        *[
            ({"properties": {"a": {word: {}}}}, f'Unimplemented keys: ["{word}"]')
            for word in ("not", "contains", "dependentRequired", "propertyNames", "unevaluatedProperties")
        ],
        ({"required": "secret"}, "Expected array for 'required', got ..."),
        ({"type": "secret"}, "Invalid type: ..."),
        ({"format": "regex", "type": "string"}, "Unknown format: regex"),
        ({"format": "secret", "type": "string"}, "Unknown format: ..."),
        ({"$ref": "#/$defs/secret"}, "Pointer '...' does not exist"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "use anyOf"),
        (
            {"x-guidance": {"lenient": True, "secret": 1}, "type": "array", "uniqueItems": True},
            "x-guidance is not offered",
        ),
    ],
)
def test_a_schema_is_refused_by_the_specifications_words_and_without_its_own(rows, schema, told):
    (reply,) = ask(rows, question(GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(schema))))
    assert told in reply.refusal
    assert "secret" not in reply.refusal
    assert "coerce" not in reply.refusal


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        ("start: a\na: secret", 'line 2, column 4: unknown name: "..."'),
        ("start: <|secret|>", 'line 1, column 8: unknown special token: "..."'),
        ("%import common.SECRET\nstart: SECRET", "line 1, column 1: Unknown common regex: ..."),
        ("start: /secret[/", "line 1, column 8: error: unclosed character class"),
        ("start: @secret", "unknown grammar @..."),
        ('start: %json {"type":"secret"}', "line 1, column 8: failed to compile JSON schema: Invalid type: ..."),
    ],
)
def test_a_lark_grammar_is_refused_by_line_and_column_and_without_its_own_words(rows, grammar, told):
    (reply,) = ask(rows, question(GrammarSource(GrammarKind.EBNF, grammar)))
    assert reply.refusal == told


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"oneOf": [{"type": "integer"}, {"enum": ["a", "b"]}]}, '"a"', '"c"'),
        (
            {"type": "object", "properties": {"b": {}, "a": {}}, "required": ["a", "b"], "minProperties": 1},
            '{"b":1,"a":1}',
            '{"a":1,"b":1}',
        ),
        ({"type": "integer", "multipleOf": 3, "minimum": 4}, "9", "3"),
        ({"type": "object", "patternProperties": {"^a": {"type": "null"}}}, '{"ab":null}', '{"ab":1}'),
        (
            {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "null"}, "maxItems": 2},
            "[1,null]",
            "[1,2]",
        ),
        ({"$defs": {"a": {"type": "string", "pattern": "^x+$"}}, "$ref": "#/$defs/a"}, '"xx"', '"y"'),
        (
            {"anyOf": [{"type": "null"}, {"allOf": [{"minLength": 1}, {"maxLength": 2}], "type": "string"}]},
            '"ab"',
            '""',
        ),
        ({"type": "string", "format": "date"}, '"2026-01-31"', '"yesterday"'),
    ],
)
def test_what_the_readme_says_of_schemas_is_so(rows, tokenizer, schema, good, bad):
    eos = tokenizer.token_to_id(EOS)
    source = GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    (reply,) = ask(rows, question(source, ids=tokenizer.encode(good, add_special_tokens=False).ids))
    assert reply.bits is not None
    assert eos in allowed(reply)
    (reply,) = ask(rows, question(source, row=OTHER, ids=tokenizer.encode(bad, add_special_tokens=False).ids))
    assert reply.bits is None or eos not in allowed(reply)


def test_compiled_grammars_are_kept_up_to_a_number_of_bytes(rows, monkeypatch):
    compiled = []

    def counting(tokenizer, source, limits):
        compiled.append(source)
        return compile_grammar(tokenizer, source, limits)

    monkeypatch.setattr(grammar_process, "compile_grammar", counting)
    monkeypatch.setattr(grammar_process, "resident_bytes", lambda: 0)
    cache = GrammarCache(rows._tokenizer, 25)
    one_, two, three = (GrammarSource(GrammarKind.REGEX, letter * 10) for letter in "abc")
    for source in (one_, two, one_, three, one_, two):
        cache.matcher(source)
        assert cache.num_bytes <= 25
    assert compiled == [one_, two, three, two]
    cache.matcher(GrammarSource(GrammarKind.REGEX, "d" * 26))
    assert cache.num_bytes == 0
    with pytest.raises(GrammarRefused):
        cache.matcher(GrammarSource(GrammarKind.REGEX, "("))


def test_a_process_that_grew_too_large_says_so(rows, monkeypatch):
    assert not rows.answer(Call(ended_rows=(), questions=())).is_full
    monkeypatch.setattr(grammar_process, "resident_bytes", lambda: 1 << 34)
    assert rows.answer(Call(ended_rows=(), questions=())).is_full


def frame(body):
    return struct.pack("<I", len(body)) + body


def frames(content):
    found = []
    while content:
        (length,) = struct.unpack_from("<I", content)
        found.append(content[4 : 4 + length])
        content = content[4 + length :]
    return found


def test_serve_speaks_in_frames(greeting, monkeypatch):
    for name in ("allow_processor_time", "limit_memory"):
        monkeypatch.setattr(grammar_process, name, lambda number: None)
    monkeypatch.setattr(grammar_process, "silence", lambda: None)
    call = Call(
        ended_rows=(OTHER,), questions=(question(REGEX), question(GrammarSource(GrammarKind.REGEX, "("), row=OTHER))
    )
    sink = io.BytesIO()
    serve(io.BytesIO(frame(encode_greeting(greeting)) + frame(encode_call(call))), sink)
    ready, answered = frames(sink.getvalue())
    assert ready == READY
    first, second = decode_replies(answered).replies
    assert first.bits
    assert second.refusal


def test_a_tokenizer_that_the_library_cannot_use_is_said(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {}}))
    greeting = Greeting(tokenizer=str(path), vocab_size=9, eos_token_ids=(1,), memory_bytes=1, cpu_s=1, cache_bytes=1)
    sink = io.BytesIO()
    serve(io.BytesIO(frame(encode_greeting(greeting))), sink)
    assert frames(sink.getvalue()) == [NOT_USABLE]
    serve(io.BytesIO(b""), sink)


def test_messages_come_back_as_they_were():
    greeting = Greeting(tokenizer="/t", vocab_size=3, eos_token_ids=(1, 2), memory_bytes=4, cpu_s=5, cache_bytes=6)
    assert decode_greeting(encode_greeting(greeting)) == greeting
    call = Call(
        ended_rows=((1, 2),),
        questions=(question(choice_source(["é", '"'])), question(row=OTHER, ids=[4, 5], base=3)),
    )
    assert decode_call(encode_call(call)) == call
    timed = Reply(refusal="é", compile_s=0.25)
    replies = Replies(replies=(Reply(bits=b"\0\xff"), timed, Reply(), Reply(bits=b"", compile_s=1.5)), is_full=True)
    assert decode_replies(encode_replies(replies)) == replies
