"""Runs a forward operator by operator. Takes every batch; the path that every other one must equal."""

from typing import Any

import torch
from torch import Tensor

from protos.wire.enums import GraphRefusal
from worker_svc.attention.base import AttentionBackend
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.forward_context import ForwardContext
from worker_svc.model_runner import LanguageModel, ModelRunner, RunnerOutput


class EagerRunner:
    """A `ForwardRunner`. Last in dispatch's order."""

    replays_graphs = False

    def __init__(self, model_runner: ModelRunner, context: ForwardContext) -> None:
        self.model_runner = model_runner
        self.context = context

    def refusal(self, batch: ForwardBatch) -> GraphRefusal | None:  # noqa: ARG002 - the protocol's signature
        """Never."""
        return None

    def padded_tokens(self, batch: ForwardBatch) -> int:  # noqa: ARG002 - the protocol's signature
        """None."""
        return 0

    def forward(self, batch: ForwardBatch) -> RunnerOutput:
        """Run `batch`."""
        return self.model_runner.forward(batch, self.context)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Of final hidden states."""
        return self.model_runner.logits(hidden)


def eager_runner(model: LanguageModel, *attention: AttentionBackend[Any]) -> EagerRunner:
    """The runner of `model` over the bound back-end of each sub-pool."""
    return EagerRunner(ModelRunner(model), ForwardContext(*attention))
