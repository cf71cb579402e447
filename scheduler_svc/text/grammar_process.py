"""A child that compiles grammars and makes masks: `python -m scheduler_svc.text.grammar_process`, through its pipes.

A grammar is a caller's. It is worked on here, with limits on memory and processor time, so that it can only end this
process. Frames are as in `killable_process`, their content as in `grammar_messages`. Every mask is a function of the
grammar and the tokens alone: what this process remembers only saves time.
"""

import json
import os
import resource
import signal
import struct
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from scheduler_svc.text.grammar_messages import (
    Call,
    Greeting,
    Question,
    Replies,
    Reply,
    allows_any,
    decode_call,
    decode_greeting,
    encode_replies,
)
from scheduler_svc.text.grammar_source import GrammarKind, GrammarSource
from scheduler_svc.text.grammar_words import library_message

_LENGTH = struct.Struct("<I")
_FULL_SHARE = 0.6
_PAGE_BYTES = resource.getpagesize()
_LIBRARY_OPTIONS = "x-guidance"
"""The library would read a schema by what stands there, and then leave words of it out."""
READY = b"ready"
NOT_USABLE = b"not usable"
"""Answers to the greeting."""


class GrammarRefused(Exception):
    """The grammar cannot be used; says why."""


@dataclass(slots=True)
class _Row:
    """One output as far as it is known here."""

    matcher: LLMatcher
    num_ids: int


class GrammarCache:
    """Compiled grammars, least recently used out first when they are more than so many bytes."""

    def __init__(self, tokenizer: LLTokenizer, max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._compiled: OrderedDict[GrammarSource, tuple[LLMatcher, int]] = OrderedDict()
        self._limits = LLParserLimits(verbose_errors=False)
        self.compile_s: float | None = None
        """How long the last one asked for was compiled; None: it was kept."""

    @property
    def num_bytes(self) -> int:
        """What the kept grammars are charged for."""
        return sum(size for _, size in self._compiled.values())

    def matcher(self, source: GrammarSource) -> LLMatcher:
        """A fresh matcher of the grammar.

        Raises:
            GrammarRefused: it does not compile.
        """
        found = self._compiled.get(source)
        self.compile_s = None
        if found is None:
            before = resident_bytes()
            compiled = self._compile(source)
            found = compiled, len(source.text) + max(0, resident_bytes() - before)
            self._compiled[source] = found
        self._compiled.move_to_end(source)
        while self.num_bytes > self._max_bytes:
            self._compiled.popitem(last=False)
        return found[0].deep_copy()

    def _compile(self, source: GrammarSource) -> LLMatcher:
        began = time.perf_counter()
        try:
            return compile_grammar(self._tokenizer, source, self._limits)
        finally:
            self.compile_s = time.perf_counter() - began


class GrammarRows:
    """The rows of one process."""

    def __init__(self, greeting: Greeting) -> None:
        self._greeting = greeting
        self._tokenizer = LLTokenizer(
            Path(greeting.tokenizer).read_text(encoding="utf-8"),
            n_vocab=greeting.vocab_size,
            eos_token=list(greeting.eos_token_ids),
        )
        self._cache = GrammarCache(self._tokenizer, greeting.cache_bytes)
        self._rows: dict[tuple[int, int], _Row] = {}
        self._own_bytes = resident_bytes()

    def answer(self, call: Call) -> Replies:
        """Forget what ended, then answer one question after the other."""
        for row in call.ended_rows:
            self._rows.pop(row, None)
        replies = tuple(self._reply(question) for question in call.questions)
        used = resident_bytes() - self._own_bytes
        return Replies(replies=replies, is_full=used > _FULL_SHARE * self._greeting.memory_bytes)

    def _reply(self, question: Question) -> Reply:
        allow_processor_time(self._greeting.cpu_s)
        if question.base == 0 and question.source is not None:
            return self._first_reply(question, question.source)
        row = self._rows.get(question.row)
        if row is None or row.num_ids != question.base:
            return Reply()
        return self._mask(question, row)

    def _first_reply(self, question: Question, source: GrammarSource) -> Reply:
        try:
            row = self._rows[question.row] = _Row(self._cache.matcher(source), 0)
        except GrammarRefused as error:
            return Reply(refusal=str(error), compile_s=self._cache.compile_s)
        return replace(self._mask(question, row), compile_s=self._cache.compile_s)

    def _mask(self, question: Question, row: _Row) -> Reply:
        row.num_ids += len(question.ids)
        matcher = row.matcher
        bits = matcher.compute_bitmask() if matcher.consume_tokens(list(question.ids)) else b""
        if matcher.is_error():
            self._rows.pop(question.row)
            return Reply(refusal=library_message(matcher.get_error()))
        if allows_any(bits, self._greeting.eos_token_ids) and not matcher.is_accepting():
            self._rows.pop(question.row)
            return Reply(refusal="it names an end-of-sequence token, which would end the output before it matches")
        return Reply(bits=bits)


def compile_grammar(tokenizer: LLTokenizer, source: GrammarSource, limits: LLParserLimits) -> LLMatcher:
    """The grammar's matcher, before its first token.

    Raises:
        GrammarRefused: it does not compile.
    """
    try:
        matcher = LLMatcher(tokenizer, _library_grammar(source), log_level=0, limits=limits)
    except ValueError as error:
        raise GrammarRefused(library_message(str(error))) from error
    if matcher.is_error():
        raise GrammarRefused(library_message(matcher.get_error()))
    return matcher


def allow_processor_time(seconds: int) -> None:
    """End this process when it uses more than that from now on."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds + 1, hard))


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Read the tokenizer that the greeting names, then answer calls until the pipe closes."""
    body = _read(source)
    if body is None:
        return
    greeting = decode_greeting(body)
    try:
        rows = GrammarRows(greeting)
    except (ValueError, OSError):
        _write(sink, NOT_USABLE)
        return
    os.nice(greeting.niceness)
    limit_memory(greeting.memory_bytes)
    silence()
    _write(sink, READY)
    while (body := _read(source)) is not None:
        _write(sink, encode_replies(rows.answer(decode_call(body))))


def limit_memory(num_bytes: int) -> None:
    """Let this process take so much more than it has now."""
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def silence() -> None:
    """Nothing of a grammar gets into a log: what the library writes when it gives up is dropped."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())


def main() -> None:
    """Run as a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(sys.stdin.buffer, sys.stdout.buffer)


def _library_grammar(source: GrammarSource) -> str:
    if source.kind is GrammarKind.JSON_SCHEMA:
        return LLMatcher.grammar_from_json_schema(json.dumps(_schema(source.text)))
    if source.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(source.text)
    if source.kind is GrammarKind.EBNF:
        return LLMatcher.grammar_from_lark(source.text)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(source.text))))


def _schema(text: str) -> dict[str, Any]:
    """What the text holds. The library would take text that only becomes JSON inside its own."""
    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise GrammarRefused("it is nested too deeply") from error
    if not isinstance(schema, dict):
        raise GrammarRefused("it is not a JSON object")
    if _LIBRARY_OPTIONS in schema:
        raise GrammarRefused(f"{_LIBRARY_OPTIONS} is not offered: how a schema is read is not a caller's choice")
    return schema


def _read(source: BinaryIO) -> bytes | None:
    prefix = source.read(_LENGTH.size)
    if len(prefix) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(prefix)
    return source.read(length)


def _write(sink: BinaryIO, body: bytes) -> None:
    sink.write(_LENGTH.pack(len(body)) + body)
    sink.flush()


if __name__ == "__main__":
    main()
