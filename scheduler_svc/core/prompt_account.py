"""What a request wants of its prompt beside the KV, and what of it has come: collected over chunks, said once.

    input positions [first_wanted, collected_len)   answers are here, whatever becomes of the pages
    input positions [collected_len, prompt_len)     still to be computed, so a prefix hit ends before them

Pure. Knows nothing of plans' columns. Guards: every position is taken once, in order; retraction and migration lose
nothing, bad numbers lose everything, since what they were computed from is not trusted.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from protos.wire.enums import HiddenMode
from scheduler_svc.core.events import PromptLogprobs, PromptStates, PromptWants, StateUse

Array = np.ndarray


class InputAsk(NamedTuple):
    """What one row of a plan asks of its input positions."""

    score_start: int
    """First position whose following token's log-probability is asked for."""
    scores: int
    """How many. Of a row that ends its sequence the last one means nothing."""
    hidden_mode: HiddenMode
    states: int


class InputAnswer(NamedTuple):
    """What a result row gave for an `InputAsk`."""

    ask: InputAsk
    values: Array
    """f32 [scores]"""
    top_ids: Array
    """i32 [scores, top]"""
    top_values: Array
    """f32 [scores, top]"""
    states: Array
    """[states, hidden_size]; raw 16-bit words for bfloat16."""


@dataclass(slots=True, eq=False)
class PromptAccount:
    """Of one request whose prompt is asked about; changed by the core only."""

    wants: PromptWants
    prompt_ids: Array
    collected_len: int = 0
    """Input positions below are answered, or nobody asked."""
    scores: list[tuple[Array, Array, Array]] = field(default_factory=list)
    """values, top ids, top values, chunk after chunk."""
    states: list[Array] = field(default_factory=list)
    mean_sum: Array | None = None
    """f64 [hidden_size]: sum over positions, in order."""
    is_told: bool = False

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def cached_limit(self) -> int:
        """Tokens of the prompt that may come out of a cache, until it is told."""
        return max(self._first_wanted, self.collected_len)

    def ask(self, begin: int, end: int, *, samples: bool) -> InputAsk | None:
        """What a row over positions [begin, end) has to ask; None: nothing."""
        if self.is_told or begin >= self.prompt_len:
            return None
        begin_new = max(begin, self.collected_len)
        start, scores = end, 0
        if self.wants.logprobs_from is not None:
            start = min(max(begin_new, self.wants.logprobs_from - 1), end)
            scores = end - start - samples if start < self.prompt_len - 1 else 0
        mode, states = self._hidden(begin_new, end)
        if not scores and mode is HiddenMode.NULL:
            return None
        # A row's states are those of all its tokens.
        return InputAsk(start if scores else end, scores, mode, end - begin if mode is HiddenMode.FULL else states)

    def take(self, answer: InputAnswer | None, *, end: int) -> None:
        """A row over positions up to `end` was answered; None: it asked nothing."""
        if answer is not None:
            ask = answer.ask
            if ask.scores:
                count = min(ask.score_start + ask.scores, self.prompt_len - 1) - ask.score_start
                self.scores.append((answer.values[:count], answer.top_ids[:count], answer.top_values[:count]))
            if ask.states:
                begin = end - ask.states
                self._take_states(answer.states[max(self.collected_len - begin, 0) :])
        self.collected_len = max(self.collected_len, end)

    def told(self) -> None:
        """It was said; nothing is kept."""
        self.is_told = True
        self._clear()

    def forget(self) -> None:
        """Nothing that has come is trusted; what was said stays said."""
        self.collected_len = 0
        self._clear()

    def _clear(self) -> None:
        self.scores.clear()
        self.states.clear()
        self.mean_sum = None

    @property
    def is_complete(self) -> bool:
        """Whether everything has come and was not said yet."""
        return not self.is_told and self.collected_len >= self.prompt_len

    def logprobs(self) -> PromptLogprobs | None:
        """All of them, once complete; None if nobody asked."""
        first = self.wants.logprobs_from
        if first is None:
            return None
        width = self.wants.top_logprobs
        values = [np.empty(0, np.float32), *(part[0] for part in self.scores)]
        ids = [np.empty((0, width), np.int32), *(part[1] for part in self.scores)]
        top = [np.empty((0, width), np.float32), *(part[2] for part in self.scores)]
        return PromptLogprobs(
            first_pos=first,
            token_ids=self.prompt_ids[first:],
            values=np.concatenate(values),
            top_ids=np.concatenate(ids),
            top_values=np.concatenate(top),
        )

    def prompt_states(self) -> PromptStates | None:
        """All of them, or their mean, once complete; None if nobody asked."""
        if self.wants.states is None:
            return None
        first_pos = 0 if self.wants.states is not StateUse.LAST else self.prompt_len - 1
        if self.mean_sum is not None:
            mean = (self.mean_sum / self.prompt_len).astype(np.float32)
            return PromptStates(first_pos=first_pos, states=mean[None])
        return PromptStates(first_pos=first_pos, states=np.concatenate(self.states))

    @property
    def _first_wanted(self) -> int:
        firsts = [self.prompt_len - 1]
        if self.wants.logprobs_from is not None:
            firsts.append(self.wants.logprobs_from - 1)
        if self.wants.states in (StateUse.FULL, StateUse.MEAN):
            firsts.append(0)
        return min(firsts)

    def _hidden(self, begin: int, end: int) -> tuple[HiddenMode, int]:
        use = self.wants.states
        if use in (StateUse.FULL, StateUse.MEAN) and begin < end:
            return HiddenMode.FULL, end - begin
        if use is StateUse.LAST and begin < end == self.prompt_len:
            return HiddenMode.LAST, 1
        return HiddenMode.NULL, 0

    def _take_states(self, states: Array) -> None:
        if self.wants.states is not StateUse.MEAN:
            self.states.append(states)
            return
        rows = float_states(states)
        before = np.zeros((1, rows.shape[-1])) if self.mean_sum is None else self.mean_sum[None]
        # A running sum in order of position: the same bits however the prompt was cut into chunks.
        self.mean_sum = np.cumsum(np.concatenate([before, rows]), axis=0)[-1]


def float_states(states: Array) -> Array:
    """[n, hidden_size] float64 of raw states: float32, or the 16-bit words of bfloat16."""
    if states.dtype == np.uint16:
        states = (states.astype(np.uint32) << 16).view(np.float32)
    return states.astype(np.float64)
