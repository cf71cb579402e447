"""The rows of one plan: what was decided for them, and what is remembered until their result."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.cost_model import PlanShape
from scheduler_svc.core.request import Request, TokenSource


class PlannedRow(NamedTuple):
    """One request's place in one plan: positions [first_position, seq_len) are computed."""

    request: Request
    attempt: int
    """The request's when the row was planned."""
    first_position: int
    seq_len: int
    samples: bool
    source: TokenSource | None
    """Where the row's only token comes from, when it is not known yet."""


@dataclass(slots=True, eq=False)
class Batch:
    """Rows of one plan, decode rows first."""

    decode: list[PlannedRow]
    extend: list[PlannedRow]

    def rows(self) -> list[PlannedRow]:
        """In the order of the plan."""
        return self.decode + self.extend

    def shape(self) -> PlanShape:
        """What its device time depends on."""
        tokens = len(self.decode) + sum(row.seq_len - row.first_position for row in self.extend)
        return PlanShape(tokens, sum(row.seq_len for row in self.decode) + sum(row.seq_len for row in self.extend))


@dataclass(frozen=True, slots=True, eq=False)
class PlanInFlight:
    """A plan that was sent and whose result was not consumed. The columns are what a result must echo."""

    seq: int
    rows: list[PlannedRow]
    handles: np.ndarray
    attempts: np.ndarray
    positions: np.ndarray
    shape: PlanShape
    predicted_s: float | None
    """Device time, by the cost model when it was sent; None: not known."""
