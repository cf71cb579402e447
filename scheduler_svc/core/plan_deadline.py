"""How long the device may take for one plan, from the moment it takes it: what the cost model says, generously.

    budget = 3 * (the prediction, or the slowest plan of late if that took longer) + 2 s, or 20 s on a CPU

A CPU is shared: with eight busy processes on two cores a plan of 0.3 s took 14 s.

A plan unlike those that were measured gets the fixed time: what is guessed must not cost a worker its life.
"""

import math

from protos.wire.step_budget import is_cpu
from scheduler_svc.core.cost_model import CostModel, PlanShape

_FACTOR = 3.0
_MARGIN_S, _CPU_MARGIN_S = 2.0, 20.0


def plan_budget_ms(cost: CostModel, shape: PlanShape, *, device: str, unmeasured_ms: int) -> int:
    """The budget of a plan of that shape; `unmeasured_ms` if the model knows too little of it."""
    if not cost.knows(shape):
        return unmeasured_ms
    expected_s = max(cost.predict_s(shape), cost.slowest_s)
    margin_s = _CPU_MARGIN_S if is_cpu(device) else _MARGIN_S
    return math.ceil((_FACTOR * expected_s + margin_s) * 1e3)
