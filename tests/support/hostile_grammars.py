"""Two hundred grammars that were made to take down whoever compiles them or makes masks of them."""

import json
import random
from collections.abc import Iterator

from scheduler_svc.text.grammar_source import GrammarKind, GrammarSource

COUNT = 200


def hostile_grammars() -> list[GrammarSource]:
    """Always the same ones, in an order that mixes the families."""
    found = [source for family in _FAMILIES for source in family()]
    random.Random(0).shuffle(found)
    assert len(found) == len(set(found)) == COUNT, len(found)
    return found


def _regexes(texts: Iterator[str]) -> list[GrammarSource]:
    return [GrammarSource(GrammarKind.REGEX, text) for text in texts]


def _repetitions() -> list[GrammarSource]:
    """Bounded repetition of bounded repetition."""

    def texts() -> Iterator[str]:
        for depth in range(2, 12):
            for most in (10, 100, 999):
                text = "a"
                for _ in range(depth):
                    text = f"(?:{text}){{1,{most}}}"
                yield text
        for most in (10**4, 10**5, 10**6, 2**31, 2**63, 10**30):
            yield f"a{{{most}}}"
            yield f"(?:a|b|cd){{0,{most}}}"

    return _regexes(texts())


def _exponentials() -> list[GrammarSource]:
    """Automata that are exponential in the length of the text."""

    def texts() -> Iterator[str]:
        for length in (12, 20, 40, 80, 160, 320):
            yield f"[ab]*a[ab]{{{length}}}"
            yield f"(?:.*x){{{length}}}.{{{length}}}"
            yield f"(?:a?){{{length}}}a{{{length}}}"
            yield "(?:" + "|".join(f".*{chr(97 + i % 26)}.{{{length + i}}}" for i in range(12)) + ")"
        yield "(a+)+b"
        yield "(a|aa)+$"
        yield "(.*)*(.*)*(.*)*x"
        yield "(?:[^a]*a){64}(?:[^b]*b){64}(?:[^c]*c){64}"

    return _regexes(texts())


def _nestings() -> list[GrammarSource]:
    """Deep in every syntax."""
    found = []
    for depth in (200, 1000, 5000, 40_000):
        found += _regexes(iter(["(" * depth + "a" + ")" * depth, "(?:a|" * depth + "b" + ")" * depth, "(" * depth]))
        found.append(GrammarSource(GrammarKind.EBNF, "start: " + "(" * depth + '"a"' + ")" * depth))
        found.append(GrammarSource(GrammarKind.EBNF, "start: " + '("a" | ' * depth + '"b"' + ")" * depth))
        schema = '{"type":"array","items":' * depth + "{}" + "}" * depth
        found.append(GrammarSource(GrammarKind.JSON_SCHEMA, schema[: 256 << 10]))
        found.append(GrammarSource(GrammarKind.JSON_SCHEMA, '{"anyOf":[' * depth + "{}" + "]}" * depth))
    return found


