"""How much memory captured graphs will take: measured at an earlier start, or estimated from the model's widths."""

from collections.abc import Iterable
from dataclasses import dataclass

from protos.wire.enums import GraphPhase
from worker_svc.models.model_config import ModelConfig

_HIDDEN_COPIES = 6
"""Of a token's hidden state that live at once: residual, its norm, the inputs and outputs of a projection."""
_INTERMEDIATE_COPIES = 3
"""Gate, up and their product."""


@dataclass(frozen=True, slots=True)
class GraphNeed:
    """Sizes to capture by phase, in a model of these widths."""

    config: ModelConfig
    itemsize: int
    """Bytes of one number of an activation."""

    def estimate(self, sizes_by_phase: Iterable[tuple[GraphPhase, tuple[int, ...]]]) -> int:
        """Bytes. All shapes share the memory of the largest; kept tensors are as large as the largest, too."""
        return max((self.of_size(phase, sizes[-1]) for phase, sizes in sizes_by_phase if sizes), default=0)

    def of_size(self, phase: GraphPhase, size: int) -> int:
        """Bytes of one shape alone."""
        config = self.config
        attended = config.num_q_heads * config.head_dim
        projected = attended + 2 * config.num_kv_heads * config.head_dim
        live = _HIDDEN_COPIES * config.hidden_size + _INTERMEDIATE_COPIES * config.intermediate_size + 2 * projected
        kept = config.num_layers * attended + projected + config.hidden_size
        logits = 2 * config.vocab_size if phase is GraphPhase.DECODE else 0
        return size * (live + kept + logits) * self.itemsize

    def largest_fitting(self, phase: GraphPhase, sizes: tuple[int, ...], *, free_bytes: int) -> tuple[int, ...]:
        """The part of `sizes` that fits."""
        return tuple(size for size in sizes if self.of_size(phase, size) <= free_bytes)
