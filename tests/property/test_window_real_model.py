"""Plans in flight change no token: the core over SmolLM2 at window 1, 2 and 3, each sampling feature alone and mixed.

What one request gets alone, unpipelined, is what it must get in any company, with cancels and retractions.
"""

import random
from dataclasses import replace
from types import MappingProxyType

import pytest

from protos.wire.enums import FinishReason
from scheduler_svc.core.events import Grammar, RequestFinished, RequestSpec, Sampling, StreamKey
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.transitions import requeue
from tests.support.core_harness import make_spec
from tests.support.core_on_executor import CoreOnExecutor
from tests.support.golden import cases
from tests.support.model import model_folder
from worker_svc.build import build_tp_model_worker
from worker_svc.runners.executor_settings import ExecutorSettings

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
CASES = cases("smollm2_greedy.json")
TOKENS = 10
PAGE = 16
SEEDED = Sampling(temperature=0.9, seed=77, top_k=40, top_p=0.95)
PENALTIES = Sampling(repetition_penalty=1.4, frequency_penalty=0.4, presence_penalty=0.6)
COMMON_IDS = tuple(range(28, 400))
STOP_IDS = frozenset(range(0, 49152, 5))
FEATURES = MappingProxyType(
    {
        "greedy": {},
        "seeds": {"sampling": SEEDED},
        "min_p": {"sampling": replace(SEEDED, min_p=0.05, top_k=0, top_p=1.0)},
        "second of n": {"sampling": replace(SEEDED, sample_index=1)},
        "third of n": {"sampling": replace(SEEDED, sample_index=2)},
        "penalties": {"sampling": PENALTIES},
        "penalties and seeds": {"sampling": replace(PENALTIES, temperature=0.8, seed=5)},
        "bias": {"sampling": Sampling(bias=((28, 4.0), (198, -20.0)))},
        "allowed": {"sampling": replace(SEEDED, allowed_ids=COMMON_IDS)},
        "banned": {"sampling": Sampling(banned_ids=COMMON_IDS)},
        "stop ids": {"stop_token_ids": STOP_IDS},
        "min_tokens": {"stop_token_ids": STOP_IDS, "min_tokens": 4},
        "grammar": {"grammar": Grammar("regex", "abc")},
        "grammar and penalties": {"grammar": Grammar("regex", "a"), "sampling": PENALTIES, "min_tokens": 2},
        "logprobs": {"output_logprobs": True, "top_logprobs": 3, "sampling": SEEDED},
        "one token": {"max_tokens": 1},
    }
)


@pytest.fixture(scope="module")
def executor():
    settings = ExecutorSettings(numerics="fast", kernels="native", num_pages=400, threads=1, window=3)
    built = build_tp_model_worker(model_folder(), settings)
    yield built
    built.close()


def spec(name: str, stream_id: int = 1) -> RequestSpec:
    prompt = CASES[sorted(FEATURES).index(name) % len(CASES)]["prompt_ids"]
    return make_spec(stream_id, prompt=prompt, **({"max_tokens": TOKENS} | FEATURES[name]))


def specs() -> list[RequestSpec]:
    return [spec(name, stream_id) for stream_id, name in enumerate(FEATURES, start=1)]


def run(executor, wanted, *, window):
    harness = CoreOnExecutor(executor)
    harness.attach_with(window=window)
    harness.submit(*wanted)
    harness.run()
    harness.assert_balanced()
    return harness


def gave(harness, stream_id):
    key = StreamKey(0, stream_id)
    end = harness.ends[key]
    return harness.outputs[key], harness.logprobs[key], end.reason, end.stop_token_id


@pytest.fixture(scope="module")
def alone(executor):
    """What each feature's request gets alone at window 1."""
    return {name: gave(run(executor, [spec(name)], window=1), 1) for name in FEATURES}


