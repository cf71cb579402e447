"""Invariants: a plan uses only what the worker has executors for. Part of `validate`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from protos.wire.enums import Feature, HiddenMode
from protos.wire.errors import InvalidPlan, UnsupportedFeature
from protos.wire.plan import ForwardPlan
from protos.wire.worker_info import WorkerInfo

COLUMN_FEATURES: tuple[tuple[str, Callable[[ForwardPlan], Any], Feature], ...] = (
    ("tokens.sources", lambda plan: plan.tokens.sources, Feature.TOKEN_REFERENCES),
    ("tokens.ref_seqs", lambda plan: plan.tokens.ref_seqs, Feature.TOKEN_REFERENCES),
    ("tokens.ref_rows", lambda plan: plan.tokens.ref_rows, Feature.TOKEN_REFERENCES),
    ("tokens.ref_offsets", lambda plan: plan.tokens.ref_offsets, Feature.SPECULATION),
    ("page_operations", lambda plan: plan.page_operations, Feature.PAGE_OPERATIONS),
    ("penalties", lambda plan: plan.penalties, Feature.PENALTIES),
    ("masks", lambda plan: plan.masks, Feature.MASKS),
    ("sampling.bias_indptr", lambda plan: plan.sampling and plan.sampling.bias_indptr, Feature.LOGIT_BIAS),
    ("logprobs.output_wanted", lambda plan: plan.logprobs and plan.logprobs.output_wanted, Feature.OUTPUT_LOGPROBS),
    (
        "logprobs.output_top_counts",
        lambda plan: plan.logprobs and plan.logprobs.output_top_counts,
        Feature.OUTPUT_LOGPROBS,
    ),
    ("logprobs.prompt_starts", lambda plan: plan.logprobs and plan.logprobs.prompt_starts, Feature.PROMPT_LOGPROBS),
    ("rows.hidden_modes", lambda plan: plan.rows.hidden_modes, Feature.HIDDEN_STATES),
    ("rows.canary_seeds", lambda plan: plan.rows.canary_seeds, Feature.CANARY),
    ("rows.canary_hashes", lambda plan: plan.rows.canary_hashes, Feature.CANARY),
    ("rows.dp_ranks", lambda plan: plan.rows.dp_ranks, Feature.ATTENTION_DP),
    ("rows.length_source_seqs", lambda plan: plan.rows.length_source_seqs, Feature.SPECULATION),
    ("rows.length_source_rows", lambda plan: plan.rows.length_source_rows, Feature.SPECULATION),
    ("delta", lambda plan: plan.delta, Feature.DELTAS),
)
"""What a plan may hold only for a worker with the feature."""


def check_required_features(plan: ForwardPlan, info: WorkerInfo) -> None:
    """Every feature the plan requires is one the worker has."""
    for value in plan.identity.required_features:
        if value not in info.features:
            field = "identity.required_features"
            raise UnsupportedFeature(f"{field} names {value}, which this worker lacks", field=field)


def check_column_features(plan: ForwardPlan, info: WorkerInfo) -> None:
    """No column or group is present that the worker would have to ignore."""
    for name in plan.reserved:
        raise UnsupportedFeature(f"{name} has no executor in this release", field=name)
    for field, read, feature in COLUMN_FEATURES:
        if read(plan) is not None and feature not in info.features:
            raise _lacks(field, feature)
    if Feature.WINDOW_SUB_POOL not in info.features:
        for table in plan.page_tables:
            if table.start_positions is not None:
                raise _lacks("page_tables.start_positions", Feature.WINDOW_SUB_POOL)


def check_forward_features(plan: ForwardPlan, info: WorkerInfo) -> None:
    """Every forward has a mode with an executor, and names layers and write windows only where they are understood."""
    for forward in plan.forwards:
        for field, mode in (("forwards.mode", forward.mode), ("forwards.logical_mode", forward.logical_mode)):
            if mode not in info.modes:
                raise UnsupportedFeature(f"{field} is {mode.name}, which this worker lacks", field=field)
        if forward.layers is not None and Feature.SPLIT_PREFILL not in info.features:
            raise _lacks("forwards.layers", Feature.SPLIT_PREFILL)
        if forward.write_window is not None and Feature.SPECULATION not in info.features:
            raise _lacks("forwards.write_window", Feature.SPECULATION)


def check_hidden_modes(plan: ForwardPlan, info: WorkerInfo) -> None:
    """No row asks for more hidden states than the worker can return."""
    modes = plan.rows.hidden_modes
    if modes is None or not len(modes) or int(modes.max()) <= info.max_hidden_mode:
        return
    row = int(modes.argmax())
    text = f"rows.hidden_modes of row {row} is {int(modes[row])}, this worker's highest is {int(info.max_hidden_mode)}"
    raise UnsupportedFeature(text, field="rows.hidden_modes", rows=(row,))


def check_hidden_counts(plan: ForwardPlan, info: WorkerInfo) -> None:
    """The hidden states of all rows together are within the worker's limit."""
    modes = plan.rows.hidden_modes
    if modes is None:
        return
    ends = np.cumsum(hidden_counts(plan))
    most = info.limits.max_hidden_states
    row = int(np.searchsorted(ends, most, side="right"))
    if row < len(ends):
        text = f"rows.hidden_modes of row {row} takes the plan to {ends[row]} states, this worker's most are {most}"
        raise InvalidPlan(text, field="rows.hidden_modes", rows=(row,))


def hidden_counts(plan: ForwardPlan) -> np.ndarray:
    """How many hidden states each row asks for. [R] i64."""
    rows = plan.rows
    if rows.hidden_modes is None:
        return np.zeros(rows.num_rows, np.int64)
    of_full = np.where(rows.hidden_modes == HiddenMode.FULL, rows.extend_lens.astype(np.int64), 0)
    return np.where(rows.hidden_modes == HiddenMode.LAST, 1, of_full)


def _lacks(field: str, feature: Feature) -> UnsupportedFeature:
    return UnsupportedFeature(f"{field} needs {feature.name}, which this worker lacks", field=field)
