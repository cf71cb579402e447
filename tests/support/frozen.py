"""Compares frozen types that hold arrays."""

import dataclasses
from typing import Any

import numpy as np


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of a frozen type by dotted path; arrays as (element type, elements)."""
    if dataclasses.is_dataclass(value):
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, tuple):
        items = [("len", len(value)), *((str(index), item) for index, item in enumerate(value))]
    else:
        return {path: (value.dtype.str, value.tolist()) if isinstance(value, np.ndarray) else value}
    leaves: dict[str, Any] = {}
    for name, item in items:
        leaves |= flatten(item, f"{path}.{name}")
    return leaves
