"""One request, from admission to its last word.

    positions [0, kv_len)              written by plans whose result was consumed
    positions [kv_len, planned_len)    in plans in flight
    positions [0, sampled_len)         tokens known: prompt, then output
    positions [0, allocated_len)       pages reserved

At window w a request may be planned past what is known: planned_len >= sampled_len means that the token at position
planned_len is being sampled by the plan that `sample_source` names.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from scheduler_svc.core.canary_chain import CanaryChain
from scheduler_svc.core.events import NeedMask, RequestSpec
from scheduler_svc.core.prompt_account import PromptAccount
from scheduler_svc.core.request_rules import RequestRules, request_rules
from scheduler_svc.memory.page_holding import PageHolding
from scheduler_svc.memory.prefix_match import PrefixMatch


class RequestStatus(Enum):
    """Where a request stands."""

    WAITING = auto()
    """Queued; holds no pages."""
    PREFILLING = auto()
    """On a worker; known tokens are left to be planned."""
    RUNNING = auto()
    """On a worker; each plan computes its newest token and samples the next."""
    FINISHED = auto()


_LEGAL = {
    RequestStatus.WAITING: (RequestStatus.PREFILLING, RequestStatus.FINISHED),
    RequestStatus.PREFILLING: (RequestStatus.RUNNING, RequestStatus.WAITING, RequestStatus.FINISHED),
    RequestStatus.RUNNING: (RequestStatus.PREFILLING, RequestStatus.WAITING, RequestStatus.FINISHED),
    RequestStatus.FINISHED: (),
}


TokenSource = tuple[int, int]
"""Which plan (its seq) samples a token, and in which row."""


@dataclass(slots=True)
class CacheUse:
    """A request and the prefix caches."""

    matches: dict[str, PrefixMatch] = field(default_factory=dict)
    """By worker, while the request waits: what was found last."""
    cached_tokens: int | None = None
    """Prompt tokens found when it was first placed; None before."""
    canary: CanaryChain | None = None
    """Hash of a prefix of its tokens; None: not asked for yet."""
    is_trusting: bool = True
    """False after bad numbers, until the next token: it uses nothing that others computed."""


@dataclass(slots=True)
class Standing:
    """A request among others."""

    seniority: int
    """Lower is older: its handle, until its reader falls behind."""
    queued_at: float
    """When it was accepted, or its reader last fell behind."""
    rank: tuple[float, ...] = ()
    """Its place in the waiting queue, while it waits. Set by the queue."""
    planned_seq: int = 0
    """The last plan of its worker that had a row of it; 0: none yet."""
    expected_output: float = 0.0
    """Tokens that its output was expected to have when it was accepted."""
    has_run: bool = False
    """It had pages before."""
    is_paused: bool = False
    """Its reader has fallen behind: it is in no plan, and the first to be retracted."""


@dataclass(slots=True)
class Trouble:
    """What went wrong with a request since it last got on."""

    failures: int = 0
    """Row failures since the last token."""
    avoids: str = ""
    """The worker on which its numbers were bad, until the next token."""
    strikes: int = 0
    """Workers that died while they had plans with it."""
    alone_until: int = 0
    """It shares the device with nobody until its KV has this length; 0: it may."""


@dataclass(slots=True, eq=False)
class Request:
    """Mutable; changed only by the core."""

    spec: RequestSpec
    handle: int
    """Minted in order of arrival."""
    tokens: "array[int]"
    """i32: prompt, then output."""
    prompt_len: int
    standing: Standing
    status: RequestStatus = RequestStatus.WAITING
    attempt: int = 0
    """Raised whenever results of earlier plans must no longer count."""
    kv_len: int = 0
    planned_len: int = 0
    sample_source: TokenSource | None = None
    """The latest plan that samples for this attempt; in flight whenever planned_len >= sampled_len."""
    holding: PageHolding | None = None
    trouble: Trouble = field(default_factory=Trouble)
    cache_use: CacheUse = field(default_factory=CacheUse)
    rules: RequestRules | None = None
    """What it does to its logits; None: nothing."""
    account: PromptAccount | None = None
    """What it wants of its prompt; None: nothing."""
    final_kv_len: int = field(init=False)
    """Positions that need KV if the request ends by length: the last token needs none."""

    def __post_init__(self) -> None:
        self.final_kv_len = self.prompt_len + max(self.spec.max_tokens - 1, 0)

    @property
    def samples_at_random(self) -> bool:
        """Whether its noise matters."""
        return self.spec.sampling.temperature > 0

    @property
    def is_prefill_only(self) -> bool:
        """Whether it ends with its prompt."""
        return self.spec.max_tokens == 0

    @property
    def cached_limit(self) -> int:
        """Known tokens that may come out of a cache."""
        if self.account is None or self.account.is_told:
            return self.sampled_len
        return self.account.cached_limit

    @property
    def sampled_len(self) -> int:
        """Tokens known."""
        return len(self.tokens)

    @property
    def output_len(self) -> int:
        """Output tokens known."""
        return len(self.tokens) - self.prompt_len

    @property
    def awaits_mask(self) -> bool:
        """Whether its next token cannot be sampled before the grammar's mask is there."""
        return self.rules is not None and self.rules.awaits_mask(self.output_len)

    @property
    def may_reference(self) -> bool:
        """Whether the row after what is planned can go on from a token that is not known yet.

        A mask needs every token before it; the worker adds one referenced token to the counts, not those before it.
        """
        if self.rules is None:
            return True
        return self.spec.grammar is None and (self.rules.counts is None or self.planned_len <= self.sampled_len)

    def append(self, token_id: int) -> None:
        """One more token of the output."""
        self.tokens.append(token_id)
        if self.rules is not None and self.rules.counts is not None:
            self.rules.counts.add(token_id)

    def mask_wanted(self) -> NeedMask | None:
        """The question for the next token's mask; None without a grammar."""
        if self.spec.grammar is None:
            return None
        return NeedMask(self.spec.stream, self.spec.grammar, self.tokens[self.prompt_len :])

    def move_to(self, status: RequestStatus) -> None:
        """Change the status; an illegal transition is a bug."""
        assert status in _LEGAL[self.status], f"{self.status.name} -> {status.name}"
        self.status = status

    def void_plans(self, kv_len: int) -> None:
        """Let no plan in flight count any more; go on from `kv_len`."""
        self.attempt += 1
        self.kv_len = kv_len
        self.planned_len = kv_len
        self.sample_source = None


def new_request(spec: RequestSpec, handle: int, *, now: float, output_ids: Sequence[int] = ()) -> Request:
    """A request that waits, with its prompt and what its caller has of the output as known tokens."""
    tokens = array("i", spec.prompt_ids.astype("i4").tobytes())
    standing = Standing(seniority=handle, queued_at=now)
    request = Request(
        spec=spec,
        handle=handle,
        tokens=tokens,
        prompt_len=len(tokens),
        standing=standing,
        rules=request_rules(spec),
        account=None if spec.prompt_wants is None else PromptAccount(spec.prompt_wants, spec.prompt_ids),
    )
    for token_id in output_ids:
        request.append(token_id)
    return request
