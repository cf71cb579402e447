"""The core's questions for masks to grammar processes and their answers back as events.

Knows both sides and nothing else. Guards: an answer is always to a question of a live row, or ignored by the core.
"""

from collections.abc import Callable, Sequence

import numpy as np

from protos.wire.errors import EngineError
from scheduler_svc.core.events import Event, MaskReady, NeedMask, StreamKey
from scheduler_svc.metrics import GrammarMetrics
from scheduler_svc.text.grammar_lane import MaskAnswer, MaskQuestion, RowKey
from scheduler_svc.text.grammar_messages import Greeting, allows_any
from scheduler_svc.text.grammar_pool import GrammarPool
from scheduler_svc.text.grammar_source import GrammarKind, GrammarSource


class GrammarMasks:
    """Made by the core's composition root."""

    def __init__(
        self,
        greeting: Greeting,
        *,
        num_processes: int,
        post: Callable[[Sequence[Event]], None],
        metrics: GrammarMetrics,
        clock: Callable[[], float],
    ) -> None:
        """Join the sides; `post` takes the answers as events."""
        self._post = post
        self._metrics = metrics
        self._clock = clock
        self._asked_at: dict[RowKey, float] = {}
        self._eos_token_ids = greeting.eos_token_ids
        self._pool = GrammarPool(greeting, num_processes=num_processes, answered=self._answered)

    @property
    def pids(self) -> list[int]:
        """Of the running processes."""
        return self._pool.pids

    def ask(self, wanted: NeedMask) -> None:
        """Have the mask made."""
        stream = wanted.stream
        row = (stream.edge, stream.stream_id)
        self._asked_at[row] = self._clock()
        source = GrammarSource(GrammarKind(wanted.grammar.kind), wanted.grammar.source)
        self._pool.ask(MaskQuestion(row, source, wanted.output_ids))

    def forget(self, stream: StreamKey) -> None:
        """The stream ended; it need not have had a grammar."""
        row = (stream.edge, stream.stream_id)
        self._asked_at.pop(row, None)
        self._pool.forget(row)

    async def run(self) -> None:
        """Answer for ever; ends the processes when it is cancelled."""
        await self._pool.run()

    def _answered(self, answer: MaskAnswer) -> None:
        asked_at = self._asked_at.pop(answer.row, None)
        if asked_at is not None:
            self._metrics.mask_seconds.observe(self._clock() - asked_at)
        if answer.compile_s is not None:
            self._metrics.compile_seconds.observe(answer.compile_s)
        stream, bits = StreamKey(*answer.row), answer.answer
        if isinstance(bits, EngineError):
            self._post([MaskReady(stream, answer.position, bits)])
            return
        is_complete = allows_any(bits, self._eos_token_ids)
        self._post([MaskReady(stream, answer.position, np.frombuffer(bits, np.uint8), is_complete=is_complete)])
