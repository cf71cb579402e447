"""Which (epoch, term) owns the worker, and who waits to hear that it does.

Guards I10 and I25: a pair not above the highest seen is refused with that pair, a peer outside the protocol range is
refused before anything changes. Knows nothing of plans.
"""

from dataclasses import replace

from protos.wire.errors import EngineError, ProtocolMismatch, StaleEpoch
from protos.wire.limits import PROTOCOL_MAX, PROTOCOL_MIN
from protos.wire.worker_info import WorkerInfo
from worker_svc.protocol.messages import Action, AnswerAttach, AttachCall, Fence, RefuseAttach


class Attachment:
    """One per process. `highest` only rises."""

    def __init__(self, info: WorkerInfo) -> None:
        self.highest = Fence(0, 0)
        self._info = info
        self._accepted: AttachCall | None = None
        self._answer: WorkerInfo | None = None
        self._waiting: list[int] = []

    @property
    def is_complete(self) -> bool:
        """Whether the highest pair has its answer; plans may come."""
        return self._answer is not None

    def is_retry(self, asked: AttachCall) -> bool:
        """Whether this is the accepted call once more."""
        return asked == self._accepted

    def refusal(self, asked: AttachCall) -> EngineError | None:
        """Why a call that is no retry cannot be accepted."""
        if asked.protocol_min > PROTOCOL_MAX or asked.protocol_max < PROTOCOL_MIN:
            return ProtocolMismatch(
                f"protocol {asked.protocol_min}..{asked.protocol_max} does not meet {PROTOCOL_MIN}..{PROTOCOL_MAX}",
                field="protocol_min",
            )
        if asked.fence <= self.highest:
            return self.stale(asked.fence)
        return None

    def stale(self, fence: Fence) -> StaleEpoch:
        """The error for a pair that is not the one that owns the worker."""
        return StaleEpoch(
            f"epoch {fence.epoch} term {fence.term}: the highest seen is {self.highest.epoch} term {self.highest.term}",
            highest_epoch=self.highest.epoch,
            highest_term=self.highest.term,
        )

    def begin(self, call: int, asked: AttachCall) -> list[Action]:
        """Raise the pair; whoever waited for a lower one is refused."""
        self.highest = asked.fence
        refused = self.refuse_waiting(self.stale(self._accepted.fence)) if self._accepted else []
        self._accepted = asked
        self._answer = None
        self._waiting = [call]
        return refused

    def join(self, call: int) -> list[Action]:
        """A retry: the stored answer, or a place among those who wait for it."""
        if self._answer is not None:
            return [AnswerAttach(call, self._answer)]
        self._waiting.append(call)
        return []

    def complete(self) -> list[Action]:
        """The device is ready for the highest pair: answer everyone who waits."""
        assert self._accepted is not None
        protocol = min(PROTOCOL_MAX, self._accepted.protocol_max)
        answer = replace(self._info, protocol=protocol)
        self._answer = answer
        waiting, self._waiting = self._waiting, []
        return [AnswerAttach(call, answer) for call in waiting]

    def refuse_waiting(self, error: EngineError) -> list[Action]:
        """Nobody who waits will be answered otherwise."""
        waiting, self._waiting = self._waiting, []
        return [RefuseAttach(call, error) for call in waiting]
