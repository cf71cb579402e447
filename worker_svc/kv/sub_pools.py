"""Layers -> sub-pools of pages: those that see everything in the first, those with a sliding window in a second.

Layers that all have the same window share the first, which keeps everything: a scheduler counts lengths and prefixes by
the full sub-pool. Pure. Guards: every layer has one place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from protos.wire.errors import UnsupportedFeature


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer's keys and values are."""

    sub_pool: int
    layer: int
    """Among the layers of that sub-pool."""


def sub_pool_windows(layer_windows: Sequence[int]) -> tuple[int, ...]:
    """The window of each sub-pool, in tokens, behind which pages are given up; 0 for the first, which is full.

    Raises:
        UnsupportedFeature: there are several windows.
    """
    windows = sorted(set(layer_windows))
    if len(windows) == 1:
        return (0,)
    if windows[0] != 0 or len(windows) > 2:
        message = f"layers have windows {windows[:4]}; one, or full attention (0) and one other, work here"
        raise UnsupportedFeature(message, field="attention.sliding_window")
    return tuple(windows)


def layer_places(layer_windows: Sequence[int]) -> tuple[LayerPlace, ...]:
    """The place of each layer.

    Raises:
        UnsupportedFeature: as `sub_pool_windows`.
    """
    windows = sub_pool_windows(layer_windows)
    counts = [0] * len(windows)
    places = []
    for window in layer_windows:
        sub_pool = windows.index(window) if len(windows) > 1 else 0
        places.append(LayerPlace(sub_pool, counts[sub_pool]))
        counts[sub_pool] += 1
    return tuple(places)
