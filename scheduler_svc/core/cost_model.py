"""What a plan costs on one worker: a linear model of its device time, fitted to results as they come.

    time = base + per_token * tokens + per_context * context        each at least 0

`context` is the sum of the rows' lengths. Recursive least squares on relative errors, recent results weigh more. Pure
and deterministic: the same results give the same model.
"""

from dataclasses import dataclass

import numpy as np

_MEMORY = 0.99
"""Weight that a result keeps with each later one."""
_FIRST_UNCERTAINTY = 1e6
_MOST_UNCERTAINTY = 1e9
_TOKENS, _CONTEXT = 64.0, 16384.0
"""Units of the features, so that the coefficients are of one magnitude."""
_ENOUGH_RESULTS = 16
_LEAST_S = 1e-6
"""Shorter times were not measured."""
_ERROR_MEMORY = 0.95
_SLOWEST_MEMORY = 0.999
_KNOWN_SHARE = 2
"""A plan up to so many times as large as the largest measured is one the model knows."""


@dataclass(frozen=True, slots=True)
class PlanShape:
    """What the time of a plan depends on."""

    tokens: int
    context: int


class CostModel:
    """Owned by one worker's state; lives as long as its term."""

    def __init__(self) -> None:
        self.error_ratio = 0.0
        """Recent mean of |predicted - measured| / measured, each predicted before it was learnt from."""
        self.most_tokens = 0
        """Largest plan measured."""
        self.slowest_s = 0.0
        """Longest device time measured; half of it is forgotten in about 700 results."""
        self.last = PlanShape(0, 0)
        self._most_context = 0
        self._num_results = 0
        self._coefficients = np.zeros(3)
        self._covariance = np.eye(3) * _FIRST_UNCERTAINTY

    @property
    def is_ready(self) -> bool:
        """Whether enough results were measured to predict from."""
        return self._num_results >= _ENOUGH_RESULTS

    def knows(self, shape: PlanShape) -> bool:
        """Whether the model may be believed of such a plan: enough was measured, and not much smaller plans only."""
        return (
            self.is_ready
            and shape.tokens <= _KNOWN_SHARE * self.most_tokens
            and shape.context <= _KNOWN_SHARE * self._most_context
        )

    def observe(self, shape: PlanShape, seconds: float) -> None:
        """Learn from a plan's measured device time."""
        if seconds < _LEAST_S:
            return
        if self.is_ready:
            error = abs(self.predict_s(shape) - seconds) / seconds
            self.error_ratio += (1 - _ERROR_MEMORY) * (error - self.error_ratio)
        self.most_tokens = max(self.most_tokens, shape.tokens)
        self._most_context = max(self._most_context, shape.context)
        self.slowest_s = max(seconds, _SLOWEST_MEMORY * self.slowest_s)
        self.last = shape
        self._num_results += 1
        milliseconds = seconds * 1e3
        features = _features(shape) / milliseconds
        gain = self._covariance @ features
        gain /= _MEMORY + features @ gain
        self._coefficients = self._coefficients + gain * (1.0 - features @ self._coefficients)
        covariance = (self._covariance - np.outer(gain, features @ self._covariance)) / _MEMORY
        self._covariance = covariance * min(1.0, _MOST_UNCERTAINTY / float(np.trace(covariance)))

    def predict_s(self, shape: PlanShape) -> float:
        """Device time of a plan in seconds."""
        return float(_features(shape) @ np.maximum(self._coefficients, 0.0)) / 1e3

    def tokens_within(self, target_s: float, *, context: int) -> float:
        """Tokens of a plan that takes `target_s`; infinite if tokens cost nothing measurable."""
        begin_s = self.predict_s(PlanShape(0, context))
        per_token_s = self.predict_s(PlanShape(1, context)) - begin_s
        return (target_s - begin_s) / per_token_s if per_token_s > 0 else float("inf")


def _features(shape: PlanShape) -> np.ndarray:
    return np.array([1.0, shape.tokens / _TOKENS, shape.context / _CONTEXT])
