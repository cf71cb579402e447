"""ForwardBatch: the device form of one forward of a plan, frozen.

Made by `builder` only, read by runners, attention, layers and the sampler, lives for one step. Knows nothing of models,
graphs or pools. Guards: host copy equals device tensor; what is absent is `None`, never an empty tensor with a meaning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from protos.wire.enums import ForwardMode, GraphRefusal, HiddenMode
from protos.wire.plan import GraphChoice
from worker_svc.batch.forward_mode import traits_of
from worker_svc.batch.logit_rules import LogitRules

Array = np.ndarray


def _same(tensor: Tensor, host: Array) -> bool:
    return bool(np.array_equal(tensor.detach().cpu().numpy(), host))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageGroup:
    """Pages of one sub-pool, and where this step writes in it. Host arrays are read-only."""

    sub_pool: int
    """Index into the worker's geometry."""
    kv_indptr: Tensor
    """[num_reqs + 1] int32, owned: row r uses kv_indices[kv_indptr[r]:kv_indptr[r + 1]]; first 0."""
    kv_indices: Tensor
    """[kv_indptr[num_reqs]] int32, owned: pages in the order of positions; never 0."""
    kv_last_page_len: Tensor
    """[num_reqs] int32, owned: used slots of the row's last page, 1..page_size."""
    out_cache_loc: Tensor
    """[num_tokens] int64, owned: device slot each token writes to; 0 = the sink, never read."""
    kv_indptr_host: Array
    """[num_reqs + 1] int32"""
    kv_indices_host: Array
    """[kv_indptr[num_reqs]] int32"""
    kv_last_page_len_host: Array
    """[num_reqs] int32"""
    start_positions_host: Array
    """[num_reqs] int32: position of the first slot of the row's first listed page; 0 but in a window sub-pool."""

    def check(self, *, num_reqs: int, num_tokens: int) -> None:
        """Assert that shapes and host copies agree. Reads the device: for tests."""
        assert self.kv_indptr.shape == (num_reqs + 1,)
        assert self.kv_indptr_host[0] == 0
        assert self.kv_indices.shape == (int(self.kv_indptr_host[-1]),)
        assert self.kv_last_page_len.shape == self.start_positions_host.shape == (num_reqs,)
        assert self.out_cache_loc.shape == (num_tokens,)
        assert _same(self.kv_indptr, self.kv_indptr_host)
        assert _same(self.kv_indices, self.kv_indices_host)
        assert _same(self.kv_last_page_len, self.kv_last_page_len_host)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExtendGroup:
    """Lengths of rows that compute more than one token. Present iff the mode's traits say so."""

    extend_lens: Tensor
    """[num_reqs] int32, owned: tokens computed now."""
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
        """Assert that lengths add up and host copies agree. Reads the device: for tests."""
        assert int(self.extend_lens_host.sum()) == num_tokens
        assert np.array_equal(self.prefix_lens_host + self.extend_lens_host, seq_lens_host)
        assert np.array_equal(self.extend_start_loc_host, np.cumsum(self.extend_lens_host) - self.extend_lens_host)
        assert _same(self.extend_lens, self.extend_lens_host)
        assert _same(self.prefix_lens, self.prefix_lens_host)
        assert _same(self.extend_start_loc, self.extend_start_loc_host)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingGroup:
    """How the rows that sample now do it, in row order. K = rows that sample; host arrays, read-only.

    Present iff K > 0. The sampler moves to the device what a row needs there.
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

    def check(self, *, num_reqs: int, num_logits: int) -> None:
        """Assert one element per sampled row and ascending rows."""
        columns = (self.positions, self.temperatures, self.top_ks, self.top_ps, self.min_ps, self.seeds)
        assert all(column.shape == (num_logits,) for column in (self.rows, self.sample_indices, *columns))
        assert bool((np.diff(self.rows) > 0).all())
        assert num_logits == 0 or int(self.rows[-1]) < num_reqs
        assert all(0 <= place < num_logits for place in self.rules)


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
class HiddenGroup:
    """Which final hidden states the rows return. Present iff one does, or the server captures some anyway."""

    modes: Array
    """[num_reqs] uint8, values of `HiddenMode`. Host, read-only."""
    capture_mode: HiddenMode
    """What the forward keeps: the highest of the server's setting and the rows' modes."""

    def check(self, *, num_reqs: int) -> None:
        """Assert one mode a row, none above what is kept."""
        assert self.modes.shape == (num_reqs,)
        assert num_reqs == 0 or int(self.modes.max()) <= self.capture_mode


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogprobGroup:
    """Which log-probabilities of the raw distribution the rows return. Present iff one does."""

    wanted: Array
    """[K] bool: return the sampled token's log-probability."""
    top_counts: Array
    """[K] int64: how many best tokens to return."""
    prompt: PromptLogprobGroup | None = None
    """Of input tokens; None: none."""

    def check(self, *, num_logits: int) -> None:
        """Assert one element per sampled row."""
        assert self.wanted.shape == self.top_counts.shape == (num_logits,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBatch:
    """One forward on the device. `num_reqs` rows, `num_tokens` tokens, K rows that sample."""

    forward_mode: ForwardMode
    """What runs."""
    logical_mode: ForwardMode
    """What it was before padding relabelled it."""
    graph: GraphChoice | GraphRefusal
    """The plan's choice: the bucket to replay, or why none."""
    num_reqs: int
    num_tokens: int
    input_ids: Tensor
    """[num_tokens] int32, owned: row after row."""
    positions: Tensor
    """[num_tokens] int64, owned: absolute position of each token."""
    seq_lens: Tensor
    """[num_reqs] int32, owned: tokens in the sequence, those of this step included."""
    seq_lens_host: Array
    """[num_reqs] int32, read-only"""
    page_groups: tuple[PageGroup, ...]
    """One per sub-pool, in the order of the worker's geometry."""
    logits_rows: Tensor
    """[K] int64, owned: index of the tokens whose logits are wanted, in row order."""
    last_token_rows: Tensor
    """[num_reqs] int64, owned: index of each row's last token; the finite flag covers these."""
    extend: ExtendGroup | None = None
    sampling: SamplingGroup | None = None
    logprobs: LogprobGroup | None = None
    hidden: HiddenGroup | None = None

    @property
    def wants_all_hidden(self) -> bool:
        """Whether the final hidden state of every token is needed, not only of each row's last."""
        if self.hidden is not None and self.hidden.capture_mode >= HiddenMode.FULL:
            return True
        return self.logprobs is not None and self.logprobs.prompt is not None

    @property
    def num_logits(self) -> int:
        """K."""
        return len(self.logits_rows)

    def query_lens_host(self) -> Array:
        """[num_reqs] int32: tokens each row computes now."""
        if self.extend is not None:
            return self.extend.extend_lens_host
        return np.ones(self.num_reqs, np.int32)

    def check(self) -> None:
        """Assert that fields, groups and the mode's traits agree. Reads the device: for tests."""
        assert self.input_ids.shape == self.positions.shape == (self.num_tokens,)
        assert self.seq_lens.shape == self.last_token_rows.shape == (self.num_reqs,)
        assert _same(self.seq_lens, self.seq_lens_host)
        assert (self.extend is not None) == traits_of(self.forward_mode).has_extend_group
        assert (self.sampling is not None) == (self.num_logits > 0)
        if self.extend is None:
            assert self.num_tokens == self.num_reqs
        else:
            self.extend.check(seq_lens_host=self.seq_lens_host, num_tokens=self.num_tokens)
        for group in self.page_groups:
            group.check(num_reqs=self.num_reqs, num_tokens=self.num_tokens)
        if self.sampling is not None:
            self.sampling.check(num_reqs=self.num_reqs, num_logits=self.num_logits)
        if self.logprobs is not None:
            self.logprobs.check(num_logits=self.num_logits)
            if self.logprobs.prompt is not None:
                self.logprobs.prompt.check(num_reqs=self.num_reqs, num_tokens=self.num_tokens)
        if self.hidden is not None:
            self.hidden.check(num_reqs=self.num_reqs)
