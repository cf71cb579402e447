"""What the fake worker answers about input positions: functions of the tag at the position, so of the whole prefix."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from protos.wire.enums import HiddenMode
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult, ResultHiddenStates, ResultLogprobs

HIDDEN_SIZE = 2


def input_logprob(tag: int, target: int) -> float:
    return float(np.float32(-((tag ^ (target * 0x9E37)) % 4096) / 64))


def input_best(tag: int, count: int) -> list[int]:
    return [(tag + 7 * rank) % 97 for rank in range(count)]


def input_state(tag: int) -> list[float]:
    return [float(tag % 1021), float((tag >> 20) % 509)]


def with_inputs(result: ForwardResult, plan: ForwardPlan, tags_of: Callable[[int], Sequence[int]]) -> ForwardResult:
    """The result with what the plan asks of input positions. `tags_of(row)`: one a token; none for a failed row."""
    return replace(result, logprobs=_logprobs(result.logprobs, plan, tags_of), hidden_states=_states(plan, tags_of))


def _logprobs(
    given: ResultLogprobs | None, plan: ForwardPlan, tags_of: Callable[[int], Sequence[int]]
) -> ResultLogprobs | None:
    wanted = plan.logprobs
    if wanted is None or wanted.prompt_starts is None:
        return given
    tops = wanted.prompt_top_counts
    counts, values, top_counts, top_ids, top_values = [], [], [], [], []
    for row in range(plan.rows.num_rows):
        targets = wanted.target_ids[wanted.target_indptr[row] : wanted.target_indptr[row + 1]].tolist()
        skipped = int(wanted.prompt_starts[row] - plan.rows.first_positions[row])
        pairs = list(zip(tags_of(row)[skipped:], targets, strict=False))
        counts.append(len(pairs))
        for tag, target in pairs:
            values.append(input_logprob(tag, target))
            best = input_best(tag, 0 if tops is None else int(tops[row]))
            top_counts.append(len(best))
            top_ids += best
            top_values += [input_logprob(tag, token) for token in best]
    return replace(
        given or ResultLogprobs(),
        prompt_indptr=_ends(counts),
        prompt=np.array(values, np.float32),
        prompt_top_indptr=None if tops is None else _ends(top_counts),
        prompt_top_ids=None if tops is None else np.array(top_ids, np.int32),
        prompt_top_values=None if tops is None else np.array(top_values, np.float32),
    )


def _states(plan: ForwardPlan, tags_of: Callable[[int], Sequence[int]]) -> ResultHiddenStates | None:
    modes = plan.rows.hidden_modes
    if modes is None:
        return None
    counts, states = [], []
    for row, mode in enumerate(modes.tolist()):
        tags = tags_of(row) if mode != HiddenMode.NULL else []
        tags = tags[-1:] if mode == HiddenMode.LAST else tags
        counts.append(len(tags))
        states += [input_state(tag) for tag in tags]
    table = np.array(states, np.float32).reshape(-1, HIDDEN_SIZE)
    return ResultHiddenStates(
        dtype="float32", hidden_size=HIDDEN_SIZE, indptr=_ends(counts), states=table.view(np.uint8).ravel()
    )


def _ends(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
