"""Says whether a worker may execute a plan: the same invariants at the sender and at the receiver.

Every invariant is one pure vectorised function of `validate_features`, `validate_rows`, `validate_pages` and
`validate_sampling`. Guards: nothing outside the worker's geometry and limits ever reaches the device.
"""

from collections.abc import Callable

import numpy as np

from protos.wire.errors import InvalidPlan, UnsupportedFeature
from protos.wire.plan import ForwardPlan
from protos.wire.validate_features import (
    check_column_features,
    check_forward_features,
    check_hidden_counts,
    check_hidden_modes,
    check_required_features,
)
from protos.wire.validate_pages import check_page_operations, check_page_tables
from protos.wire.validate_rows import (
    check_counts,
    check_delta,
    check_forwards,
    check_graphs,
    check_identity,
    check_lengths,
    check_row_columns,
    check_tokens,
)
from protos.wire.validate_sampling import (
    check_bias,
    check_masks,
    check_output_logprobs,
    check_penalties,
    check_prompt_logprobs,
    check_sampling,
)
from protos.wire.worker_info import WorkerInfo

INVARIANTS: tuple[Callable[[ForwardPlan, WorkerInfo], None], ...] = (
    check_identity,
    check_counts,
    check_required_features,
    check_column_features,
    check_forward_features,
    check_row_columns,
    check_hidden_modes,
    check_lengths,
    check_hidden_counts,
    check_forwards,
    check_graphs,
    check_tokens,
    check_page_tables,
    check_page_operations,
    check_sampling,
    check_bias,
    check_penalties,
    check_masks,
    check_output_logprobs,
    check_prompt_logprobs,
    check_delta,
)
"""In order: later ones rely on earlier ones (columns agree in length before they are combined)."""


def validate_plan(plan: ForwardPlan, info: WorkerInfo) -> None:
    """Return if the worker that `info` describes may execute `plan`; the device was not touched.

    Raises:
        InvalidPlan: malformed; names the column, the first bad row, its value and the limit.
        UnsupportedFeature: well formed, but needs an executor that this worker lacks.
    """
    try:
        with np.errstate(all="ignore"):
            for check in INVARIANTS:
                check(plan, info)
    except (InvalidPlan, UnsupportedFeature) as error:
        error.plan_seq = plan.identity.seq
        raise
