"""ForwardBatch: the device form of one forward of a plan, frozen: a small core and optional groups.

Made by `builder` or by padding, read by runners, attention, layers and the sampler, lives for one step. Knows no
models, graphs or pools. Guards: host copy equals device tensor; what is absent is `None`, never an empty tensor with a
meaning; trimming is the exact inverse of padding.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from protos.wire.enums import ForwardMode, GraphRefusal, HiddenMode
from protos.wire.plan import GraphChoice
from worker_svc.batch.forward_mode import traits_of
from worker_svc.batch.owned import Array, frozen_copy, is_same, with_tail
from worker_svc.batch.padding_counts import SINGLE_RANK, AttentionRanks, PaddingCounts, local_tokens, token_count
from worker_svc.batch.page_group import PageGroup
from worker_svc.batch.row_groups import ExtendGroup, HiddenCaptureGroup, LogprobGroup, SamplingGroup
from worker_svc.kv.write_plan import WritePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedShape:
    """What a batch is padded to. At least its own sizes."""

    num_reqs: int
    num_tokens: int
    """Equal to `num_reqs` where every row computes one token."""
    num_logits: int
    """Of `logits_rows`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBatch:
    """One forward on the device. `num_reqs` rows, `num_tokens` tokens, K rows that sample."""

    forward_mode: ForwardMode
    """What runs."""
    logical_mode: ForwardMode
    """What it was before padding relabelled it."""
    graph: GraphChoice | GraphRefusal
    """The plan's choice: the bucket to replay, or why none."""
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
    """[num_reqs] int64, owned: index of each row's last token; the finite flag covers these. 0 in an empty row."""
    write_plan: WritePlan | None = None
    """Lent by the step: every forward of the plan binds the same one. Absent only in batches made by hand."""
    extend: ExtendGroup | None = None
    sampling: SamplingGroup | None = None
    logprobs: LogprobGroup | None = None
    hidden: HiddenCaptureGroup | None = None
    padding: PaddingCounts | None = None

    @property
    def wants_all_hidden(self) -> bool:
        """Whether the final hidden state of every token is needed, not only of each row's last."""
        if self.hidden is not None and self.hidden.mode >= HiddenMode.FULL:
            return True
        return self.logprobs is not None and self.logprobs.prompt is not None

    @property
    def num_reqs(self) -> int:
        """Rows, padding included."""
        return len(self.seq_lens_host)

    @property
    def num_tokens(self) -> int:
        """Tokens, padding included."""
        return self.input_ids.shape[0]

    @property
    def num_logits(self) -> int:
        """K, padding included."""
        return self.logits_rows.shape[0]

    @property
    def runs_model(self) -> bool:
        """Whether layers run at all."""
        return traits_of(self.forward_mode).runs_model

    @property
    def real_reqs(self) -> int:
        """Rows that are in the plan."""
        return self.num_reqs if self.padding is None else self.padding.num_reqs

    @property
    def real_tokens(self) -> int:
        """Tokens that are in the plan."""
        return self.num_tokens if self.padding is None else self.padding.num_tokens

    @property
    def real_logits(self) -> int:
        """K without padding."""
        return self.num_logits if self.padding is None else self.padding.num_logits

    def query_lens_host(self) -> Array:
        """[num_reqs] int32: tokens each row computes now."""
        if self.extend is not None:
            return self.extend.extend_lens_host
        return np.ones(self.num_reqs, np.int32)

    def check(self) -> None:
        """Assert that fields, groups and the mode's traits agree. Reads the device: for tests."""
        assert self.input_ids.shape == self.positions.shape == (self.num_tokens,)
        assert self.seq_lens.shape == self.last_token_rows.shape == (self.num_reqs,)
        assert is_same(self.seq_lens, self.seq_lens_host)
        assert (self.extend is not None) == traits_of(self.forward_mode).has_extend_group
        assert (self.sampling is not None) == (self.real_logits > 0)
        if self.extend is None:
            assert self.num_tokens == self.num_reqs
        else:
            self.extend.check(seq_lens_host=self.seq_lens_host, num_tokens=self.real_tokens)
        for group in self.page_groups:
            group.check(num_reqs=self.num_reqs, num_tokens=self.num_tokens)
        if self.sampling is not None:
            self.sampling.check(num_reqs=self.real_reqs, num_logits=self.real_logits)
        if self.logprobs is not None:
            self.logprobs.check(num_reqs=self.real_reqs, num_tokens=self.real_tokens, num_logits=self.real_logits)
        if self.hidden is not None:
            self.hidden.check(num_reqs=self.num_reqs)
        if self.padding is not None:
            self.padding.check(num_reqs=self.num_reqs, num_tokens=self.num_tokens, num_logits=self.num_logits)

    def pad(self, shape: PaddedShape, *, ranks: AttentionRanks = SINGLE_RANK) -> "ForwardBatch":
        """A new batch of `shape`; this one is untouched.

        Padding tokens have id 0 and position 0 and write to the sink. Padding rows of a batch without extend lengths
        are sequences of one token in the sink; those of one with them are empty and start behind the real tokens.

        Args:
            shape: at least as large as this batch, which is not padded itself; asserted, since dispatch has refused
                what does not fit.
            ranks: how the padded tokens are shared out, for the local count.
        """
        assert self.padding is None, "a padded batch is not padded again"
        own = (self.num_reqs, self.num_tokens, self.num_logits)
        wanted = (shape.num_reqs, shape.num_tokens, shape.num_logits)
        assert all(size <= room for size, room in zip(own, wanted, strict=True)), f"{own} do not fit {wanted}"
        one_token_rows = int(self.extend is None)
        seq_lens = np.full(shape.num_reqs, one_token_rows, np.int32)
        seq_lens[: self.num_reqs] = self.seq_lens_host
        last_tokens = with_tail(self.last_token_rows, shape.num_reqs, fill=0)
        if one_token_rows:
            assert shape.num_tokens == shape.num_reqs, "a row of this mode computes one token"
            torch.arange(shape.num_reqs, out=last_tokens)
        return replace(
            self,
            input_ids=with_tail(self.input_ids, shape.num_tokens, fill=0),
            positions=with_tail(self.positions, shape.num_tokens, fill=0),
            seq_lens=with_tail(self.seq_lens, shape.num_reqs, fill=one_token_rows),
            seq_lens_host=frozen_copy(seq_lens),
            page_groups=tuple(
                group.pad(num_reqs=shape.num_reqs, num_tokens=shape.num_tokens, pages_per_row=one_token_rows)
                for group in self.page_groups
            ),
            logits_rows=with_tail(self.logits_rows, shape.num_logits, fill=0),
            last_token_rows=last_tokens,
            extend=None if self.extend is None else self.extend.pad(num_reqs=shape.num_reqs),
            sampling=None if self.sampling is None else self.sampling.pad(),
            logprobs=None if self.logprobs is None else self.logprobs.pad(),
            hidden=None if self.hidden is None else self.hidden.pad(num_reqs=shape.num_reqs),
            padding=self._counts(shape, ranks),
        )

    def trim(self) -> "ForwardBatch":
        """A new batch of the real rows and tokens only; itself, if it was not padded."""
        real = self.padding
        if real is None:
            return self
        return replace(
            self,
            input_ids=self.input_ids[: real.num_tokens].clone(),
            positions=self.positions[: real.num_tokens].clone(),
            seq_lens=self.seq_lens[: real.num_reqs].clone(),
            seq_lens_host=frozen_copy(self.seq_lens_host[: real.num_reqs]),
            page_groups=tuple(
                group.trim(num_reqs=real.num_reqs, num_tokens=real.num_tokens) for group in self.page_groups
            ),
            logits_rows=self.logits_rows[: real.num_logits].clone(),
            last_token_rows=self.last_token_rows[: real.num_reqs].clone(),
            extend=None if self.extend is None else self.extend.trim(num_reqs=real.num_reqs),
            sampling=None if self.sampling is None else self.sampling.trim(),
            logprobs=None if self.logprobs is None else self.logprobs.trim(),
            hidden=None if self.hidden is None else self.hidden.trim(num_reqs=real.num_reqs),
            padding=None,
        )

    def _counts(self, shape: PaddedShape, ranks: AttentionRanks) -> PaddingCounts:
        local = local_tokens(self.num_tokens, padded_tokens=shape.num_tokens, ranks=ranks)
        device = self.input_ids.device
        return PaddingCounts(
            num_reqs=self.num_reqs,
            num_logits=self.num_logits,
            global_tokens=token_count(self.num_tokens, device),
            local_tokens=token_count(local, device),
        )
