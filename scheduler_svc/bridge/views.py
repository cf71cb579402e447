"""What edges may know of the core beside their streams, as frozen types. Knows nothing of protobuf."""

from dataclasses import dataclass

from protos.wire.enums import GraphPhase, GraphRefusal, HiddenMode, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """What the attached workers can do. Made by the loop; sent to an edge on connect and on every change."""

    context_tokens: int = 0
    capacity_tokens: int = 0
    """Tokens of one sequence that the largest KV pool can ever hold."""
    logits_width: int = 0
    dtype: str = ""
    numerics: str = ""
    max_logprobs: int = 0
    max_hidden_states: int = 0
    """Most hidden states of one prompt."""
    max_hidden_mode: HiddenMode = HiddenMode.NULL
    """Highest hidden mode that a plan may ask for."""
    max_waiting_requests: int = 0
    max_waiting_tokens: int = 0
    """Of the queue."""
    serving: bool = False
    """False until a worker is attached, and again while none is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphView:
    """How the forwards of one phase ran on a worker, and what of its graphs is captured."""

    phase: GraphPhase
    replays: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    misses: tuple[tuple[GraphRefusal, int], ...] = ()
    live: int = 0
    dead: int = 0
    planned: int = 0
    """Buckets: live, dead and still to be captured."""
    graph_bytes: int = 0
    capture_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker at one moment. Counts are since the core's start."""

    name: str
    state: WorkerState | None = None
    """None: not attached."""
    device: str = ""
    dtype: str = ""
    numerics: str = ""
    kernels: str = ""
    requests_running: int = 0
    pages: int = 0
    pages_used: int = 0
    plans_in_flight: int = 0
    plans: int = 0
    plan_rows: int = 0
    plan_bytes: int = 0
    graphs: tuple[GraphView, ...] = ()

    @property
    def graph_replays(self) -> int:
        """Of all phases."""
        return sum(graph.replays for graph in self.graphs)

    @property
    def graph_misses(self) -> int:
        """Of all phases and reasons."""
        return sum(count for graph in self.graphs for _, count in graph.misses)

    @property
    def padded_tokens(self) -> int:
        """Of all phases."""
        return sum(graph.padded_tokens for graph in self.graphs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadView:
    """The whole core at one moment."""

    requests_running: int
    requests_waiting: int
    kv_usage: float
    """0 .. 1: used pages of all attached workers."""
    workers: tuple[WorkerView, ...]
