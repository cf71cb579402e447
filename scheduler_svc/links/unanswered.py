"""Plans of one term without a result, as they were sent: each as the changes of the one before it where that can be.

Knows how to send them again; decides nothing else. No clock, no I/O. Guards: a plan is only ever sent again under its
own seq and with the same content, and a plan that was refused is no base.
"""

from collections import OrderedDict
from dataclasses import dataclass

from protos.wire.delta_making import changes_of
from protos.wire.digest import plan_digest
from protos.wire.enums import Feature
from protos.wire.errors import SyncError
from protos.wire.plan import ForwardPlan
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.links.link_messages import MIN_DELTA_BYTES, EncodedPlan, encoded


@dataclass(frozen=True, slots=True)
class _Sent:
    plan: ForwardPlan
    message: EncodedPlan


def _page_bytes(plan: ForwardPlan) -> int:
    """Of the page tables: nearly all of a large plan."""
    return sum(table.indices.nbytes for table in plan.page_tables)


class UnansweredPlans:
    """One for each term; oldest first."""

    def __init__(self, info: WorkerInfo, *, min_delta_bytes: int = MIN_DELTA_BYTES) -> None:
        """Made at attach.

        Args:
            info: the worker's.
            min_delta_bytes: plans that are smaller in full are sent in full.
        """
        self._min_delta_bytes = min_delta_bytes
        self._page_sizes = [pool.page_size for pool in info.sub_pools]
        self._uses_deltas = Feature.DELTAS in info.features
        self._sent: OrderedDict[int, _Sent] = OrderedDict()
        self._last: ForwardPlan | None = None
        """What the next plan changes."""
        self._digest: bytes | None = None
        """Of it, where it is known."""
        self.last_seq = 0
        """Of the newest plan, answered or not."""
        self._gap_seq = 0
        self._gaps_due = 0
        """Answers of that kind still to come from plans that were sent before it was filled."""

    def add(self, plan: ForwardPlan) -> EncodedPlan:
        """The next plan, as it is to be sent."""
        message = self._message(plan)
        if self._uses_deltas:
            self._last = plan
            self._digest = self._digest if message.is_delta else None
        self._sent[message.seq] = _Sent(plan, message)
        self.last_seq = message.seq
        return message

    def answered(self, seq: int, *, was_refused: bool) -> None:
        """The plan's result is here."""
        self._sent.pop(seq, None)
        if was_refused and self._last is not None and self._last.identity.seq == seq:
            self._last = self._digest = None

    def in_full(self, seq: int) -> list[EncodedPlan]:
        """What to send when the worker lacks the base of `seq`: that plan in full, then all behind it.

        Raises:
            SyncError: no such plan is out, or it was sent in full.
        """
        sent = self._sent.get(seq)
        if sent is None or not sent.message.is_delta:
            raise SyncError(f"the worker asks for plan {seq} in full, which it has or nobody sent", field="seq")
        self._sent[seq] = _Sent(sent.plan, encoded(sent.plan))
        return self._from(seq)

    def again(self, expected_seq: int) -> list[EncodedPlan]:
        """What to send when the worker misses plans: all from the expected one on, once.

        Raises:
            SyncError: no such plan is out, or sending it again did not help.
        """
        if expected_seq == self._gap_seq:
            self._gaps_due -= 1
            if self._gaps_due < 0:
                raise SyncError(f"the worker still misses plan {expected_seq} though it was sent again", field="seq")
            return []
        if expected_seq not in self._sent:
            raise SyncError(f"the worker expects plan {expected_seq}, which is not out", field="expected_seq")
        messages = self._from(expected_seq)
        self._gap_seq, self._gaps_due = expected_seq, len(messages) - 2  # all behind it but the one that told
        return messages

    def all_again(self) -> list[EncodedPlan]:
        """What a new stream carries first. Answers of the one before it will not come."""
        self._gap_seq = self._gaps_due = 0
        return [sent.message for sent in self._sent.values()]

    def _from(self, seq: int) -> list[EncodedPlan]:
        return [sent.message for other, sent in self._sent.items() if other >= seq]

    def _message(self, plan: ForwardPlan) -> EncodedPlan:
        """In full if that is small or all that can be done. A large plan is not encoded just to be weighed."""
        last = self._last if self._uses_deltas else None
        if last is None:
            return encoded(plan)
        if _page_bytes(plan) >= self._min_delta_bytes:
            return self._changes(plan, last) or encoded(plan)
        message = encoded(plan)
        if len(message.body) < self._min_delta_bytes:
            return message
        return self._changes(plan, last) or message

    def _changes(self, plan: ForwardPlan, base: ForwardPlan) -> EncodedPlan | None:
        base_digest, self._digest = self._digest or plan_digest(base), plan_digest(plan)
        delta = changes_of(plan, base, digest=self._digest, base_digest=base_digest, page_sizes=self._page_sizes)
        return None if delta is None else encoded(delta)
