"""How much of a padded batch is real, at two scopes.

GLOBAL: the real tokens of the whole forward, before attention ranks share them out. LOCAL: those of this rank. Pure but
for the device scalars. Guards: a device scalar and its host value are made together and never change.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker_svc.batch.owned import is_same
from worker_svc.device.host_staging import device_copy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenCount:
    """A number of real tokens, for the host and for kernels."""

    host: int
    device: Tensor
    """[1] int32, owned."""

    def check(self) -> None:
        """Assert that both agree. Reads the device: for tests."""
        assert is_same(self.device, np.array([self.host]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddingCounts:
    """The real sizes of a padded batch. Present iff the batch was padded."""

    num_reqs: int
    num_logits: int
    global_tokens: TokenCount
    local_tokens: TokenCount
    """Of this attention rank."""

    @property
    def num_tokens(self) -> int:
        """Real tokens of the batch."""
        return self.global_tokens.host

    def check(self, *, num_reqs: int, num_tokens: int, num_logits: int) -> None:
        """Assert that no real size is above the padded one. Reads the device: for tests."""
        assert 0 <= self.num_reqs <= num_reqs
        assert 0 <= self.local_tokens.host <= self.num_tokens <= num_tokens
        assert 0 <= self.num_logits <= num_logits
        self.global_tokens.check()
        self.local_tokens.check()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRanks:
    """How a forward's padded tokens lie on the ranks of one attention group."""

    size: int = 1
    rank: int = 0
    is_sharded: bool = False
    """Each rank holds one slice of the tokens; otherwise every rank holds them all."""


SINGLE_RANK = AttentionRanks()


def local_tokens(global_tokens: int, *, padded_tokens: int, ranks: AttentionRanks = SINGLE_RANK) -> int:
    """Real tokens of one rank: slices are cut from the padded width, so that trailing ranks may hold none."""
    if not ranks.is_sharded:
        return global_tokens
    chunk = padded_tokens // ranks.size
    return min(max(global_tokens - chunk * ranks.rank, 0), chunk)


def token_count(tokens: int, device: torch.device) -> TokenCount:
    """`tokens` on the host and on the device."""
    return TokenCount(host=tokens, device=device_copy(np.array([tokens], np.int32), device))
