"""What a step costs on one worker, learnt from measured steps or read from a table. Pure.

    seconds = base + decode_row * decode rows + prefill_token * prefill tokens + context_token * context

Fitted to the median (least relative error, no price below 0), so that a neighbour on the machine who makes one step
in ten twice as long does not move it; how measured steps deviate from it is kept, and drawn again by the simulation.
"""

from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

import numpy as np

from protos.service.step_times import StepShape, StepTimes
from protos.wire.errors import InvalidRequest

Array = np.ndarray

FIELD = "sources"
"""What a refusal of measured steps names."""
MIN_STEPS = 64
MIN_PREFILL_STEPS = 8
_MOST_DEVIATIONS = 4096
_ROUNDS = 30
_LEAST_ERROR = 1e-3
_LEAST_S = 1e-9
_UNITS = np.array([1.0, 1.0, 64.0, 16384.0])
"""Of the features, so that the prices are of one magnitude."""


@dataclass(frozen=True, slots=True)
class PlanShape:
    """What the time of a step depends on."""

    decode_rows: int
    prefill_tokens: int
    context: int
    """Sum of the lengths of all rows."""


class StepCost(Protocol):
    """How long a step takes, before chance."""

    def step_s(self, shape: PlanShape) -> float:
        """Seconds."""
        ...

    def deviations(self, *, prefills: bool) -> tuple[float, ...]:
        """Measured over predicted, to draw from: of steps with prefill tokens, or without."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """Steps of one worker under load: a plan's time on the device and the device's wait before it. All [n]."""

    decode_rows: Array
    prefill_tokens: Array
    contexts: Array
    seconds: Array

    @property
    def features(self) -> Array:
        """The columns of the fit, [n, 4]."""
        columns = (np.ones(len(self.seconds)), self.decode_rows, self.prefill_tokens, self.contexts)
        features: Array = np.stack(columns, axis=1) / _UNITS
        return features


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """Fitted. Seconds."""

    base_s: float
    decode_row_s: float
    prefill_token_s: float
    context_token_s: float
    decode_deviations: tuple[float, ...] = (1.0,)
    prefill_deviations: tuple[float, ...] = (1.0,)

    def step_s(self, shape: PlanShape) -> float:
        """Seconds of the median step."""
        return (
            self.base_s
            + self.decode_row_s * shape.decode_rows
            + self.prefill_token_s * shape.prefill_tokens
            + self.context_token_s * shape.context
        )

    def deviations(self, *, prefills: bool) -> tuple[float, ...]:
        """Of measured steps."""
        return self.prefill_deviations if prefills else self.decode_deviations


@dataclass(frozen=True, slots=True)
class TableCost:
    """A table of step times. Steps deviate by nothing."""

    table: StepTimes

    def step_s(self, shape: PlanShape) -> float:
        """Seconds."""
        rows = shape.decode_rows + (shape.prefill_tokens > 0)
        return self.table.step_s(
            StepShape(rows=rows, tokens=shape.decode_rows + shape.prefill_tokens, context=shape.context)
        )

    def deviations(self, *, prefills: bool) -> tuple[float, ...]:  # noqa: ARG002 - the same for both
        """None."""
        return (1.0,)


@dataclass(frozen=True, slots=True)
class FittedCost:
    """A cost and how well it fits."""

    cost: LinearCost
    steps: int
    error_ratio: float
    """Median of |predicted - measured| / measured."""


def fit_cost(steps: MeasuredSteps) -> FittedCost:
    """The linear cost of measured steps.

    Raises:
        InvalidRequest: too few of them to tell prices apart.
    """
    _check(steps)
    features, seconds = steps.features, steps.seconds
    prices = _median_prices(features, seconds)
    predicted = features @ prices
    ratios = seconds / predicted
    prefills = steps.prefill_tokens > 0
    base, row, token, context = (float(price) for price in prices / _UNITS)
    cost = LinearCost(
        base_s=base,
        decode_row_s=row,
        prefill_token_s=token,
        context_token_s=context,
        decode_deviations=_thinned(ratios[~prefills]),
        prefill_deviations=_thinned(ratios[prefills]),
    )
    return FittedCost(cost, len(seconds), float(np.median(np.abs(1 - 1 / ratios))))


def non_negative_solution(matrix: Array, target: Array) -> Array:
    """The x >= 0 of least |matrix x - target|: every choice of columns is tried, so for a few columns only."""
    count = matrix.shape[1]
    best, best_error = np.zeros(count), float(target @ target)
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            part = matrix[:, chosen]
            solution = np.linalg.lstsq(part.T @ part, part.T @ target, rcond=None)[0]
            if (solution < 0).any():
                continue
            rest = part @ solution - target
            error = float(rest @ rest)
            if error < best_error * (1 - 1e-12):
                best, best_error = np.zeros(count), error
                best[list(chosen)] = solution
    return best


def _median_prices(features: Array, seconds: Array) -> Array:
    """Prices of least |measured - predicted| / predicted: about as many steps lie above as below, whatever their size.

    By least squares whose weights follow the errors of the round before.
    """
    scale, weights = seconds, np.ones(len(seconds))
    prices = np.zeros(features.shape[1])
    for _ in range(_ROUNDS):
        target = seconds / scale
        prices = non_negative_solution(features / scale[:, None] * weights[:, None], target * weights)
        predicted = np.maximum(features @ prices, _LEAST_S)
        weights = 1 / np.sqrt(np.maximum(np.abs(seconds / predicted - 1), _LEAST_ERROR))
        scale = predicted
    return prices


def _thinned(ratios: Array) -> tuple[float, ...]:
    """At most so many of them, evenly by rank."""
    if len(ratios) > _MOST_DEVIATIONS:
        ratios = np.quantile(ratios, (np.arange(_MOST_DEVIATIONS) + 0.5) / _MOST_DEVIATIONS)
    return tuple(float(ratio) for ratio in np.sort(ratios)) or (1.0,)


def _check(steps: MeasuredSteps) -> None:
    count, prefills = len(steps.seconds), int((steps.prefill_tokens > 0).sum())
    if count < MIN_STEPS:
        message = f"the recordings hold {count} answered plans, a fit needs {MIN_STEPS}: record a longer run"
        raise InvalidRequest(message, field=FIELD)
    if prefills < MIN_PREFILL_STEPS:
        message = f"the recordings hold {prefills} plans with prompt tokens, a fit needs {MIN_PREFILL_STEPS}"
        raise InvalidRequest(message, field=FIELD)
    decode = steps.decode_rows[steps.prefill_tokens == 0]
    if len(np.unique(decode)) < 2:
        message = (
            "all decode steps of the recordings have the same number of rows: record runs of several concurrencies"
        )
        raise InvalidRequest(message, field=FIELD)
