"""Lists of bucket sizes: the defaults, and what is wrong with one that somebody wrote. Pure.

A list that is refused is answered with the largest part of it that would work.
"""

from collections.abc import Sequence
from types import MappingProxyType

from protos.wire.enums import GraphPhase

DECODE_SIZES = (1, 2, 4, 8, 12, *range(16, 257, 8))
PREFILL_SIZES = (*range(16, 129, 16), *range(160, 257, 32), *range(320, 513, 64), *range(640, 2049, 128))

CPU_LIMITS = MappingProxyType({GraphPhase.DECODE: 64, GraphPhase.PREFILL: 256})
"""Default buckets of a CPU end here: beyond, a step is long beside what a replay saves."""


def default_sizes(phase: GraphPhase, *, limit: int, device: str) -> tuple[int, ...]:
    """Sizes up to what a plan may hold, `limit`, which is a size of its own if the device's defaults go so far."""
    sizes = DECODE_SIZES if phase is GraphPhase.DECODE else PREFILL_SIZES
    highest = min(sizes[-1], CPU_LIMITS[phase]) if device == "cpu" else sizes[-1]
    end = min(limit, highest)
    return (*(size for size in sizes if size < end), end)


def list_problem(sizes: Sequence[int], *, limit: int) -> str | None:
    """What is wrong with a list of sizes, and what would work; None if nothing is. Reads on from the list's name."""
    if not sizes:
        return None
    problems = []
    if any(size < 1 for size in sizes):
        problems.append("a size is below 1")
    if len(set(sizes)) < len(sizes):
        problems.append("a size is there twice")
    if list(sizes) != sorted(sizes):
        problems.append("the sizes do not ascend")
    if max(sizes) > limit:
        problems.append(f"plans go to {limit}")
    if not problems:
        return None
    usable = fitting(sizes, limit=limit)
    works = f"what would work is {shown(usable)}" if usable else f"sizes from 1 to {limit} would work"
    return f"is {shown(sizes)}, but {' and '.join(problems)}: {works}"


def fitting(sizes: Sequence[int], *, limit: int) -> tuple[int, ...]:
    """The largest part of a list that is a usable one."""
    return tuple(sorted({size for size in sizes if 1 <= size <= limit}))


def shown(sizes: Sequence[int]) -> str:
    """As a setting is written."""
    return ",".join(map(str, sizes))
