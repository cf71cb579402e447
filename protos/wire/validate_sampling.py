"""Invariants of sampling, penalties, masks and log-probabilities. Part of `validate`."""

import numpy as np

from protos.wire import limits
from protos.wire.checks import (
    bad_value,
    check_absent,
    check_distinct,
    check_equal,
    check_indptr,
    check_length,
    check_present,
    check_range,
)
from protos.wire.errors import InvalidPlan
from protos.wire.plan import ForwardPlan, Mask
from protos.wire.worker_info import WorkerInfo

SMALLEST_F32 = float(np.finfo(np.float32).tiny)
MAX_F32 = float(np.finfo(np.float32).max)


def check_sampling(plan: ForwardPlan, info: WorkerInfo) -> None:
    """Every sampling parameter is in its range, and a row that draws has a seed."""
    sampling = plan.sampling
    if sampling is None:
        return
    for name, low, high in (
        ("temperatures", 0.0, limits.MAX_TEMPERATURE),
        ("top_ks", 0, info.logits_width),
        ("top_ps", SMALLEST_F32, 1.0),
        ("min_ps", 0.0, 1.0),
    ):
        values = getattr(sampling, name)
        check_length(f"sampling.{name}", values, expected=plan.rows.num_rows)
        check_range(f"sampling.{name}", values, low=low, high=high)
    check_length("sampling.seeds", sampling.seeds, expected=plan.rows.num_rows)
    if sampling.seeds is None and sampling.temperatures is not None and sampling.temperatures.any():
        row = int(np.argmax(sampling.temperatures > 0))
        raise InvalidPlan(f"sampling.seeds is absent, row {row} draws", field="sampling.seeds", rows=(row,))


def check_bias(plan: ForwardPlan, info: WorkerInfo) -> None:
    """Logit bias is a CSR table over rows with distinct known ids and finite values."""
    sampling = plan.sampling
    if sampling is None:
        return
    if sampling.bias_indptr is None:
        check_absent("sampling.bias_ids", sampling.bias_ids, without="sampling.bias_indptr")
        check_absent("sampling.bias_values", sampling.bias_values, without="sampling.bias_indptr")
        return
    ids = check_present("sampling.bias_ids", sampling.bias_ids)
    values = check_present("sampling.bias_values", sampling.bias_values)
    _check_id_table("sampling.bias", sampling.bias_indptr, ids=ids, plan=plan, info=info)
    check_length("sampling.bias_values", values, expected=len(ids))
    check_range("sampling.bias_values", values, low=-MAX_F32, high=MAX_F32, indptr=sampling.bias_indptr)


def check_penalties(plan: ForwardPlan, info: WorkerInfo) -> None:
    """Penalties are in range; their counts are CSR tables over rows with distinct known ids."""
    penalties = plan.penalties
    if penalties is None:
        return
    for name, low, high in (
        ("repetition", SMALLEST_F32, limits.MAX_REPETITION_PENALTY),
        ("frequency", -limits.MAX_ADDITIVE_PENALTY, limits.MAX_ADDITIVE_PENALTY),
        ("presence", -limits.MAX_ADDITIVE_PENALTY, limits.MAX_ADDITIVE_PENALTY),
    ):
        values = getattr(penalties, name)
        check_length(f"penalties.{name}", values, expected=plan.rows.num_rows)
        check_range(f"penalties.{name}", values, low=low, high=high)
    _check_id_table("penalties.prompt", penalties.prompt_indptr, ids=penalties.prompt_ids, plan=plan, info=info)
    _check_id_table("penalties.output", penalties.output_indptr, ids=penalties.output_ids, plan=plan, info=info)
    counts = penalties.output_counts
    check_length("penalties.output_counts", counts, expected=len(penalties.output_ids))
    check_range(
        "penalties.output_counts", counts, low=1, high=info.limits.context_tokens, indptr=penalties.output_indptr
    )


def check_masks(plan: ForwardPlan, info: WorkerInfo) -> None:
    """Every row names one of the plan's masks or none, and every mask leaves something to sample."""
    masks = plan.masks
    if masks is None:
        return
    check_length("masks.row_masks", masks.row_masks, expected=plan.rows.num_rows)
    check_range("masks.row_masks", masks.row_masks, low=0, high=len(masks.masks))
    for index, mask in enumerate(masks.masks):
        _check_mask(mask, index, logits_width=info.logits_width)


