"""The last few complete plans, for plans that name only what changed. Soft state: losing it costs one plan in full.

Keyed by seq and checked by digest, which covers epoch, term and incarnation: nothing of an older pair can be a base.
"""

from collections import OrderedDict
from collections.abc import Sequence

from protos.wire.delta import Base, complete
from protos.wire.digest import plan_digest
from protos.wire.plan import ForwardPlan


class DeltaBases:
    """One per worker."""

    def __init__(self, *, page_sizes: Sequence[int], num_plans: int) -> None:
        self._page_sizes = tuple(page_sizes)
        self._num_plans = num_plans
        self._bases: OrderedDict[int, tuple[ForwardPlan, bytes | None]] = OrderedDict()
        """With the digest where it is known."""

    def whole(self, plan: ForwardPlan) -> ForwardPlan:
        """The plan itself, or what it stands for if it is a delta.

        Raises:
            NeedFullPlan: its base is not here.
            InvalidPlan: it does not fit its base.
        """
        if plan.delta is None:
            return plan
        base, digest = self._bases.get(plan.delta.base_seq, (None, None))
        held = None if base is None else Base(base, digest or plan_digest(base))
        return complete(plan, held, page_sizes=self._page_sizes)

    def keep(self, plan: ForwardPlan, digest: bytes | None) -> None:
        """Take a valid, complete plan as a base of later ones. A digest that is not known is made when it is needed."""
        self._bases.pop(plan.identity.seq, None)
        self._bases[plan.identity.seq] = (plan, digest)
        while len(self._bases) > self._num_plans:
            self._bases.popitem(last=False)

    def forget(self) -> None:
        """Drop them all."""
        self._bases.clear()
