"""Optional groups of a ForwardBatch that concern its rows: extend lengths, sampling, log-probabilities, hidden states.

Made by `builder`, read by attention, the sampler and the result's packers, lives for one step. A group is there as a
whole or not at all. Guards: host copy equals device tensor; padding adds no sampled row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from protos.wire.enums import HiddenMode
from worker_svc.batch.logit_rules import LogitRules
from worker_svc.batch.owned import Array, frozen_copy, is_same
from worker_svc.device.host_staging import device_copy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExtendGroup:
    """Lengths of rows that compute more than one token. Present iff the mode's traits say so."""

    extend_lens: Tensor
    """[num_reqs] int32, owned: tokens computed now; 0 in padding rows."""
    prefix_lens: Tensor
    """[num_reqs] int32, owned: tokens already in the KV pool; prefix_lens + extend_lens == seq_lens."""
    extend_start_loc: Tensor
    """[num_reqs] int32, owned: exclusive running sum of extend_lens."""
    extend_lens_host: Array
    """[num_reqs] int32, read-only"""
    prefix_lens_host: Array
    """[num_reqs] int32, read-only"""
    extend_start_loc_host: Array
    """[num_reqs] int32, read-only"""

    def check(self, *, seq_lens_host: Array, num_tokens: int) -> None:
        """Assert that lengths add up to the real tokens and host copies agree. Reads the device: for tests."""
        assert int(self.extend_lens_host.sum()) == num_tokens
        assert np.array_equal(self.prefix_lens_host + self.extend_lens_host, seq_lens_host)
        assert np.array_equal(self.extend_start_loc_host, np.cumsum(self.extend_lens_host) - self.extend_lens_host)
        assert is_same(self.extend_lens, self.extend_lens_host)
        assert is_same(self.prefix_lens, self.prefix_lens_host)
        assert is_same(self.extend_start_loc, self.extend_start_loc_host)

    def pad(self, *, num_reqs: int) -> "ExtendGroup":
        """More rows of no tokens, which start where the real tokens end."""
        missing = num_reqs - len(self.extend_lens_host)
        none = np.zeros(missing, np.int32)
        end = np.full(missing, self.extend_lens_host.sum(), np.int32)
        return self._with(
            extend_lens=np.concatenate([self.extend_lens_host, none]),
            prefix_lens=np.concatenate([self.prefix_lens_host, none]),
            starts=np.concatenate([self.extend_start_loc_host, end]),
        )

    def trim(self, *, num_reqs: int) -> "ExtendGroup":
        """The first rows only."""
        return self._with(
            extend_lens=self.extend_lens_host[:num_reqs],
            prefix_lens=self.prefix_lens_host[:num_reqs],
            starts=self.extend_start_loc_host[:num_reqs],
        )

    def _with(self, *, extend_lens: Array, prefix_lens: Array, starts: Array) -> "ExtendGroup":
        device = self.extend_lens.device
        return ExtendGroup(
            extend_lens=device_copy(extend_lens, device),
            prefix_lens=device_copy(prefix_lens, device),
            extend_start_loc=device_copy(starts, device),
            extend_lens_host=frozen_copy(extend_lens),
            prefix_lens_host=frozen_copy(prefix_lens),
            extend_start_loc_host=frozen_copy(starts),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingGroup:
    """How the rows that sample now do it, in row order. K = rows that sample; host arrays, read-only.

    Present iff K > 0. The sampler moves to the device what a row needs there. Padding rows never sample, so that a
    padded batch lends the same group.
    """

    rows: Array
    """[K] int64: row of this batch, ascending."""
    positions: Array
    """[K] int64: position of the row's last input token; part of the noise's counter."""
    temperatures: Array
    """[K] float32: 0 = greedy."""
    top_ks: Array
    """[K] uint32: 0 = off."""
    top_ps: Array
    """[K] float32: 1 = off."""
    min_ps: Array
    """[K] float32: 0 = off."""
    seeds: Array
    """[K] uint64: key of the noise."""
    sample_indices: Array
    """[K] uint32: which of the n samples of its prompt."""
    rules: Mapping[int, LogitRules] = field(default_factory=dict)
    """By place in [K]: what changes the row's logits first. Rows without rules are absent."""

    def is_greedy(self) -> Array:
        """[K] bool: the row's token is the arg-max of its logits."""
        greedy: Array = self.temperatures == 0
        greedy[list(self.rules)] = False
        return greedy

    def check(self, *, num_reqs: int, num_logits: int) -> None:
        """Assert one element per sampled row and ascending rows."""
        columns = (self.positions, self.temperatures, self.top_ks, self.top_ps, self.min_ps, self.seeds)
        assert all(column.shape == (num_logits,) for column in (self.rows, self.sample_indices, *columns))
        assert bool((np.diff(self.rows) > 0).all())
        assert num_logits == 0 or int(self.rows[-1]) < num_reqs
        assert all(0 <= place < num_logits for place in self.rules)

    def pad(self) -> "SamplingGroup":
        """Itself: padding adds no row that samples."""
        return self

    def trim(self) -> "SamplingGroup":
        """Itself."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BestLogits:
    """The arg-max of K rows of logits, and where the logits of each row are. Host arrays."""

    ids: Array
    """[K] int64: lowest id of the largest value."""
    values: Array
    """[K] float32: that value, NaN if the row holds one."""
    places: Array
    """[K] int64: the row's place among the logits that were written; -1: they were not."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptLogprobGroup:
    """Positions whose following token's log-probability is wanted, row after row. P of them; host arrays, read-only."""

    rows: Array
    """[P] int64: row of this batch, not falling."""
    token_rows: Array
    """[P] int64: index of the token at that position."""
    target_ids: Array
    """[P] int64: the token that follows."""
    top_counts: Array
    """[P] int64: how many best tokens to return."""

    def check(self, *, num_reqs: int, num_tokens: int) -> None:
        """Assert one element per position, all inside the batch."""
        columns = (self.token_rows, self.target_ids, self.top_counts)
        assert all(column.shape == self.rows.shape for column in columns)
        assert bool((np.diff(self.rows) >= 0).all())
        assert bool(((self.rows >= 0) & (self.rows < num_reqs)).all())
        assert bool(((self.token_rows >= 0) & (self.token_rows < num_tokens)).all())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogprobGroup:
    """Which log-probabilities of the raw distribution the rows return. Present iff one does."""

    wanted: Array
    """[K] bool: return the sampled token's log-probability."""
    top_counts: Array
    """[K] int64: how many best tokens to return."""
    prompt: PromptLogprobGroup | None = None
    """Of input tokens; None: none."""

    def is_wanted(self) -> Array:
        """[K] bool: the row returns some of its sampled token."""
        wanted: Array = self.wanted | (self.top_counts > 0)
        return wanted

    def check(self, *, num_reqs: int, num_tokens: int, num_logits: int) -> None:
        """Assert one element per sampled row, and that positions are inside the batch."""
        assert self.wanted.shape == self.top_counts.shape == (num_logits,)
        if self.prompt is not None:
            self.prompt.check(num_reqs=num_reqs, num_tokens=num_tokens)

    def pad(self) -> "LogprobGroup":
        """Itself: padding adds no row that samples and no position that is asked for."""
        return self

    def trim(self) -> "LogprobGroup":
        """Itself."""
        return self


def wants_logits(sampling: SamplingGroup | None, logprobs: LogprobGroup | None, *, num_logits: int) -> Array:
    """[num_logits] bool: sampled rows of which more than the arg-max is needed. Padding, which is last, needs none."""
    wants = np.zeros(num_logits, bool)
    if sampling is not None:
        wants[: len(sampling.rows)] = ~sampling.is_greedy()
    if logprobs is not None:
        wants[: len(logprobs.wanted)] |= logprobs.is_wanted()
    return wants


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HiddenCaptureGroup:
    """Which final hidden states the rows return. Present iff a row returns some, or the server keeps some anyway."""

    modes: Array
    """[num_reqs] uint8, values of `HiddenMode`, read-only; NULL in padding rows."""
    server_mode: HiddenMode = HiddenMode.NULL
    """What every forward of this server keeps at least."""

    @property
    def mode(self) -> HiddenMode:
        """The highest of the server's and the rows': what the forward must capture."""
        return max(self.server_mode, HiddenMode(int(self.modes.max(initial=HiddenMode.NULL))))

    def check(self, *, num_reqs: int) -> None:
        """Assert one legal mode a row, and that one is above NULL."""
        assert self.modes.shape == (num_reqs,)
        assert set(self.modes.tolist()) <= set(HiddenMode)
        assert self.mode > HiddenMode.NULL

    def pad(self, *, num_reqs: int) -> "HiddenCaptureGroup":
        """More rows that return nothing."""
        none = np.full(num_reqs - len(self.modes), HiddenMode.NULL, np.uint8)
        return replace(self, modes=frozen_copy(np.concatenate([self.modes, none])))

    def trim(self, *, num_reqs: int) -> "HiddenCaptureGroup":
        """The first rows only."""
        return replace(self, modes=frozen_copy(self.modes[:num_reqs]))
