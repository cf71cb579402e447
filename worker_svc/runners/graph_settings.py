"""What is captured and how: plain values from the composition root, read once, at start."""

from dataclasses import dataclass

from protos.wire.enums import GraphPhase

PHASES_OF_GRAPH: dict[str, frozenset[GraphPhase]] = {
    "off": frozenset(),
    "decode": frozenset({GraphPhase.DECODE}),
    "prefill": frozenset({GraphPhase.PREFILL}),
    "all": frozenset(GraphPhase),
}

_SPECIAL = (
    "graph",
    "decode_graph_backend",
    "prefill_graph_backend",
    "decode_buckets",
    "prefill_buckets",
    "debug_graph",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSettings:
    """Made by the composition root. Nothing is captured unless it is asked for."""

    graph: str = "off"
    """Phases that replay graphs: `off`, `decode`, `prefill` or `all`."""
    decode_graph_backend: str = "full"
    """`full`, `breakable` or `compiled`."""
    prefill_graph_backend: str = "breakable"
    decode_buckets: tuple[int, ...] = ()
    """Rows, ascending. None given: the defaults, as far as plans may go."""
    prefill_buckets: tuple[int, ...] = ()
    """Tokens, ascending. None given: the defaults, as far as plans may go."""
    graph_slots: int = 32
    """Most rows of a prefill graph."""
    capture_wait_s: float = 10.0
    """Most seconds that a long piece of a capture waits for an idle device."""
    graph_memory_file: str | None = None
    """Where the memory of captured graphs is remembered. None: nothing is known of it."""
    debug_graph: bool = False
    """Keep runners, static buffers and padding, but run every forward eagerly inside them."""

    def captures(self, phase: GraphPhase) -> bool:
        """Whether graphs of the phase are wanted."""
        return phase in PHASES_OF_GRAPH[self.graph]

    def uses(self, backend: str) -> bool:
        """Whether some phase is captured by that back-end."""
        return any(self.captures(phase) and self.backend(phase) == backend for phase in GraphPhase)

    def special(self) -> dict[str, object]:
        """What is asked for beside all graphs as they are by default, by name: without graphs it has no effect."""
        if self.graph == "off":
            return {}
        usual = GraphSettings(graph="all")
        return {name: getattr(self, name) for name in _SPECIAL if getattr(self, name) != getattr(usual, name)}

    def backend(self, phase: GraphPhase) -> str:
        """Of the phase's runner."""
        if self.debug_graph:
            return "breakable"
        return self.decode_graph_backend if phase is GraphPhase.DECODE else self.prefill_graph_backend

    def asked(self, phase: GraphPhase) -> tuple[int, ...]:
        """The phase's buckets that were asked for; empty: the defaults."""
        return self.decode_buckets if phase is GraphPhase.DECODE else self.prefill_buckets
