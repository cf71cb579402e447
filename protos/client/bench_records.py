"""What a client saw of each request of a benchmark: arrival times and counts, no text. Plain data."""

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from protos.wire.errors import CallerError, CapacityError, EngineError

CUT = "CUT"
"""Reason of a request that the end of the benchmark cut off."""


class Outcome(StrEnum):
    """How a request ended."""

    DONE = "done"
    REFUSED = "refused"
    """The server said no: a full queue, a value out of range."""
    FAILED = "failed"
    CUT = "cut"
    """The benchmark was stopped first."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request. Times are seconds on the machine's monotonic clock, from the benchmark's start."""

    number: int
    due_s: float
    """When it should have been sent."""
    sent_s: float
    end_s: float = 0.0
    chunk_times_s: "array[float]" = field(default_factory=lambda: array("d"))
    chunk_tokens: "array[int]" = field(default_factory=lambda: array("l"))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    outcome: Outcome = Outcome.CUT
    reason: str = CUT
    """Finish reason, or the error's."""
    is_wrong: bool = False
    """Its tokens are not the simulated model's."""

    @property
    def output_tokens(self) -> int:
        """Tokens that arrived."""
        return sum(self.chunk_tokens)

    def arrived(self, tokens: int, *, at_s: float) -> None:
        """A chunk with new tokens."""
        self.chunk_times_s.append(at_s)
        self.chunk_tokens.append(tokens)

    def failed(self, error: EngineError) -> None:
        """It ended with an error."""
        self.outcome = Outcome.REFUSED if isinstance(error, CallerError | CapacityError) else Outcome.FAILED
        self.reason = error.reason


@dataclass(slots=True)
class ClientCounts:
    """Progress of one client process."""

    sent: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0