def check_output_logprobs(plan: ForwardPlan, info: WorkerInfo) -> None:
    """Wanted log-probabilities of sampled tokens are flags and counts within the worker's limit."""
    logprobs = plan.logprobs
    if logprobs is None:
        return
    for name, high in (("output_wanted", 1), ("output_top_counts", info.limits.max_logprobs)):
        values = getattr(logprobs, name)
        check_length(f"logprobs.{name}", values, expected=plan.rows.num_rows)
        check_range(f"logprobs.{name}", values, low=0, high=high)


def check_prompt_logprobs(plan: ForwardPlan, info: WorkerInfo) -> None:
    """Wanted positions are this plan's, and each has its target: the last position of a row that samples has none."""
    logprobs = plan.logprobs
    if logprobs is None:
        return
    starts = logprobs.prompt_starts
    if starts is None:
        for name in ("prompt_top_counts", "target_indptr", "target_ids"):
            check_absent(f"logprobs.{name}", getattr(logprobs, name), without="logprobs.prompt_starts")
        return
    rows = plan.rows
    check_length("logprobs.prompt_starts", starts, expected=rows.num_rows)
    bad = np.flatnonzero((starts < rows.first_positions) | (starts > rows.seq_lens))
    if len(bad):
        row = int(bad[0])
        expected = f"{rows.first_positions[row]} to {rows.seq_lens[row]}"
        raise bad_value("logprobs.prompt_starts", starts[row].item(), expected=expected, row=row)
    counts = logprobs.prompt_top_counts
    check_length("logprobs.prompt_top_counts", counts, expected=rows.num_rows)
    check_range("logprobs.prompt_top_counts", counts, low=0, high=info.limits.max_logprobs)
    indptr = check_present("logprobs.target_indptr", logprobs.target_indptr)
    targets = check_present("logprobs.target_ids", logprobs.target_ids)
    check_indptr("logprobs.target_indptr", indptr, num_rows=rows.num_rows)
    wanted = np.maximum(rows.seq_lens.astype(np.int64) - starts - rows.samples, 0)
    check_equal("logprobs.target_indptr", np.diff(indptr), expected=wanted)
    check_length("logprobs.target_ids", targets, expected=int(indptr[-1]))
    check_range("logprobs.target_ids", targets, low=0, high=info.logits_width - 1, indptr=indptr)
    values = wanted if counts is None else wanted * (1 + 2 * counts.astype(np.int64))
    total = int(values.sum())
    if total > limits.MAX_PROMPT_VALUES:
        row = int(values.argmax())
        most = limits.MAX_PROMPT_VALUES
        text = f"logprobs.prompt_starts asks for {total} values, most in row {row}; the limit is {most}"
        raise InvalidPlan(text, field="logprobs.prompt_starts", rows=(row,))


def _check_id_table(prefix: str, indptr: np.ndarray, *, ids: np.ndarray, plan: ForwardPlan, info: WorkerInfo) -> None:
    check_indptr(f"{prefix}_indptr", indptr, num_rows=plan.rows.num_rows)
    check_length(f"{prefix}_ids", ids, expected=int(indptr[-1]))
    check_range(f"{prefix}_ids", ids, low=0, high=info.logits_width - 1, indptr=indptr)
    check_distinct(f"{prefix}_ids", ids, indptr=indptr)


def _check_mask(mask: Mask, index: int, *, logits_width: int) -> None:
    given = [array for array in (mask.allowed_bits, mask.allowed_ids, mask.denied_ids) if array is not None]
    if len(given) != 1:
        raise InvalidPlan(f"masks.masks entry {index} has {len(given)} forms, not 1", field="masks.masks")
    if mask.allowed_bits is not None:
        check_length("masks.masks.allowed_bits", mask.allowed_bits, expected=-(-logits_width // 8))
        leaves = bool(np.unpackbits(mask.allowed_bits, count=logits_width, bitorder="little").any())
    else:
        outside = np.flatnonzero(given[0] >= logits_width)
        if len(outside):
            text = f"masks.masks entry {index} names id {given[0][outside[0]]}, the logits have {logits_width}"
            raise InvalidPlan(text, field="masks.masks")
        leaves = len(given[0]) > 0 if mask.denied_ids is None else len(np.unique(given[0])) < logits_width
    if not leaves:
        raise InvalidPlan(f"masks.masks entry {index} allows no id", field="masks.masks")
