"""Everything that goes into and comes out of the scheduling core, as frozen types.

Made by the core's shell (`scheduler_svc/loop.py`, `scheduler_svc/links`) and by the core itself. No I/O, no clock.
"""

from array import array
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from protos.wire.enums import FinishReason
from protos.wire.errors import EngineError
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from protos.wire.worker_info import Buckets, WorkerInfo


class StreamKey(NamedTuple):
    """Which stream of which edge process a request answers. Unique among live requests."""

    edge: int
    stream_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters after defaults were applied and ranges checked at the door."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    sample_index: int = 0
    """Which of the n samples of its prompt; part of the noise."""
    bias: tuple[tuple[int, float], ...] = ()
    """Distinct ids, and what is added to their logits."""
    allowed_ids: tuple[int, ...] = ()
    """None: all are allowed."""
    banned_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output has to match. The core knows only that its masks come from outside, one per position."""

    kind: str
    source: str


class StateUse(IntEnum):
    """Which final hidden states of a prompt are wanted."""

    LAST = 1
    """Of its last token."""
    FULL = 2
    MEAN = 3
    """The mean over all its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWants:
    """What is wanted of a prompt beside the KV that it leaves."""

    logprobs_from: int | None = None
    """Position of the first token whose log-probability is wanted, at least 1. None: none."""
    top_logprobs: int = 0
    states: StateUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestSpec:
    """What a caller asked, immutable for the request's life."""

    stream: StreamKey
    request_id: str
    prompt_ids: np.ndarray
    """i32 [prompt tokens], at least one."""
    sampling: Sampling
    max_tokens: int
    """Most output tokens; already capped by what fits the context. 0: none, only what is wanted of the prompt."""
    deadline_s: float
    """On the core's clock."""
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    """End-of-sequence ids (unless ignored) and the caller's stop ids."""
    output_logprobs: bool = False
    top_logprobs: int = 0
    isolation_domain: bytes = b""
    """Requests share cached prefixes with their own domain only."""
    priority: int = 0
    """Higher goes first, under the policy `priority`."""
    share_domain: bytes = b""
    """Whose share of the work it is taken from; empty: the isolation domain's."""
    share: float = 1.0
    """Weight of that share beside others."""
    grammar: Grammar | None = None
    prompt_wants: PromptWants | None = None

    @property
    def fair_domain(self) -> bytes:
        """Who queues beside whom."""
        return self.share_domain or self.isolation_domain


# --- events: into the core


@dataclass(frozen=True, slots=True)
class RequestSubmitted:
    """A checked request asks for admission."""

    spec: RequestSpec
    output_ids: tuple[int, ...] = ()
    """What its caller has of the output, from a scheduler that is gone: it goes on behind them."""
    traceparent: str = ""
    """W3C trace context of the call, if it is recorded. Decides nothing."""


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The caller left, aborted, ran out of time, or the edge matched a stop string. Unknown streams are ignored."""

    stream: StreamKey
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class ReaderPaused:
    """The reader of a stream has fallen behind. Unknown streams are ignored."""

    stream: StreamKey


@dataclass(frozen=True, slots=True)
class ReaderResumed:
    """A paused reader has caught up. Unknown streams are ignored."""

    stream: StreamKey


@dataclass(frozen=True, slots=True)
class CacheFlushRequested:
    """An edge asks that no later request finds anything cached that was computed before."""

    edge: int


@dataclass(frozen=True, slots=True)
class WorkerAttached:
    """A worker accepted (epoch, term); its pages are empty and its next seq is 1."""

    worker: str
    info: WorkerInfo
    epoch: int
    term: int


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The worker's term ended; nothing of it will arrive any more."""

    worker: str
    died: bool = False
    """Not told to, and maybe by what it was computing."""
    drained: bool = False
    """It was told to leave."""


@dataclass(frozen=True, slots=True)
class WorkerDoubted:
    """The worker is late, cannot be reached, or is about to leave: no new requests for it, as long as others serve."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerTrusted:
    """The worker is in order again."""

    worker: str


@dataclass(frozen=True, slots=True)
class BucketsChanged:
    """The worker has captured a graph, or failed to: later plans choose from these. Of a lost worker: ignored."""

    worker: str
    buckets: tuple[Buckets, ...]


@dataclass(frozen=True, slots=True)
class ResultReceived:
    """The result of the worker's next plan, in seq order."""

    worker: str
    result: ForwardResult


@dataclass(frozen=True, slots=True, eq=False)
class MaskReady:
    """The answer to `NeedMask`. Of a stream that ended, or of another position: ignored."""

    stream: StreamKey
    position: int
    answer: np.ndarray | EngineError
    """u8: bit i of byte i / 8, least significant first: id i may be sampled. Or why there is no mask."""
    is_complete: bool = False
    """The output matches as it is; it may be able to go on."""


StreamEvent = RequestSubmitted | RequestCancelled | ReaderPaused | ReaderResumed | MaskReady
WorkerEvent = WorkerAttached | WorkerLost | WorkerDoubted | WorkerTrusted | BucketsChanged | ResultReceived
Event = StreamEvent | CacheFlushRequested | WorkerEvent


# --- instructions: out of the core


@dataclass(frozen=True, slots=True)
class SendPlan:
    """Send this plan to the worker. The core counts it as in flight."""

    worker: str
    plan: ForwardPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one output token and of the best alternatives, best first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was in the prefix cache when the request was first placed."""
    output_tokens: int


class TokensReleased(NamedTuple):
    """New output tokens of a stream, committed and never withdrawn."""

    stream: StreamKey
    first_pos: int
    """Position of the first within the output."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token when asked for."""
    cached_tokens: int = 0
    """As in `Usage`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens from `first_pos` on, n positions."""

    first_pos: int
    token_ids: np.ndarray
    """i32 [n]: the prompt's own tokens."""
    values: np.ndarray
    """f32 [n]"""
    top_ids: np.ndarray
    """i32 [n, k], best first"""
    top_values: np.ndarray
    """f32 [n, k]"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptStates:
    """Final hidden states from `first_pos` on, or their mean alone."""

    first_pos: int
    states: np.ndarray
    """[n, hidden_size] f32, or u16: the words of bfloat16. A mean is f32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptAnswered:
    """All that was wanted of a prompt: once, before its first output token."""

    stream: StreamKey
    logprobs: PromptLogprobs | None
    states: PromptStates | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished:
    """The last word on a stream; its pages and rows are given back."""

    stream: StreamKey
    reason: FinishReason
    usage: Usage
    stop_token_id: int | None = None
    """The id that ended it, when one did."""


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """The request was not admitted, or failed; the last word on a stream."""

    stream: StreamKey
    error: EngineError


@dataclass(frozen=True, slots=True)
class PlanTimed:
    """For the record: a plan that the cost model had predicted was measured."""

    worker: str
    predicted_s: float
    """When it was sent."""
    measured_s: float


@dataclass(frozen=True, slots=True)
class CacheFlushed:
    """The answer to `CacheFlushRequested`."""

    edge: int
    freed_pages: int
    """At once; pages that running requests use follow when these end."""


@dataclass(frozen=True, slots=True, eq=False)
class NeedMask:
    """Ask what the grammar allows after `output_ids`. The request samples nothing more before `MaskReady`."""

    stream: StreamKey
    grammar: Grammar
    output_ids: "array[int]"
    """i32: a copy. The mask's position is its length."""


StreamAnswer = PromptAnswered | TokensReleased | RequestFinished | RequestRefused
Instruction = SendPlan | StreamAnswer | CacheFlushed | NeedMask | PlanTimed
