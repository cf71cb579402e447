"""What every execution path looks like to dispatch.

A runner wraps `ModelRunner`: it knows phases, buckets and static buffers, the model runner knows none of them.
"""

from typing import Protocol

from torch import Tensor

from protos.wire.enums import GraphRefusal
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.model_runner import RunnerOutput


class ForwardRunner(Protocol):
    """One way to run a forward."""

    @property
    def replays_graphs(self) -> bool:
        """Whether its forwards count as replays of the bucket that the plan names."""
        ...

    def refusal(self, batch: ForwardBatch) -> GraphRefusal | None:
        """Why it will not take `batch`; None if it will."""
        ...

    def padded_tokens(self, batch: ForwardBatch) -> int:
        """Tokens that it will compute for `batch` beyond those of the plan."""
        ...

    def forward(self, batch: ForwardBatch) -> RunnerOutput:
        """Run a batch it does not refuse."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, logits_width] float32 of final hidden states [n, hidden_size]; with the bits of `forward`."""
        ...
