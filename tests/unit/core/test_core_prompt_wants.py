"""Prompt log-probabilities, hidden states and prefill-only requests in the core: complete, in order, told once."""

from dataclasses import replace

import numpy as np
import pytest

from protos.wire.enums import Feature, FinishReason, HiddenMode, RowFailure
from scheduler_svc.core.events import PromptWants, RequestFinished, RequestRefused, StateUse, StreamKey
from scheduler_svc.core.settings import CoreSettings
from tests.support.core_harness import CoreHarness, make_spec, oracle, small_info
from tests.support.plans import CORE_FEATURES
from tests.support.prompt_oracle import assert_prompt_answer

FEATURES = CORE_FEATURES | {Feature.PROMPT_LOGPROBS, Feature.HIDDEN_STATES}
ALL = PromptWants(logprobs_from=1, top_logprobs=3, states=StateUse.FULL)
EVERY_USE = [None, StateUse.LAST, StateUse.FULL, StateUse.MEAN]


def info(**changes):
    values = {"features": FEATURES, "max_hidden_mode": HiddenMode.FULL}
    made = small_info(**(values | changes))
    return replace(made, limits=replace(made.limits, max_hidden_states=200))


def harness(budget=8, **changes):
    made = CoreHarness(CoreSettings(budget_tokens=budget))
    made.attach(info=info(**changes))
    return made


def answered(made, stream_id):
    stream = StreamKey(0, stream_id)
    assert_prompt_answer(made.specs[stream], made.prompts[stream])
    return made.prompts[stream]


@pytest.mark.parametrize("states", EVERY_USE)
@pytest.mark.parametrize("logprobs_from", [None, 1, 7, 12])
@pytest.mark.parametrize("window", [1, 2])
def test_everything_wanted_of_a_chunked_prompt_comes_once_before_the_first_token(states, logprobs_from, window):
    made = harness(window=window)
    spec = make_spec(1, prompt=21, prompt_wants=PromptWants(logprobs_from=logprobs_from, top_logprobs=2, states=states))
    made.submit(spec)
    made.run()
    answered(made, 1)
    assert made.output(1) == oracle(made.infos["w0"], spec)
    made.assert_balanced()


@pytest.mark.parametrize("states", EVERY_USE)
def test_a_request_without_output_ends_with_its_prompt_and_samples_nothing(states):
    made = harness(window=2)
    specs = [
        make_spec(index, prompt=19, max_tokens=0, prompt_wants=PromptWants(logprobs_from=1, states=states))
        for index in (1, 2, 3)
    ]
    made.submit(*specs)
    made.run()
    for index in (1, 2, 3):
        answered(made, index)
        end = made.end(index)
        assert isinstance(end, RequestFinished)
        assert (end.reason, end.usage.output_tokens, end.stop_token_id) == (FinishReason.LENGTH, 0, None)
        assert end.usage.prompt_tokens == 19
        assert made.output(index) == []
    assert not any(plan.rows.samples.any() for _, plan in made.plans)
    made.assert_balanced()


def test_the_target_of_a_chunks_last_token_travels_in_the_plan():
    made = harness(budget=8)
    spec = make_spec(1, prompt=16, prompt_wants=PromptWants(logprobs_from=1))
    made.submit(spec)
    (_, plan) = made.plans[0]
    assert plan.tokens.ids.tolist() == spec.prompt_ids[:8].tolist()
    assert plan.logprobs.target_ids.tolist() == spec.prompt_ids[1:9].tolist()


@pytest.mark.parametrize(
    ("wants", "hit"),
    [
        (PromptWants(logprobs_from=1), 0),
        (PromptWants(logprobs_from=9), 8),
        (PromptWants(logprobs_from=12), 8),
        (PromptWants(logprobs_from=13), 12),
        (PromptWants(states=StateUse.LAST), 16),
        (PromptWants(states=StateUse.FULL), 0),
        (PromptWants(states=StateUse.MEAN), 0),
    ],
)
def test_a_prefix_hit_ends_before_the_first_position_that_is_wanted(wants, hit):
    made = harness(budget=64)
    prompt = list(range(20))
    made.submit(make_spec(1, prompt=prompt))
    made.run()
    made.submit(make_spec(2, prompt=prompt, prompt_wants=wants))
    made.run()
    answered(made, 2)
    assert made.end(2).usage.cached_tokens == hit
    made.assert_balanced()


@pytest.mark.parametrize("states", [StateUse.FULL, StateUse.MEAN])
def test_retraction_in_the_middle_keeps_what_has_come_and_asks_only_for_the_rest(states):
    made = CoreHarness(CoreSettings(budget_tokens=4, new_token_ratio_start=0.0, new_token_ratio_floor=0.0))
    made.attach(info=info(num_pages=12))
    made.submit(make_spec(1, prompt=13, max_tokens=24))
    for _ in range(4):
        made.deliver()
    spec = make_spec(2, prompt=27, prompt_wants=replace(ALL, states=states), max_tokens=2)
    made.submit(spec)
    made.run()
    assert made.state.counters.retractions > 0
    answered(made, 2)
    scored = [plan for _, plan in made.plans if plan.logprobs is not None]
    assert sum(len(plan.logprobs.target_ids) for plan in scored) == 26
    made.assert_balanced()


