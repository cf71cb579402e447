"""How much memory captured graphs will take: measured at an earlier start, or estimated from the model's widths."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from protos.service.model_config import ModelConfig
from protos.wire.enums import GraphPhase
from worker_svc.device.graph_memory import GraphMemoryStore, graph_fingerprint
from worker_svc.runners.executor_settings import ExecutorSettings

_OF_THE_WORKER = ("numerics", "dtype", "device", "kernels", "page_size", "max_rows", "max_tokens")
_NOT_OF_MEMORY = ("capture_wait_s", "graph_memory_file")

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


def known_graph_bytes(settings: ExecutorSettings, **facts: object) -> int:
    """What graphs took at the last start of a worker like this one; 0 without a measurement."""
    file = settings.graphs.graph_memory_file
    if file is None or settings.graphs.graph == "off":
        return 0
    return sum(GraphMemoryStore(Path(file)).read(fingerprint_of(settings, **facts)).values())


def remember_graph_bytes(settings: ExecutorSettings, measured: Mapping[GraphPhase, int], **facts: object) -> None:
    """Keep what graphs took, for the next start of a worker like this one."""
    file = settings.graphs.graph_memory_file
    if file is not None:
        GraphMemoryStore(Path(file)).write(fingerprint_of(settings, **facts), measured)


def fingerprint_of(settings: ExecutorSettings, **facts: object) -> str:
    """Of everything that the memory of this worker's graphs depends on; `facts` name the model."""
    graphs = {name: value for name, value in asdict(settings.graphs).items() if name not in _NOT_OF_MEMORY}
    return graph_fingerprint(**{name: getattr(settings, name) for name in _OF_THE_WORKER}, **graphs, **facts)
