"""What a server says of its load, as frozen types."""

from dataclasses import dataclass, field

from protos.forwardplane.v1 import generate_pb2
from protos.wire.enums import GraphPhase, GraphRefusal, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphUse:
    """How the forwards of one phase ran on a worker, and its graphs. Each is a replay, or a miss with one reason."""

    phase: GraphPhase
    replays: int = 0
    real_tokens: int = 0
    """Rows or tokens that the replays were asked for."""
    padded_tokens: int = 0
    """What they computed beside that, to fill their buckets."""
    misses: tuple[tuple[GraphRefusal, int], ...] = ()
    """Why forwards ran eagerly, and how many."""
    live: int = 0
    """Graphs that can be replayed now."""
    dead: int = 0
    """Those that could not be captured."""
    planned: int = 0
    """All that there will be, these two included; 0 where nothing is captured, or an older server does not tell."""
    graph_bytes: int = 0
    capture_ms: int = 0

    @property
    def num_misses(self) -> int:
        """Of all reasons."""
        return sum(count for _, count in self.misses)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """One worker as the scheduler sees it. `plans` and what follows are totals since it was attached."""

    name: str
    state: WorkerState | None
    device: str
    dtype: str
    numerics: str
    kernels: str
    requests_running: int
    pages: int
    pages_used: int
    plans_in_flight: int
    plans: int
    plan_rows: int
    plan_bytes: int
    graphs: tuple[GraphUse, ...] = field(default=())
    """Of each phase that ran or has graphs; an older server tells none."""

    @property
    def graph_replays(self) -> int:
        """Forwards that replayed a captured graph."""
        return sum(use.replays for use in self.graphs)

    @property
    def graph_misses(self) -> int:
        """Forwards that ran eagerly."""
        return sum(use.num_misses for use in self.graphs)

    @property
    def padded_tokens(self) -> int:
        """Tokens that replays computed for nothing."""
        return sum(use.padded_tokens for use in self.graphs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy a server is."""

    requests_running: int
    requests_waiting: int
    kv_usage: float
    workers: tuple[WorkerLoad, ...] = field(default=())


def load_from(message: generate_pb2.GetLoadReply) -> Load:
    """How busy a server is."""
    return Load(
        requests_running=message.requests_running,
        requests_waiting=message.requests_waiting,
        kv_usage=message.kv_usage,
        workers=tuple(_worker_load(worker) for worker in message.workers),
    )


def _worker_load(message: generate_pb2.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        name=message.name,
        state=WorkerState(message.state) if message.state else None,
        device=message.device,
        dtype=message.dtype,
        numerics=message.numerics,
        kernels=message.kernels,
        requests_running=message.requests_running,
        pages=message.pages,
        pages_used=message.pages_used,
        plans_in_flight=message.plans_in_flight,
        plans=message.plans,
        plan_rows=message.plan_rows,
        plan_bytes=message.plan_bytes,
        graphs=tuple(_graph_use(use) for use in message.graphs),
    )


def _graph_use(message: generate_pb2.GraphUse) -> GraphUse:
    return GraphUse(
        phase=GraphPhase(message.phase),
        replays=message.replays,
        real_tokens=message.real_tokens,
        padded_tokens=message.padded_tokens,
        misses=tuple((GraphRefusal(entry.reason), entry.count) for entry in message.misses),
        live=message.live,
        dead=message.dead,
        planned=message.planned,
        graph_bytes=message.graph_bytes,
        capture_ms=message.capture_ms,
    )
