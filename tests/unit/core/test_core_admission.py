import pytest

from protos.wire.enums import Feature
from scheduler_svc.core.events import Grammar, RequestRefused, Sampling
from scheduler_svc.core.settings import CoreSettings
from tests.support.core_harness import CoreHarness, make_spec, oracle, small_info
from tests.support.plans import CORE_FEATURES, full_sub_pool, window_sub_pool


def refusal(harness: CoreHarness, stream_id: int = 1):
    end = harness.end(stream_id)
    assert isinstance(end, RequestRefused)
    return end.error


def attached(**changes: object) -> CoreHarness:
    harness = CoreHarness()
    harness.attach(info=small_info(**changes))
    return harness


def test_before_the_first_worker_requests_are_sent_away():
    harness = CoreHarness()

    harness.submit(make_spec(1))

    assert refusal(harness).reason == "LOADING"
    assert refusal(harness).retry_after_ms == 1000


def test_while_a_known_worker_is_away_requests_wait():
    harness = attached()
    harness.lose()
    harness.submit(make_spec(1))
    assert harness.state.gauges().waiting == 1

    harness.attach()
    harness.run()

    assert harness.output(1) == oracle(harness.infos["w0"], harness.specs[make_spec(1).stream])


@pytest.mark.parametrize(("prompt", "max_tokens", "fits"), [(20, 12, True), (20, 13, False), (31, 1, True)])
def test_a_request_must_fit_the_empty_pool(prompt, max_tokens, fits):
    harness = attached(num_pages=9)

    harness.submit(make_spec(1, prompt=prompt, max_tokens=max_tokens))

    if fits:
        harness.run()
        assert len(harness.output(1)) == max_tokens
    else:
        assert refusal(harness).reason == "NEVER_FITS"
        assert refusal(harness).field == "max_tokens"
        assert str(refusal(harness)) == (
            "prompt and max_tokens are 33 tokens, the largest KV pool holds 32 (the workers' num_pages sets that)"
        )


def test_a_refusal_names_the_sub_pool_that_binds_and_the_settings_that_help():
    pools = (full_sub_pool(num_pages=30, page_size=4), window_sub_pool(num_pages=6, page_size=4, window_tokens=6))
    harness = CoreHarness(CoreSettings(budget_tokens=16))
    harness.attach(info=small_info(sub_pools=pools))

    harness.submit(make_spec(1, prompt=20, max_tokens=1))

    assert refusal(harness).reason == "NEVER_FITS"
    assert str(refusal(harness)) == (
        "prompt and max_tokens are 21 tokens, the KV pools hold 20 of one sequence: the sub-pool of the window of 6 "
        "tokens has 5 pages of 4, and a longer sequence needs 8 of them (a larger num_pages, or a smaller window of "
        "the workers or a smaller budget_tokens of the scheduler would help)"
    )


def test_a_request_must_fit_the_context():
    harness = attached(context_tokens=16)

    harness.submit(make_spec(1, prompt=10, max_tokens=6), make_spec(2, prompt=10, max_tokens=7))
    harness.run()

    assert len(harness.output(1)) == 6
    assert str(refusal(harness, 2)) == "prompt and max_tokens are 17 tokens, the context holds 16"


def test_the_largest_pool_counts():
    harness = attached(num_pages=3)
    harness.attach("w1", small_info(num_pages=9))

    harness.submit(make_spec(1, prompt=20, max_tokens=12))
    harness.run()

    assert len(harness.output(1)) == 12
    assert {worker for worker, _ in harness.plans} == {"w1"}


def test_waiting_requests_that_a_smaller_pool_cannot_hold_are_ended():
    harness = attached(num_pages=9)
    harness.lose()
    harness.submit(make_spec(1, prompt=20, max_tokens=12), make_spec(2))

    harness.attach(info=small_info(num_pages=5))
    harness.run()

    assert refusal(harness).reason == "NEVER_FITS"
    assert len(harness.output(2)) == 4
    harness.assert_balanced()


def test_the_queue_is_bounded_by_count():
    harness = CoreHarness(CoreSettings(max_waiting_requests=2, retry_after_ms=70))
    harness.attach(info=small_info(max_rows=1))

    harness.submit(make_spec(1))
    harness.submit(*[make_spec(stream) for stream in (2, 3, 4)])

    assert refusal(harness, 4).reason == "QUEUE_FULL"
    assert refusal(harness, 4).retry_after_ms == 70
    harness.run()
    assert [len(harness.output(stream)) for stream in (1, 2, 3)] == [4, 4, 4]
    assert harness.state.counters.refused == {"QUEUE_FULL": 1}


