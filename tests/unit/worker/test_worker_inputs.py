"""Prompt log-probabilities, prefill-only rows and hidden states of one worker, on a model whose numbers are known."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from protos.wire.enums import Feature, HiddenMode, RowFailure, RowStatus
from protos.wire.errors import UnsupportedFeature
from protos.wire.plan import LogprobColumns
from protos.wire.validate import validate_plan
from tests.support import plans
from tests.support.plans import i32, u8, u32
from tests.support.tiny_model import POISON, WIDTH, HistoryRunner, history_logits, tiny_worker
from worker_svc.sampling.prompt_logprobs import block_rows

INFO = plans.make_info(
    logits_width=WIDTH,
    features=frozenset({Feature.OUTPUT_LOGPROBS, Feature.PROMPT_LOGPROBS, Feature.HIDDEN_STATES}),
    max_hidden_mode=HiddenMode.FULL,
    limits=plans.make_limits(max_hidden_states=1000),
)


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, POISON, length).tolist()


def logprobs_after(history):
    logits = history_logits(history).astype(np.float64)
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def scored(plan, starts, targets, tops=None):
    """The plan with prompt log-probabilities; `targets` by row."""
    counts = [len(ids) for ids in targets]
    columns = LogprobColumns(
        prompt_starts=i32(*starts),
        prompt_top_counts=None if tops is None else u8(*tops),
        target_indptr=u32(0, *np.cumsum(counts)),
        target_ids=i32(*(token for ids in targets for token in ids)),
    )
    plan = replace(plan, logprobs=columns)
    validate_plan(plan, INFO)
    return plan


def with_modes(plan, *modes):
    plan = replace(plan, rows=replace(plan.rows, hidden_modes=u8(*modes)))
    validate_plan(plan, INFO)
    return plan


def rows_of(indptr, values):
    return [values[begin:end].tolist() for begin, end in pairwise(indptr)]


@pytest.mark.parametrize("chunk", [5, 16, 40])
def test_every_prompt_token_has_the_models_log_probability_across_chunk_borders(chunk):
    ids = prompt(1, 40)
    worker = tiny_worker(INFO)
    found, tops = [], []
    for seq, begin in enumerate(range(0, 40, chunk), start=1):
        end = min(begin + chunk, 40)
        row = plans.extend(
            begin, end - begin, samples=int(end == 40), ids=ids[begin:end], pages=[1, 2, 3][: -(-end // 16)]
        )
        plan = plans.make_plan([row], info=INFO, seq=seq)
        result = worker.execute(scored(plan, [begin], [ids[begin + 1 : end + 1]], tops=[20]))
        found += result.logprobs.prompt.tolist()
        tops += rows_of(result.logprobs.prompt_top_indptr, result.logprobs.prompt_top_ids)
        assert result.logprobs.output is None
    known = [logprobs_after(ids[:position]) for position in range(1, 40)]
    assert found == pytest.approx([known[i][ids[i + 1]] for i in range(39)], abs=1e-5)
    assert tops == [np.argsort(-values, kind="stable")[:20].tolist() for values in known]


def test_rows_want_different_positions_and_counts_or_none():
    ids = [prompt(seed, length) for seed, length in ((1, 9), (2, 30), (3, 1), (4, 12))]
    rows = [plans.extend(0, len(of), ids=of) for of in ids]
    plan = plans.make_plan(rows, info=INFO)
    plan = scored(plan, [0, 28, 1, 12], [ids[0][1:], ids[1][29:], [], []], tops=[0, 2, 5, 1])
    logprobs = tiny_worker(INFO).execute(plan).logprobs
    assert [len(values) for values in rows_of(logprobs.prompt_indptr, logprobs.prompt)] == [8, 1, 0, 0]
    assert [len(top) for top in rows_of(logprobs.prompt_top_indptr, logprobs.prompt_top_ids)] == [0] * 8 + [2]
    assert logprobs.prompt[-1] == pytest.approx(logprobs_after(ids[1][:29])[ids[1][29]], abs=1e-5)


def test_prefill_only_rows_give_one_dummy_id_a_request_never_one_a_token():
    ids = [prompt(seed, 100) for seed in range(3)]
    plan = plans.make_plan([plans.extend(0, 100, samples=0, ids=of) for of in ids], info=INFO)
    plan = scored(plan, [0] * 3, [[*of[1:], 0] for of in ids])
    result = tiny_worker(INFO).execute(plan)
    assert result.rows.token_ids.tolist() == [0, 0, 0]
    assert result.rows.statuses.tolist() == [RowStatus.NONE] * 3
    assert np.diff(result.logprobs.prompt_indptr).tolist() == [100] * 3


def test_a_prompt_position_that_is_not_finite_fails_its_row_alone():
    good, bad = prompt(1, 12), [*prompt(2, 5), POISON, *prompt(3, 4)]
    rows = [plans.extend(0, len(ids), ids=ids) for ids in (good, bad, good)]
    plan = plans.make_plan(rows, info=INFO)
    plan = with_modes(scored(plan, [0, 0, 0], [good[1:], bad[1:], good[1:]], tops=[1, 1, 1]), 3, 3, 2)
    result = tiny_worker(INFO).execute(plan)
    assert result.rows.statuses.tolist() == [RowStatus.TOKEN, RowStatus.FAILED, RowStatus.TOKEN]
    assert result.rows.failures.tolist() == [0, RowFailure.NAN, 0]
    assert np.diff(result.logprobs.prompt_indptr).tolist() == [11, 0, 11]
    assert len(result.logprobs.prompt_top_ids) == 22
    assert np.diff(result.hidden_states.indptr).tolist() == [12, 0, 1]


def test_a_position_that_is_not_finite_fails_the_row_though_its_last_state_is():
    class Forgetful(HistoryRunner):
        """Only logits of prompt positions show the poison."""

        def forward(self, batch):
            output = super().forward(batch)
            return replace(output, finite=output.finite | True, logits=output.logits)

    ids = [*prompt(2, 5), POISON, *prompt(3, 4)]
    plan = plans.make_plan([plans.extend(0, 10, ids=ids)], info=INFO)
    result = tiny_worker(INFO, [Forgetful(INFO)]).execute(scored(plan, [0], [ids[1:]]))
    assert result.rows.statuses.tolist() == [RowStatus.FAILED]
    assert result.rows.failures.tolist() == [RowFailure.NAN]


def test_logits_of_a_long_prompt_exist_in_blocks_never_as_a_whole():
    info = replace(INFO, logits_width=300_000)
    runner = HistoryRunner(info)
    ids = prompt(1, 500)
    plan = plans.make_plan([plans.extend(0, 500, ids=ids)], info=info)
    tiny_worker(info, [runner]).execute(scored(plan, [0], [ids[1:]]))
    assert runner.largest_block == block_rows(300_000) == 16


def test_hidden_states_come_in_the_order_of_the_rows_by_their_modes():
    ids = [prompt(seed, length) for seed, length in ((1, 4), (2, 6), (3, 5))]
    plan = plans.make_plan([plans.extend(0, len(of), ids=of) for of in ids], info=INFO)
    runner = HistoryRunner(INFO)
    states = tiny_worker(INFO, [runner]).execute(with_modes(plan, 3, 1, 2)).hidden_states
    assert (states.dtype, states.hidden_size) == ("float32", 1)
    # A state of this model is its token's index in the batch.
    found = rows_of(states.indptr, states.states.view(np.float32))
    assert found == [[0, 1, 2, 3], [], [14]]
    assert runner.batches[0].hidden.mode is HiddenMode.FULL


def test_only_last_states_need_no_other():
    plan = plans.make_plan([plans.extend(0, 3, ids=[1, 2, 3])], info=INFO)
    runner = HistoryRunner(INFO)
    states = tiny_worker(INFO, [runner]).execute(with_modes(plan, 2)).hidden_states
    assert states.indptr.tolist() == [0, 1]
    assert not runner.batches[0].wants_all_hidden


def test_a_mode_above_the_servers_is_refused_whole_and_nothing_runs():
    info = replace(INFO, max_hidden_mode=HiddenMode.LAST)
    runner = HistoryRunner(info)
    plan = plans.make_plan([plans.extend(0, 3, ids=[1, 2, 3]) for _ in range(2)], info=info)
    plan = replace(plan, rows=replace(plan.rows, hidden_modes=u8(2, 3)))
    with pytest.raises(UnsupportedFeature) as caught:
        tiny_worker(info, [runner]).execute(plan)
    assert (caught.value.field, caught.value.rows) == ("rows.hidden_modes", (1,))
    assert not runner.batches
