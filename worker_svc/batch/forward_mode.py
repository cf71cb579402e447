"""The nine forward modes as rows of one trait table.

The only file that compares `ForwardMode`; code elsewhere asks `traits_of(mode)`. Knows nothing of tensors. Guards: what
a mode means is written once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from types import MappingProxyType
from typing import Any

from protos.wire.enums import ForwardMode, GraphPhase


class AttentionSide(Enum):
    """Which attention planning a mode's rows need."""

    DECODE = "decode"
    EXTEND = "extend"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeTraits:
    """What a mode is and what a batch of it holds."""

    is_extend: bool
    """Rows may compute more than one token."""
    is_extend_without_speculation: bool
    """Extend whose lengths the scheduler knows when it plans."""
    is_decode_or_idle: bool
    decode_graph_eligible: bool
    """A captured decode graph may replay it."""
    context_parallel_extend: bool
    """Its rows may be split over context-parallel ranks."""
    cpu_graph: bool
    """A recorded CPU tape may replay it as decode."""
    is_extend_when_draft_opts_in: bool = False
    """Counts as extend (plain and context-parallel) for a caller that asks for draft extends too."""
    runs_model: bool = True
    """Layers run at all."""
    samples: bool = False
    """Its rows may sample, once each, from the row's last token."""
    graph_phase: GraphPhase | None = None
    """Family of graphs whose buckets it is counted against."""
    attention_side: AttentionSide = AttentionSide.NONE
    is_executable_here: bool = False
    """This release has an executor for it."""

    @property
    def has_extend_group(self) -> bool:
        """The batch carries `ExtendGroup`; where it is absent every row computes exactly one token."""
        return not self.is_decode_or_idle

    def counts_as_extend(self, *, with_draft_extend: bool = False) -> bool:
        """Whether a caller treats it as extend; draft extends only if the caller opts in."""
        return self.is_extend or (with_draft_extend and self.is_extend_when_draft_opts_in)


def _row(flags: str, **more: Any) -> ModeTraits:
    """One line of the truth table: `y` or `-` for the first six fields of `ModeTraits`."""
    names = [field.name for field in fields(ModeTraits)][: len(flags)]
    truth: dict[str, Any] = {name: flag == "y" for name, flag in zip(names, flags, strict=True)}
    return ModeTraits(**truth, **more)


_EXTEND: dict[str, Any] = {
    "samples": True,
    "graph_phase": GraphPhase.PREFILL,
    "attention_side": AttentionSide.EXTEND,
}
_HERE: dict[str, Any] = {"is_executable_here": True}

_TRAITS: Mapping[ForwardMode, ModeTraits] = MappingProxyType(
    {
        # is_extend, is_extend_without_speculation, is_decode_or_idle, decode_graph_eligible, context_parallel_extend,
        # cpu_graph
        ForwardMode.EXTEND: _row("yy--y-", **_EXTEND, **_HERE),
        ForwardMode.DECODE: _row(
            "--yy-y",
            samples=True,
            graph_phase=GraphPhase.DECODE,
            attention_side=AttentionSide.DECODE,
            **_HERE,
        ),
        ForwardMode.MIXED: _row("yy--y-", **_EXTEND, **_HERE),
        ForwardMode.IDLE: _row("--yy--", runs_model=False, **_HERE),
        ForwardMode.TARGET_VERIFY: _row("y--y--", graph_phase=GraphPhase.DECODE, attention_side=AttentionSide.EXTEND),
        ForwardMode.DRAFT_EXTEND: _row("------", is_extend_when_draft_opts_in=True, **_EXTEND),
        ForwardMode.PREBUILT: _row("------", runs_model=False),
        ForwardMode.SPLIT_PREFILL: _row("yy----", samples=True, attention_side=AttentionSide.EXTEND),
        ForwardMode.DLLM_EXTEND: _row("yy-y--", graph_phase=GraphPhase.DECODE, attention_side=AttentionSide.EXTEND),
    }
)

EXECUTABLE_MODES: frozenset[ForwardMode] = frozenset(
    mode for mode, traits in _TRAITS.items() if traits.is_executable_here
)


def traits_of(mode: ForwardMode) -> ModeTraits:
    """The traits of `mode`."""
    return _TRAITS[mode]
