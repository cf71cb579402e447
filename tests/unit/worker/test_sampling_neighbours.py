"""The core and a torch worker together: each sampling feature alone is the oracle's, and beside any other the same."""

from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest

from protos.wire.errors import InvalidRequest
from scheduler_svc.core.events import Grammar, RequestSpec, Sampling
from tests.support import oracle, plans
from tests.support.core_harness import CoreHarness, grammar_ids, make_spec
from tests.support.tiny_model import WIDTH, HistoryRunner, history_logits, tiny_worker

INFO = plans.make_info(
    logits_width=WIDTH,
    features=plans.CORE_FEATURES - {plans.Feature.TOKEN_REFERENCES},
    limits=plans.make_limits(window=1),
)
RANDOM = Sampling(temperature=0.9, top_k=50, top_p=0.97, min_p=0.01, seed=2**63 + 11)
PENAL = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": -0.4}
FEATURES: dict[str, dict[str, object]] = {
    "greedy": {},
    "random": {"sampling": RANDOM},
    "sample": {"sampling": replace(RANDOM, sample_index=7)},
    "penalties": {"sampling": Sampling(**PENAL)},
    "repetition": {"sampling": replace(RANDOM, repetition_penalty=0.5)},
    "bias": {"sampling": replace(RANDOM, bias=((3, 9.0), (17, 9.5), (40, -100.0)))},
    "allowed": {"sampling": replace(RANDOM, allowed_ids=tuple(range(60, 80)))},
    "banned": {"sampling": Sampling(banned_ids=tuple(range(0, WIDTH, 2)))},
    "min_tokens": {"stop_token_ids": frozenset(range(100)), "min_tokens": 4},
    "grammar": {"grammar": Grammar("regex", "abc"), "sampling": RANDOM},
    "logprobs": {"output_logprobs": True, "top_logprobs": 3, "sampling": Sampling(bias=((5, 50.0),))},
    "everything": {
        "sampling": replace(RANDOM, **PENAL, bias=((90, 4.0),), banned_ids=(1, 2, 3), sample_index=2),
        "stop_token_ids": frozenset(range(30)),
        "min_tokens": 3,
        "grammar": Grammar("regex", "ab"),
    },
}


def spec_of(name: str, stream_id: int, *, prompt_seed: int = 0) -> RequestSpec:
    ids = np.random.default_rng([prompt_seed, *name.encode()]).integers(0, WIDTH - 1, 21)
    return make_spec(stream_id, prompt=ids.tolist(), max_tokens=8, **FEATURES[name])


def run(*specs: RequestSpec, budget_tokens: int = 64) -> CoreHarness:
    harness = CoreHarness(replace(CoreHarness().state.settings, budget_tokens=budget_tokens))
    harness.attach(info=INFO)
    harness.workers["w0"] = tiny_worker(INFO)
    harness.submit(*specs)
    harness.run()
    return harness


def outcome(harness: CoreHarness, stream_id: int) -> tuple[object, ...]:
    (stream,) = [stream for stream in harness.specs if stream.stream_id == stream_id]
    return harness.output(stream_id), harness.logprobs.get(stream, []), harness.end(stream_id).reason


def expected(spec: RequestSpec) -> list[int]:
    """One token after the other, no batch, no plan."""
    sampling, prompt = spec.sampling, spec.prompt_ids.tolist()
    output: list[int] = []
    while len(output) < spec.max_tokens:
        allowed = set(sampling.allowed_ids or range(WIDTH))
        if spec.grammar is not None:
            allowed &= grammar_ids(spec.grammar, output)
        row = oracle.ruled_logits(
            history_logits(prompt + output),
            prompt=prompt,
            output=output,
            repetition=sampling.repetition_penalty,
            frequency=sampling.frequency_penalty,
            presence=sampling.presence_penalty,
            bias=dict(sampling.bias),
            allowed=allowed,
            banned={*sampling.banned_ids, *(spec.stop_token_ids if len(output) < spec.min_tokens else ())},
        )
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index")
        options = {name: getattr(sampling, name) for name in names}
        output.append(oracle.sampled_id(row, position=len(prompt) + len(output) - 1, **options))
        if output[-1] in spec.stop_token_ids:
            break
    return output


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_alone_is_the_oracles(name):
    spec = spec_of(name, 1)
    assert run(spec).output(1) == expected(spec)


def test_s12_every_pair_of_features_as_neighbours_equals_the_solo_runs():
    solo = {name: outcome(run(spec_of(name, 1)), 1) for name in FEATURES}
    twins = {name: outcome(run(spec_of(name, 1, prompt_seed=1)), 1) for name in FEATURES}
    for first, second in combinations_with_replacement(FEATURES, 2):
        harness = run(spec_of(first, 1), spec_of(second, 2, prompt_seed=1))
        assert outcome(harness, 1) == solo[first], (first, second)
        assert outcome(harness, 2) == twins[second], (first, second)


@pytest.mark.parametrize("budget", [16, 2048])
def test_s12_all_features_at_once_equal_the_solo_runs(budget):
    harness = run(*[spec_of(name, place) for place, name in enumerate(FEATURES, start=1)], budget_tokens=budget)
    for place, name in enumerate(FEATURES, start=1):
        assert harness.output(place) == expected(spec_of(name, place)), name


def test_samples_of_one_prompt_do_not_depend_on_their_number():
    def samples(n: int) -> list[list[int]]:
        base = spec_of("random", 1)
        specs = [
            replace(
                base, stream=base.stream._replace(stream_id=index + 1), sampling=replace(RANDOM, sample_index=index)
            )
            for index in range(n)
        ]
        harness = run(*specs)
        return [harness.output(index + 1) for index in range(n)]

    sixteen = samples(16)
    assert samples(1) == sixteen[:1]
    assert samples(5) == sixteen[:5]
    assert len({tuple(sample) for sample in sixteen}) == 16


def test_log_probabilities_are_of_the_raw_distribution():
    harness = run(spec_of("logprobs", 1))
    spec = spec_of("logprobs", 1)
    (logprobs,) = harness.logprobs.values()
    for place, (token_id, found) in enumerate(zip(harness.output(1), logprobs, strict=True)):
        raw = oracle.log_softmax(history_logits(spec.prompt_ids.tolist() + harness.output(1)[:place]))
        assert token_id == 5
        assert found.logprob == pytest.approx(raw[5], abs=1e-6)
        assert found.top_ids == tuple(np.argsort(-raw, kind="stable")[:3].tolist())


class WithoutSeven(HistoryRunner):
    """A model that gives id 7 no chance at all."""

    def forward(self, batch):
        output = super().forward(batch)
        output.logits[:, 7] = -np.inf
        return output


def test_a_row_that_can_sample_nothing_fails_alone_with_a_clear_error():
    hopeless = replace(spec_of("greedy", 1), sampling=Sampling(allowed_ids=(7,)))
    harness = CoreHarness()
    harness.attach(info=INFO)
    harness.workers["w0"] = tiny_worker(INFO, [WithoutSeven(INFO)])
    harness.submit(hopeless, spec_of("min_tokens", 2))
    harness.run()
    error = harness.end(1).error
    assert (type(error), error.field, error.status) == (InvalidRequest, "sampling", "INVALID_ARGUMENT")
    assert "leave nothing to sample after 0 tokens" in error.message
    assert len(harness.output(2)) >= 4
    assert harness.state.counters.failed_rows == 1
