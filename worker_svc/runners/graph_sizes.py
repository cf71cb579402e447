"""Which sizes are captured: the defaults or what was asked for, within what plans and memory allow.

A choice that cannot work is refused by name, with the largest part of it that would.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from protos.wire.bucket_lists import default_sizes, list_problem, shown
from protos.wire.enums import GraphPhase
from protos.wire.errors import InvalidRequest
from worker_svc.runners.graph_memory_need import GraphNeed
from worker_svc.runners.graph_settings import GraphSettings

_FIELDS = {GraphPhase.DECODE: "decode_buckets", GraphPhase.PREFILL: "prefill_buckets"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLimits:
    """What plans allow."""

    max_rows: int
    max_tokens: int
    device: str

    def of(self, phase: GraphPhase) -> int:
        """The largest size of the phase that a plan can have."""
        return self.max_rows if phase is GraphPhase.DECODE else self.max_tokens


def wanted_sizes(settings: GraphSettings, limits: GraphLimits) -> dict[GraphPhase, tuple[int, ...]]:
    """What will be captured, by phase; a phase that is off is absent.

    Raises:
        InvalidRequest: a list that was asked for cannot be used.
    """
    return {phase: _of_phase(settings, phase, limits) for phase in GraphPhase if settings.captures(phase)}


def check_memory(sizes: Mapping[GraphPhase, tuple[int, ...]], need: GraphNeed, *, free_bytes: int) -> None:
    """That the largest graph of each phase fits.

    Raises:
        InvalidRequest: it does not.
    """
    for phase, found in sizes.items():
        fitting = need.largest_fitting(phase, found, free_bytes=free_bytes)
        if fitting != found:
            needed = need.of_size(phase, found[-1])
            works = (
                f"what would fit is {shown(fitting)}" if fitting else f"without {phase.name.lower()} graphs it works"
            )
            message = (
                f"{_FIELDS[phase]}: a graph of {found[-1]} takes about {needed} bytes, {free_bytes} are free: {works}"
            )
            raise InvalidRequest(message, field=_FIELDS[phase])


def _of_phase(settings: GraphSettings, phase: GraphPhase, limits: GraphLimits) -> tuple[int, ...]:
    asked, limit = settings.asked(phase), limits.of(phase)
    problem = list_problem(asked, limit=limit)
    if problem is not None:
        raise InvalidRequest(f"{_FIELDS[phase]} {problem}", field=_FIELDS[phase])
    return asked or default_sizes(phase, limit=limit, device=limits.device)
