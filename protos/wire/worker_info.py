"""What a worker says of itself when a scheduler attaches, frozen.

Made by the worker's composition root or by `codec.worker_info_from_proto`; page size, pool sizes, limits and buckets
exist once, here, and are never a second setting on the scheduler.
"""

from dataclasses import dataclass

from protos.wire.enums import Feature, ForwardMode, GraphPhase, HiddenMode, SubPoolKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SubPool:
    """Geometry of one sub-pool of pages. Usable pages are 1 .. num_pages - 1; page 0 is the sink."""

    kind: SubPoolKind
    num_pages: int
    page_size: int
    bytes_per_page: int
    window_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Hard limits of one worker."""

    max_rows: int
    max_tokens: int
    """Most tokens of one plan."""
    max_plan_bytes: int
    window: int
    """Plans that may be in flight."""
    cached_results: int
    context_tokens: int
    """Longest sequence the model can hold."""
    max_logprobs: int
    max_hidden_states: int = 0
    """Most hidden states of one plan, all rows together."""

    @property
    def ring_plans(self) -> int:
        """Plans whose tokens a worker remembers: those in flight and two more."""
        return self.window + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Captured sizes of one phase, ascending; `live` can be replayed now."""

    phase: GraphPhase
    sizes: tuple[int, ...]
    live: tuple[int, ...]
    slots: int = 0
    dead: tuple[int, ...] = ()
    """Their capture failed; they stay so until the worker's next start."""
    graph_bytes: int = 0
    """What all graphs of the phase take."""
    capture_ms: int = 0
    """What capturing them took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprints:
    """Hex digests that must agree between the scheduler's model folder and the worker."""

    weights: str
    tokenizer: str
    kv_layout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Answer to Attach."""

    incarnation: bytes
    protocol: int
    features: frozenset[Feature]
    sub_pools: tuple[SubPool, ...]
    limits: WorkerLimits
    logits_width: int
    """Every token id a plan may name is below this."""
    buckets: tuple[Buckets, ...]
    modes: frozenset[ForwardMode]
    numerics: str
    dtype: str
    device: str
    model_name: str
    fingerprints: Fingerprints
    max_hidden_mode: HiddenMode
    kernels: str
    """Name of the active kernels, for people."""
    version: str = ""
    """Release of the worker, for people."""