def test_a_lost_worker_loses_nothing_that_has_come():
    made = harness(budget=8)
    made.submit(make_spec(1, prompt=30, prompt_wants=ALL))
    made.deliver()
    made.deliver()
    made.lose()
    made.attach()
    made.run()
    answered(made, 1)
    assert made.state.counters.migrations == 1
    assert sum(len(plan.logprobs.target_ids) for _, plan in made.plans if plan.logprobs is not None) == 29 + 8


def test_bad_numbers_in_a_later_chunk_throw_away_what_came_before():
    made = harness(budget=8)
    failed = []

    def fail(plan, row):
        if plan.identity.seq == 3 and not failed:
            failed.append(row)
            return RowFailure.NAN
        return None

    made.fail_row = fail
    made.submit(make_spec(1, prompt=30, prompt_wants=ALL))
    made.run()
    answered(made, 1)
    assert failed
    asked = sum(len(plan.logprobs.target_ids) for _, plan in made.plans if plan.logprobs is not None)
    assert asked == 24 + 29


def test_an_answer_of_another_length_is_no_answer():
    made = harness(budget=64)
    made.submit(make_spec(1, prompt=9, prompt_wants=ALL))
    worker = made.workers["w0"]
    execute, spoiled = worker.execute, []

    def short(plan):
        result = execute(plan)
        if spoiled or result.hidden_states is None:
            return result
        spoiled.append(plan)
        states = result.hidden_states
        less = replace(states, indptr=np.array([0, 8], np.uint32), states=states.states[:-8])
        return replace(result, hidden_states=less)

    worker.execute = short
    made.run()
    answered(made, 1)
    assert len(spoiled) == made.state.counters.failed_rows == 1


def test_chunks_are_cut_to_the_states_that_one_result_may_hold():
    made = CoreHarness(CoreSettings(budget_tokens=64))
    small = info()
    made.attach(info=replace(small, limits=replace(small.limits, max_hidden_states=10)))
    wants = PromptWants(states=StateUse.MEAN)
    made.submit(*[make_spec(index, prompt=30, max_tokens=1, prompt_wants=wants) for index in (1, 2)])
    made.run()
    answered(made, 1)
    answered(made, 2)
    asked = [plan.rows for _, plan in made.plans if plan.rows.hidden_modes is not None]
    assert 8 <= max(int(rows.extend_lens[rows.hidden_modes == HiddenMode.FULL].sum()) for rows in asked) <= 10


def test_samples_without_wants_share_the_prefix_that_the_first_computes():
    made = harness(budget=64, num_pages=200)
    made.submit(make_spec(1, prompt=list(range(40)), prompt_wants=ALL), make_spec(2, prompt=list(range(40))))
    made.run()
    answered(made, 1)
    assert made.end(2).usage.cached_tokens == 36


@pytest.mark.parametrize(
    ("changes", "infos", "field"),
    [
        ({"max_tokens": 0}, {}, "max_tokens"),
        ({"prompt_wants": ALL}, {"features": CORE_FEATURES}, "prompt_logprobs"),
        (
            {"prompt_wants": PromptWants(states=StateUse.LAST)},
            {"features": FEATURES - {Feature.HIDDEN_STATES}},
            "hidden_states",
        ),
        ({"prompt_wants": ALL}, {"max_hidden_mode": HiddenMode.LAST}, "hidden_states"),
        ({"prompt_wants": PromptWants(states=StateUse.LAST)}, {"max_hidden_mode": HiddenMode.NULL}, "hidden_states"),
        ({"prompt_wants": ALL, "prompt": 201}, {}, "hidden_states"),
        ({"prompt_wants": PromptWants(logprobs_from=6)}, {}, "prompt_logprobs.start"),
        ({"prompt_wants": PromptWants(logprobs_from=1, top_logprobs=21)}, {}, "prompt_logprobs.top"),
    ],
)
def test_what_the_workers_cannot_answer_is_refused_by_name(changes, infos, field):
    made = harness(num_pages=300, **infos)
    made.submit(make_spec(1, **changes))
    end = made.end(1)
    assert isinstance(end, RequestRefused)
    assert end.error.field == field


def test_a_prompt_that_fills_the_context_can_be_scored():
    made = CoreHarness(CoreSettings(budget_tokens=64))
    made.attach(info=info(context_tokens=48, num_pages=30))
    made.submit(make_spec(1, prompt=48, max_tokens=0, prompt_wants=PromptWants(logprobs_from=1)))
    made.run()
    answered(made, 1)