def test_the_features_make_a_difference(alone):
    """Or the comparisons below would say nothing."""
    outputs = [tuple(output) for output, *_ in alone.values()]
    assert len(set(outputs)) == len(outputs)
    assert {reason for _, _, reason, _ in alone.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    assert len(alone["min_tokens"][0]) >= 4
    assert all(len(found.top_ids) == 3 for found in alone["logprobs"][1])


@pytest.mark.parametrize("name", FEATURES)
def test_alone_at_window_2_a_feature_gives_what_it_gives_at_window_1(executor, alone, name):
    harness = run(executor, [spec(name)], window=2)
    assert gave(harness, 1) == alone[name]
    references = [plan.tokens.sources is not None for _, plan in harness.plans]
    never = "grammar" in name or name == "one token"
    assert any(references) != never, "a grammar's rows wait for their mask"
    assert harness.state.counters.failed_rows == 0


@pytest.mark.parametrize("window", [1, 2, 3])
def test_all_features_at_once_give_each_what_it_gives_alone(executor, alone, window):
    harness = run(executor, specs(), window=window)
    for stream_id, name in enumerate(FEATURES, start=1):
        assert gave(harness, stream_id) == alone[name], name
    most = max((len(plan.rows.handles) for _, plan in harness.plans), default=0)
    assert most >= 8


def test_known_answers_at_window_2(executor):
    wanted = [
        make_spec(index, prompt=case["prompt_ids"], max_tokens=len(case["greedy_ids"]), output_logprobs=True)
        for index, case in enumerate(CASES[:4])
    ]
    one, two = run(executor, wanted, window=1), run(executor, wanted, window=2)
    for index, _ in enumerate(wanted):
        assert gave(two, index) == gave(one, index)


@pytest.mark.parametrize("seed", range(2))
def test_cancels_stops_and_retractions_at_random_points_change_no_token(executor, alone, seed):
    """With few pages. Requests are retracted, cancelled, or ended by a stop string, between any two results."""
    draw = random.Random(seed)
    names = dict(enumerate(draw.sample(list(FEATURES) * 2, 24), start=1))
    wanted = [spec(name, stream_id) for stream_id, name in names.items()]
    harness = CoreOnExecutor(executor, CoreSettings(new_token_ratio_start=0.0, new_token_ratio_floor=0.0))
    pages = max(-(-(len(item.prompt_ids) + TOKENS) // PAGE) for item in wanted)
    harness.attach_with(window=2, num_pages=2 + pages + draw.randint(2, 6))
    submitted = retractions = 0
    while submitted < len(wanted) or harness.pending["w0"] or harness.masks:
        if submitted < len(wanted) and draw.random() < 0.9:
            harness.submit(wanted[submitted])
            submitted += 1
        if harness.state.streams and draw.random() < 0.08:
            stream = draw.choice(list(harness.state.streams))
            harness.cancel(stream.stream_id, draw.choice([FinishReason.ABORT, FinishReason.STOP]))
        running = list(harness.state.workers["w0"].running.values())
        if running and draw.random() < 0.15:
            requeue(harness.state, draw.choice(running))
            retractions += 1
        if harness.masks and draw.random() < 0.7:
            harness.answer_mask()
        if harness.pending["w0"]:
            harness.deliver()
    harness.assert_balanced()
    counters = harness.state.counters
    assert retractions > 0
    assert counters.late_rows > 0
    assert counters.failed_rows == 0
    for stream_id, name in names.items():
        output, logprobs, reason, _ = gave_or_nothing(harness, stream_id)
        whole = alone[name]
        assert output == whole[0][: len(output)]
        assert logprobs == whole[1][: len(logprobs)]
        if reason is FinishReason.LENGTH:
            assert output == whole[0]


def gave_or_nothing(harness, stream_id):
    key = StreamKey(0, stream_id)
    end = harness.ends[key]
    assert isinstance(end, RequestFinished)
    return harness.outputs.get(key, []), harness.logprobs.get(key, []), end.reason, end.stop_token_id
