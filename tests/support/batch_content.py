"""What a ForwardBatch holds: its values, and the addresses they lie at."""

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from worker_svc.kv.write_plan import WritePlan


def storages(value: Any) -> list[int]:
    """Addresses of every tensor and array."""
    if isinstance(value, torch.Tensor):
        return [value.data_ptr()] if value.numel() else []
    if isinstance(value, np.ndarray):
        return [value.__array_interface__["data"][0]] if value.size else []
    if isinstance(value, tuple):
        return [address for part in value for address in storages(part)]
    if isinstance(value, dict):
        return storages(tuple(value.values()))
    if is_dataclass(value):
        return [address for field in fields(value) for address in storages(getattr(value, field.name))]
    return []


def content(value: Any) -> Any:
    """Every value, with element types; the step's write plan apart, which a batch only borrows."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, tuple):
        return [content(part) for part in value]
    if isinstance(value, dict):
        return {key: content(part) for key, part in value.items()}
    if is_dataclass(value):
        return {field.name: content(getattr(value, field.name)) for field in fields(value)}
    return None if isinstance(value, WritePlan) else value
