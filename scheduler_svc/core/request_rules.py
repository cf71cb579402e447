"""What one request does to its logits, kept while it lives: token counts for penalties, bias, and masks.

Made when a request is accepted, changed by the core only, read by the plan builder. A request that asks for nothing has
none. Guards: counts follow the tokens one by one, whatever happens to plans; a mask is used at its own position only.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from protos.wire.plan import Mask
from scheduler_svc.core.events import RequestSpec

MASK_HEADER_BYTES = 16
"""At most what a mask takes in a plan beside its content."""


class TokenCounts:
    """Distinct ids of the prompt, and how often each id came in the output."""

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self.prompt_ids = np.array(sorted(set(prompt_ids)), np.uint32)
        self._places: dict[int, int] = {}
        self._ids = array("I")
        self._counts = array("I")

    def add(self, token_id: int) -> None:
        """One more token of the output."""
        place = self._places.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(1)
        else:
            self._counts[place] += 1

    @property
    def total(self) -> int:
        """Tokens of the output."""
        return sum(self._counts)

    @property
    def num_ids(self) -> int:
        """Distinct ids, those of the prompt counted apart."""
        return len(self.prompt_ids) + len(self._ids)

    def output_ids(self) -> np.ndarray:
        """u32: distinct, in order of their first coming."""
        return np.array(self._ids, np.uint32)

    def output_counts(self) -> np.ndarray:
        """u32: of `output_ids`."""
        return np.array(self._counts, np.uint32)


@dataclass(frozen=True, slots=True, eq=False)
class KeyedMask:
    """A mask, and what tells it from others of the same plan."""

    mask: Mask
    key: tuple[str, bytes]

    @property
    def num_bytes(self) -> int:
        """What it adds to a plan."""
        return len(self.key[1])


class RequestRules:
    """Rules of one request."""

    def __init__(self, spec: RequestSpec) -> None:
        sampling = spec.sampling
        self.counts = _counts(spec)
        self.bias_ids = np.array([token_id for token_id, _ in sampling.bias], np.uint32)
        self.bias_values = np.array([value for _, value in sampling.bias], np.float32)
        self._spec = spec
        self._grammar_mask: KeyedMask | None = None
        self._grammar_position = -1
        self._late = None if spec.grammar else _listed_mask(spec, banned=sampling.banned_ids)
        self._early = self._late
        if spec.min_tokens and not spec.grammar:
            self._early = _listed_mask(spec, banned={*sampling.banned_ids, *spec.stop_token_ids})

    def awaits_mask(self, position: int) -> bool:
        """Whether the token at that position of the output cannot be sampled yet."""
        return self._spec.grammar is not None and self._grammar_position != position

    def mask_at(self, position: int) -> KeyedMask | None:
        """The mask of that position of the output."""
        if self._spec.grammar is not None:
            assert self._grammar_position == position, "a row was planned without its mask"
            return self._grammar_mask
        return self._early if position < self._spec.min_tokens else self._late

    @property
    def num_bytes(self) -> int:
        """At most what the rules add to a plan, the mask apart."""
        return 8 * (self.counts.num_ids if self.counts else 0) + 8 * len(self.bias_ids)

    def set_grammar_mask(self, position: int, allowed_bits: np.ndarray) -> bool:
        """Take what the grammar allows at `position`, less what else is forbidden. False if nothing is left."""
        sampling = self._spec.sampling
        bits = np.array(allowed_bits, np.uint8)
        if sampling.allowed_ids:
            bits &= _bits(sampling.allowed_ids, num_bytes=len(bits))
        bits &= ~_bits(sampling.banned_ids, num_bytes=len(bits))
        if position < self._spec.min_tokens:
            bits &= ~_bits(self._spec.stop_token_ids, num_bytes=len(bits))
        self._grammar_mask = KeyedMask(Mask(allowed_bits=bits), ("allowed_bits", bits.tobytes()))
        self._grammar_position = position
        return bool(bits.any())


def request_rules(spec: RequestSpec) -> RequestRules | None:
    """The rules of a new request; None if it has none."""
    sampling = spec.sampling
    has_lists = bool(sampling.bias or sampling.allowed_ids or sampling.banned_ids)
    if has_lists or spec.grammar or needs_counts(spec) or (spec.min_tokens and spec.stop_token_ids):
        return RequestRules(spec)
    return None


def needs_counts(spec: RequestSpec) -> bool:
    """Whether a penalty is on."""
    sampling = spec.sampling
    return sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0


def needs_mask(spec: RequestSpec) -> bool:
    """Whether some of its tokens are sampled under a mask."""
    sampling = spec.sampling
    return bool(
        sampling.allowed_ids or sampling.banned_ids or spec.grammar or (spec.min_tokens and spec.stop_token_ids)
    )


def most_rule_bytes(spec: RequestSpec, *, logits_width: int) -> int:
    """Most bytes that the rules of a request ever add to a plan."""
    sampling = spec.sampling
    num_counted = 0
    if needs_counts(spec):
        num_counted = min(len(spec.prompt_ids), logits_width) + min(spec.max_tokens, logits_width)
    listed = 4 * (len(sampling.allowed_ids) + len(sampling.banned_ids) + len(spec.stop_token_ids))
    mask = max(listed, -(-logits_width // 8)) if spec.grammar else listed
    return 8 * num_counted + 8 * len(sampling.bias) + (MASK_HEADER_BYTES if needs_mask(spec) else 0) + mask


def empty_field(spec: RequestSpec, *, logits_width: int) -> str | None:
    """The field that leaves a request without any id to sample; None if there is always one."""
    sampling = spec.sampling
    for field, banned in (
        ("sampling.banned_token_ids", set(sampling.banned_ids)),
        ("stop.min_tokens", {*sampling.banned_ids, *spec.stop_token_ids} if spec.min_tokens else set()),
    ):
        if sampling.allowed_ids:
            if banned.issuperset(sampling.allowed_ids):
                return field
        elif len(banned) >= logits_width:
            return field
    return None


def _counts(spec: RequestSpec) -> TokenCounts | None:
    if not needs_counts(spec):
        return None
    return TokenCounts(spec.prompt_ids.tolist() if spec.sampling.repetition_penalty != 1 else ())


def _listed_mask(spec: RequestSpec, *, banned: Iterable[int]) -> KeyedMask | None:
    allowed, banned = spec.sampling.allowed_ids, set(banned)
    if allowed:
        ids = np.array(sorted(set(allowed) - banned), np.uint32)
        return KeyedMask(Mask(allowed_ids=ids), ("allowed_ids", ids.tobytes()))
    if banned:
        ids = np.array(sorted(banned), np.uint32)
        return KeyedMask(Mask(denied_ids=ids), ("denied_ids", ids.tobytes()))
    return None


def _bits(ids: Sequence[int] | frozenset[int], *, num_bytes: int) -> np.ndarray:
    flags = np.zeros(8 * num_bytes, np.uint8)
    chosen = np.fromiter(ids, np.int64, len(ids))
    flags[chosen[chosen < len(flags)]] = 1
    return np.packbits(flags, bitorder="little")
