"""A request of a scheduler that is gone: it goes on behind what its caller has, as if nothing had happened."""

import pytest

from protos.wire.enums import FinishReason
from protos.wire.errors import InvalidRequest
from scheduler_svc.core.events import Grammar, RequestFinished, RequestRefused, RequestSpec, Sampling
from tests.support.core_harness import CoreHarness, make_spec, oracle, small_info

SAMPLED = Sampling(temperature=0.8, seed=99, sample_index=2, top_k=40)
PENALISED = Sampling(temperature=0.5, seed=3, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
KINDS = {
    "greedy": make_spec(1, prompt=9, max_tokens=8),
    "drawn": make_spec(1, prompt=9, max_tokens=8, sampling=SAMPLED),
    "penalised": make_spec(1, prompt=9, max_tokens=8, sampling=PENALISED),
    "grammar": make_spec(1, prompt=9, max_tokens=8, sampling=SAMPLED, grammar=Grammar("regex", "abc")),
    "least": make_spec(1, prompt=9, max_tokens=8, min_tokens=6, stop_token_ids=frozenset(range(0, 97, 3))),
}


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_with_the_tokens_of_an_undisturbed_run(kind: str, window: int) -> None:
    spec = KINDS[kind]
    whole = oracle(small_info(), spec)
    for known in range(len(whole)):
        harness = CoreHarness()
        harness.attach(info=small_info(window=window))
        harness.submit(make_spec(2, prompt=30))
        harness.resume(spec, whole[:known])
        harness.run()
        end = harness.end(1)
        assert harness.output(1) == whole
        assert isinstance(end, RequestFinished)
        assert end.usage.output_tokens == len(whole)
        assert end.usage.prompt_tokens == 9
        harness.assert_balanced()


def test_logprobs_are_given_for_new_tokens_only() -> None:
    spec = make_spec(1, max_tokens=6, output_logprobs=True, top_logprobs=2)
    harness = CoreHarness()
    harness.attach()
    harness.resume(spec, oracle(harness.infos["w0"], spec)[:4])
    harness.run()
    assert len(harness.logprobs[spec.stream]) == 2


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (make_spec(1, max_tokens=3), FinishReason.LENGTH),
        (make_spec(1, max_tokens=9, stop_token_ids=frozenset(range(97))), FinishReason.STOP),
    ],
)
def test_one_whose_end_was_not_heard_ends_at_once(spec: RequestSpec, reason: FinishReason) -> None:
    harness = CoreHarness()
    harness.attach()
    whole = oracle(harness.infos["w0"], spec)
    harness.resume(spec, whole)
    end = harness.end(1)
    assert isinstance(end, RequestFinished)
    assert (end.reason, end.usage.output_tokens) == (reason, len(whole))
    assert end.stop_token_id == (whole[-1] if reason is FinishReason.STOP else None)
    assert not harness.plans
    harness.assert_balanced()


@pytest.mark.parametrize("known", [(1, 2, 97), (-1,), (1, 2, 3, 4, 5)])
def test_tokens_that_cannot_be_are_refused(known: tuple[int, ...]) -> None:
    harness = CoreHarness()
    harness.attach()
    harness.resume(make_spec(1, max_tokens=4), known)
    end = harness.end(1)
    assert isinstance(end, RequestRefused)
    assert isinstance(end.error, InvalidRequest)
    assert end.error.field == "output_ids"
    harness.assert_balanced()


def test_it_survives_a_second_loss() -> None:
    spec = KINDS["penalised"]
    harness = CoreHarness()
    harness.attach()
    whole = oracle(harness.infos["w0"], spec)
    harness.resume(spec, whole[:3])
    for _ in range(2):
        harness.deliver()
    harness.lose()
    harness.attach()
    harness.run()
    assert harness.output(1) == whole
    harness.assert_balanced()
