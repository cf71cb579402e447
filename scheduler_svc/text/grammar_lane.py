"""One grammar process and the rows whose masks it makes: one call at a time, everything asked meanwhile in the next.

Knows nothing of the core. Guards: a process that dies takes nobody along: what it was asked is asked again one by one
of a new process, from the rows' own tokens, and only what kills that one too is refused.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protos.wire.errors import EngineError, InvalidRequest, UnavailableError, UnsupportedFeature
from scheduler_svc.text.grammar_messages import (
    Call,
    Greeting,
    Question,
    Reply,
    decode_replies,
    encode_call,
    encode_greeting,
)
from scheduler_svc.text.grammar_process import READY
from scheduler_svc.text.grammar_source import GrammarSource
from scheduler_svc.text.killable_process import ChildKilled, KillableProcess

_logger = logging.getLogger(__name__)

_MODULE = "scheduler_svc.text.grammar_process"
# Wall clock for a call, far above the processor time that each of its questions may take.
_PATIENCE = 5
_MORE_PER_QUESTION_S = 0.1

RowKey = tuple[int, int]


@dataclass(frozen=True, slots=True)
class MaskQuestion:
    """What may follow `ids` in this row?"""

    row: RowKey
    source: GrammarSource
    ids: Sequence[int]
    """The whole output so far; not changed any more."""


@dataclass(frozen=True, slots=True)
class MaskAnswer:
    """Which ids may follow, or why there is no answer."""

    row: RowKey
    position: int
    """Number of ids that the question had."""
    answer: bytes | EngineError
    compile_s: float | None = None
    """How long the grammar was compiled for it; None: that was not needed, or nothing is known of it."""


class GrammarLane:
    """Made by `GrammarPool` and by the edge's checker; used on one event loop."""

    def __init__(self, greeting: Greeting, *, answered: Callable[[MaskAnswer], None]) -> None:
        self._greeting = greeting
        self._answered = answered
        self._process = KillableProcess(_MODULE, greeting=encode_greeting(greeting))
        self._waiting: dict[RowKey, MaskQuestion] = {}
        self._ended: set[RowKey] = set()
        """Since the last call."""
        self._known: dict[RowKey, int] = {}
        """How many ids of each row the process has seen."""
        self._wake = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid

    def ask(self, question: MaskQuestion) -> None:
        """Answer in one of the next calls. A row has one question at a time."""
        self._waiting[question.row] = question
        self._wake.set()

    def forget(self, row: RowKey) -> None:
        """The row ended."""
        self._waiting.pop(row, None)
        self._known.pop(row, None)
        self._ended.add(row)

    async def run(self) -> None:
        """Answer for ever."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                questions = list(self._waiting.values())
                self._waiting.clear()
                if questions:
                    await self._answer(questions)
        finally:
            await self._process.close()

    async def _answer(self, questions: Sequence[MaskQuestion]) -> None:
        try:
            await self._exchange(questions)
        except ChildKilled:
            _logger.warning("a grammar process died", extra={"questions": len(questions)})
            for question in questions:
                await self._answer_alone(question)

    async def _answer_alone(self, question: MaskQuestion) -> None:
        try:
            await self._exchange([question])
        except ChildKilled:
            kind = question.source.kind
            message = f"{kind} takes more time or memory than one request may use"
            _logger.warning("a grammar was refused for what it takes", extra={"kind": str(kind)})
            self._say(question, InvalidRequest(message, field=kind))

    async def _exchange(self, questions: Sequence[MaskQuestion]) -> None:
        """Ask and say the answers.

        Raises:
            ChildKilled: nothing was answered.
        """
        while questions:
            error = await self._start()
            if error is not None:
                for question in questions:
                    self._say(question, error)
                return
            missing = []
            for question, reply in zip(questions, await self._call(questions), strict=True):
                if reply.bits is None and reply.refusal is None:
                    self._known.pop(question.row, None)
                    missing.append(question)
                else:
                    self._take(question, reply)
            questions = missing

    async def _start(self) -> EngineError | None:
        """Have a process; an error says why there can be none now."""
        if self._process.pid is not None:
            return None
        self._known.clear()
        self._ended.clear()
        try:
            if await self._process.start() in (b"", READY):
                return None
        except ChildKilled:
            return UnavailableError("the grammar process does not start", retry_after_ms=1000)
        await self._process.close()
        return UnsupportedFeature("this model's tokenizer cannot be used with grammars", field="grammar")

    async def _call(self, questions: Sequence[MaskQuestion]) -> Sequence[Reply]:
        asked = tuple(self._question(question) for question in questions)
        call = Call(ended_rows=tuple(sorted(self._ended)), questions=asked)
        self._ended.clear()
        timeout_s = _PATIENCE * self._greeting.cpu_s + _MORE_PER_QUESTION_S * len(questions)
        replies = decode_replies(await self._process.call(encode_call(call), timeout_s=timeout_s))
        for question in questions:
            if question.row not in self._ended:
                self._known[question.row] = len(question.ids)
        if replies.is_full:
            await self._process.close()
        return replies.replies

    def _question(self, question: MaskQuestion) -> Question:
        base = self._known.get(question.row, 0)
        source = question.source if base == 0 else None
        return Question(row=question.row, source=source, base=base, ids=tuple(question.ids[base:]))

    def _take(self, question: MaskQuestion, reply: Reply) -> None:
        if reply.bits is not None:
            self._say(question, reply.bits, compile_s=reply.compile_s)
            return
        kind = question.source.kind
        error = InvalidRequest(f"{kind} cannot be used: {reply.refusal}", field=kind)
        self._say(question, error, compile_s=reply.compile_s)

    def _say(self, question: MaskQuestion, answer: bytes | EngineError, *, compile_s: float | None = None) -> None:
        self._answered(MaskAnswer(question.row, len(question.ids), answer, compile_s))