def _alternations() -> list[GrammarSource]:
    """Wide in every syntax."""
    found = []
    for count in (500, 2000, 8000, 20_000):
        words = [f"w{i * 7919 % count}x{i}" for i in range(count)]
        found += _regexes(iter(["|".join(words), "(?:" + "|".join(words) + ")*z", "[" + "".join(words) + "]{9}"]))
        found.append(GrammarSource(GrammarKind.EBNF, "start: " + " | ".join(f'"{word}" start' for word in words)))
        found.append(GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps({"enum": words})))
        found.append(GrammarSource(GrammarKind.CHOICE, json.dumps(words)))
        objects = [{"properties": {word: {"enum": [word]}}, "required": [word]} for word in words[: count // 10]]
        found.append(GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps({"anyOf": objects})))
    return found


def _recursions() -> list[GrammarSource]:
    """Rules that lead nowhere, to themselves, or everywhere."""
    texts = [
        "start: start",
        "start: a\na: b\nb: a",
        'start: start start | start start start | "a"',
        'start: start start start start start start | "a" | ""',
        "start: missing",
        'start: "a"{1,1000000}',
        'start: ("a"{0,1000}){0,1000}',
        'start: (start | "x"){0,100000}',
        "start: /(a|b)*a(a|b){64}/ start",
        "start: <[999999999]>",
        "start: %json {",
        'start: %json {"$ref": "#"}',
        '%llguidance {"no_forcing": 7}\nstart: "a"',
        "start:",
        "",
        "\0",
    ]
    for count in (10, 18, 26):
        rules = [f"r{i}: r{i + 1} r{i + 1}" for i in range(count)]
        texts.append("\n".join(["start: r0", *rules, f'r{count}: "a" | ""']))
        ambiguous = " | ".join(f"r{i}" for i in range(count))
        texts.append("\n".join([f"start: ({ambiguous})+", *[f'r{i}: ("a" | "aa" | r{i} r{i})' for i in range(count)]]))
    for count in (100, 1000, 10_000):
        texts.append(
            "\n".join([*[f"start{i}: start{i + 1}" for i in range(count)], "start: start0", f"start{count}: start0"])
        )
    return [GrammarSource(GrammarKind.EBNF, text) for text in texts]


def _schemas() -> list[GrammarSource]:
    """What validators choke on."""

    def texts() -> Iterator[object]:
        yield {"$ref": "#"}
        yield {"$ref": "https://example.invalid/schema"}
        yield {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
        yield {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}
        yield {"not": {}}
        yield {"type": "nothing"}
        yield {"type": "string", "pattern": "(?=a)b"}
        yield {"type": "string", "pattern": "[ab]*a[ab]{400}"}
        yield {"type": "string", "minLength": 2**31, "maxLength": 2**31 + 1}
        yield {"type": "array", "minItems": 10**9}
        yield {"type": "array", "minItems": 2, "maxItems": 1}
        yield {"type": "integer", "minimum": -(10**300), "maximum": 10**300}
        yield {"type": "integer", "multipleOf": 7919 * 104729}
        yield {"type": "number", "multipleOf": 1e-300}
        yield {"type": "object", "minProperties": 10**6}
        yield {"uniqueItems": True, "type": "array", "items": {"enum": list(range(500))}}
        for count in (50, 500, 4000):
            names = [f"p{i}" for i in range(count)]
            yield {"type": "object", "properties": {name: {"$ref": "#"} for name in names}, "required": names}
            yield {"oneOf": [{"type": "object", "properties": {name: {}}, "required": [name]} for name in names]}
            yield {"allOf": [{"properties": {name: {"type": "string", "pattern": f".*{name}.*"}}} for name in names]}
            yield {"type": "object", "patternProperties": {f"^.*{name}.*$": {"type": "integer"} for name in names}}
        for depth in (6, 9, 12):
            schema: object = {"type": "string"}
            for _ in range(depth):
                schema = {
                    "anyOf": [{"type": "array", "items": schema}, {"type": "object", "additionalProperties": schema}]
                }
            yield schema

    found = [GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(schema)) for schema in texts()]
    return [
        *found,
        *(GrammarSource(GrammarKind.JSON_SCHEMA, text) for text in ("", "[", "[]", "7", "null", "nan", '{"a":')),
    ]


def _noise() -> list[GrammarSource]:
    """Whatever makes up the number."""
    made = sum(len(family()) for family in _FAMILIES[:-1])
    draw = random.Random(7)
    found = []
    for index in range(COUNT - made):
        kind = draw.choice([GrammarKind.REGEX, GrammarKind.EBNF, GrammarKind.JSON_SCHEMA])
        signs = "()[]{}|*+?.\\^$ab,0123456789:\"' \n"
        found.append(GrammarSource(kind, "".join(draw.choice(signs) for _ in range(draw.randint(1, 40) + index))))
    return found


_FAMILIES = (_repetitions, _exponentials, _nestings, _alternations, _recursions, _schemas, _noise)
