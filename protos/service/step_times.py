"""What a step costs on a device: a table, read from TOML, interpolated linearly. Pure but for the reading.

    step = max(decode[rows, mean context], prefill[tokens])

A device reads (weights, KV) and computes at the same time: the slower of the two sets the step.
"""

import tomllib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from protos.service.first_problem import first_problem
from protos.wire.errors import InvalidRequest

_MAX_TABLE_BYTES = 1 << 20

Milliseconds = Annotated[float, Field(gt=0, le=3_600_000)]
Count = Annotated[int, Field(ge=0, le=1 << 30)]


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the time of a step depends on."""

    rows: int
    tokens: int
    """Computed by the step, one for a decode row."""
    context: int
    """Sum of the rows' lengths."""


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DecodeTimes(_Closed):
    """Steps of one token a row."""

    rows: tuple[Count, ...] = Field(min_length=1, max_length=256)
    context_tokens: tuple[Count, ...] = Field(min_length=1, max_length=256)
    """Mean length of a row."""
    step_ms: tuple[tuple[Milliseconds, ...], ...]
    """One list for each entry of `rows`, one number for each of `context_tokens`."""

    @model_validator(mode="after")
    def _check(self) -> "DecodeTimes":
        _check_rising("rows", self.rows)
        _check_rising("context_tokens", self.context_tokens)
        if len(self.step_ms) != len(self.rows) or any(len(line) != len(self.context_tokens) for line in self.step_ms):
            message = f"step_ms must have {len(self.rows)} lists of {len(self.context_tokens)} numbers"
            raise ValueError(message)
        return self


class PrefillTimes(_Closed):
    """Steps of many tokens."""

    tokens: tuple[Count, ...] = Field(min_length=1, max_length=256)
    step_ms: tuple[Milliseconds, ...]

    @model_validator(mode="after")
    def _check(self) -> "PrefillTimes":
        _check_rising("tokens", self.tokens)
        if len(self.step_ms) != len(self.tokens):
            message = f"step_ms must have {len(self.tokens)} numbers"
            raise ValueError(message)
        return self


class StepTimes(_Closed):
    """The whole table. Made once at start."""

    name: str = Field(max_length=100)
    derivation: str = Field(max_length=4000)
    """Where the numbers come from."""
    kv_bytes: Annotated[int, Field(ge=1)]
    """Memory of the device for KV pages."""
    kv_bytes_per_token: Annotated[int, Field(ge=1)]
    decode: DecodeTimes
    prefill: PrefillTimes

    def step_s(self, shape: StepShape) -> float:
        """Seconds of one step."""
        if not shape.rows:
            return 0.0
        table = self.decode
        mean_context = shape.context / shape.rows
        by_rows = [_interpolated(table.context_tokens, line, mean_context) for line in table.step_ms]
        decode_ms = _interpolated(table.rows, by_rows, shape.rows)
        return max(decode_ms, _interpolated(self.prefill.tokens, self.prefill.step_ms, shape.tokens)) / 1e3


class FixedStep:
    """Every step takes the same time."""

    def __init__(self, step_ms: float) -> None:
        self.name = f"fixed {step_ms:g} ms"
        self._step_s = step_ms / 1e3

    def step_s(self, shape: StepShape) -> float:
        """Seconds of one step; nothing for a plan without rows."""
        return self._step_s if shape.rows else 0.0


def read_step_times(path: Path, *, field: str) -> StepTimes:
    """The table in a TOML file; `field` is who named it.

    Raises:
        InvalidRequest: it cannot be read, or is no table; says which entry.
    """
    try:
        if path.stat().st_size > _MAX_TABLE_BYTES:
            raise InvalidRequest(f"step time table {path.name} is larger than {_MAX_TABLE_BYTES} bytes", field=field)
        with path.open("rb") as file:
            return StepTimes.model_validate(tomllib.load(file))
    except OSError as error:
        raise InvalidRequest(f"step time table {path.name} cannot be read: {error.strerror}", field=field) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"step time table {path.name} is no TOML", field=field) from error
    except ValidationError as error:
        place, text = first_problem(error)
        raise InvalidRequest(f"step time table {path.name}: {place}: {text}", field=field) from error


def _interpolated(places: tuple[int, ...], values: "tuple[float, ...] | list[float]", place: float) -> float:
    """Linear between entries, level before the first, and on the last two entries' line beyond the last."""
    if place <= places[-1] or len(places) == 1:
        return float(np.interp(place, places, values))
    slope = (values[-1] - values[-2]) / (places[-1] - places[-2])
    return float(values[-1] + max(slope, 0.0) * (place - places[-1]))


def _check_rising(name: str, numbers: tuple[int, ...]) -> None:
    if any(left >= right for left, right in pairwise(numbers)):
        message = f"{name} must rise"
        raise ValueError(message)