def test_the_queue_is_bounded_by_tokens_but_takes_one_request_of_any_length():
    harness = CoreHarness(CoreSettings(max_waiting_tokens=10))
    harness.attach(info=small_info(max_rows=1))
    harness.submit(make_spec(1))

    harness.submit(make_spec(2, prompt=11), make_spec(3, prompt=1))

    assert harness.end(2) is None
    assert str(refusal(harness, 3)) == "12 tokens would wait, the limit is 10"


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"prompt": []}, "INVALID_REQUEST", "prompt_ids"),
        ({"prompt": [5, 97]}, "INVALID_REQUEST", "prompt_ids"),
        ({"prompt": [-1]}, "INVALID_REQUEST", "prompt_ids"),
        ({"max_tokens": 0}, "INVALID_REQUEST", "max_tokens"),
        ({"sampling": Sampling(bias=((96, 1.0), (97, 1.0)))}, "INVALID_REQUEST", "sampling.logit_bias"),
        ({"sampling": Sampling(allowed_ids=(97,))}, "INVALID_REQUEST", "sampling.allowed_token_ids"),
        ({"sampling": Sampling(banned_ids=(-1,))}, "INVALID_REQUEST", "sampling.banned_token_ids"),
        ({"min_tokens": 1, "stop_token_ids": frozenset({97})}, "INVALID_REQUEST", "stop.stop_token_ids"),
        ({"sampling": Sampling(allowed_ids=(1, 2), banned_ids=(2, 1))}, "INVALID_REQUEST", "sampling.banned_token_ids"),
        ({"sampling": Sampling(banned_ids=tuple(range(97)))}, "INVALID_REQUEST", "sampling.banned_token_ids"),
        (
            {"sampling": Sampling(allowed_ids=(1,)), "min_tokens": 1, "stop_token_ids": frozenset({1})},
            "INVALID_REQUEST",
            "stop.min_tokens",
        ),
        ({"output_logprobs": True, "top_logprobs": 21}, "INVALID_REQUEST", "top_logprobs"),
    ],
)
def test_what_no_worker_could_do_is_refused_by_name(changes, reason, field):
    harness = attached()

    harness.submit(make_spec(1, **changes))

    assert (refusal(harness).reason, refusal(harness).field) == (reason, field)
    harness.assert_balanced()


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"sampling": Sampling(repetition_penalty=1.1)}, Feature.PENALTIES),
        ({"sampling": Sampling(frequency_penalty=0.1)}, Feature.PENALTIES),
        ({"sampling": Sampling(presence_penalty=-0.1)}, Feature.PENALTIES),
        ({"sampling": Sampling(bias=((1, 1.0),))}, Feature.LOGIT_BIAS),
        ({"sampling": Sampling(allowed_ids=(1,))}, Feature.MASKS),
        ({"sampling": Sampling(banned_ids=(1,))}, Feature.MASKS),
        ({"min_tokens": 1, "stop_token_ids": frozenset({1})}, Feature.MASKS),
        ({"grammar": Grammar("regex", "a")}, Feature.MASKS),
    ],
)
def test_a_feature_that_the_worker_lacks_is_refused_by_name(changes, lacks):
    harness = attached(features=CORE_FEATURES - {lacks})

    harness.submit(make_spec(1, **changes), make_spec(2, min_tokens=1))

    assert refusal(harness).reason == "UNSUPPORTED"
    assert lacks.name in refusal(harness).message
    assert harness.end(2) is None


def test_log_probabilities_need_a_worker_that_returns_them():
    harness = attached(features=frozenset({Feature.TOKEN_REFERENCES}))

    harness.submit(make_spec(1, output_logprobs=True))

    assert (refusal(harness).reason, refusal(harness).field) == ("UNSUPPORTED", "logprobs")


def test_two_live_requests_of_one_stream_end_both():
    harness = attached()
    harness.submit(make_spec(1))

    harness.submit(make_spec(1))

    assert refusal(harness).reason == "INTERNAL_FAULT"
    harness.assert_balanced()
