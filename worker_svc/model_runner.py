"""ModelRunner: a batch into hidden states and logits.

Knows no graphs, no sampling, no padding and no transport; the model is handed to it. Guards: the finite flag covers the
last token of every row, sampling or not.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.batch.row_groups import BestLogits
from worker_svc.forward_context import ForwardContext


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunnerOutput:
    """What a forward leaves behind. Owned by the caller."""

    last_hidden: Tensor
    """[num_reqs, hidden_size]: final hidden state of each row's last token, normalised."""
    logits: Tensor
    """[K, logits_width] float32: of the tokens in `batch.logits_rows`; with `best`, of those that it has places for."""
    finite: Tensor
    """[num_reqs] bool: the row's last hidden state holds no NaN and no infinity."""
    best: BestLogits | None = None
    """Where the runner chose while it computed: the logits that `wants_logits` leaves out do not exist."""
    hidden: Tensor | None = None
    """[num_tokens, hidden_size]: final hidden state of every token, normalised. Present iff the batch wants all."""


class LanguageModel(Protocol):
    """What a model family offers. Weights are its own; everything of the step comes as argument."""

    def hidden_states(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size], normalised, owned."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, logits_width] float32, owned."""
        ...


class ModelRunner:
    """Made by the composition root, wrapped by runners."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, context: ForwardContext) -> RunnerOutput:
        """Run the layers over `batch`, which has at least one token. Writes the pool at its slots."""
        with context.bind(batch):
            hidden = self._model.hidden_states(batch.input_ids, batch.positions, context)
        last_hidden = hidden.index_select(0, batch.last_token_rows)
        return RunnerOutput(
            last_hidden=last_hidden,
            logits=self._model.logits(hidden.index_select(0, batch.logits_rows)),
            finite=last_hidden.isfinite().all(-1),
            hidden=hidden if batch.wants_all_hidden else None,
        )

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, logits_width] float32 of final hidden states [n, hidden_size]."""
        return self._model.logits(hidden)
