import numpy as np
import psutil
import pytest

from protos.wire.enums import Feature, HiddenMode, SubPoolKind
from protos.wire.errors import InvalidRequest, UnsupportedFeature
from tests.support.plan_driver import PlanDriver, Request
from tests.support.tiny_llama import Shape, parameters, tiny_folder
from worker_svc.build import build_tp_model_worker
from worker_svc.runners.executor_settings import ExecutorSettings

SETTINGS = {"numerics": "reproducible", "num_pages": 40, "max_rows": 16, "max_tokens": 128, "threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def worker(folder):
    return build_tp_model_worker(folder, ExecutorSettings(**SETTINGS))


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, 250, length).tolist()


def test_the_info_is_that_of_the_parts(folder, worker):
    info = worker.worker_info()
    shape = Shape()
    (pool,) = info.sub_pools
    assert (pool.kind, pool.num_pages, pool.page_size) == (SubPoolKind.FULL, 40, 16)
    assert pool.bytes_per_page == 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 16 * 4
    assert (info.limits.max_rows, info.limits.max_tokens, info.limits.window) == (16, 128, 2)
    assert info.limits.context_tokens == shape.context_tokens
    assert info.logits_width == shape.vocab_size
    assert info.features == {
        Feature.TOKEN_REFERENCES,
        Feature.OUTPUT_LOGPROBS,
        Feature.PROMPT_LOGPROBS,
        Feature.HIDDEN_STATES,
        Feature.PENALTIES,
        Feature.MASKS,
        Feature.LOGIT_BIAS,
        Feature.DELTAS,
    }
    assert info.max_hidden_mode is HiddenMode.FULL
    assert info.limits.max_hidden_states == (3 << 20) // (4 * shape.hidden_size)
    assert {mode.name for mode in info.modes} == {"EXTEND", "DECODE", "MIXED", "IDLE"}
    assert info.fingerprints.weights == folder.card.weights_fingerprint
    assert info.fingerprints.tokenizer == folder.card.tokenizer_fingerprint
    assert info.model_name == folder.card.name
    assert (info.numerics, info.dtype, info.device) == ("reproducible", "float32", "cpu")
    assert len(info.incarnation) == 16
    assert info.buckets == ()


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_the_weights_are_counted_as_they_lie_on_the_device(tmp_path, kernels):
    shape = Shape(hidden_size=64, intermediate_size=64, num_q_heads=2, num_kv_heads=1, head_dim=32)
    settings = SETTINGS | {"numerics": "fast", "kernels": kernels}
    worker = build_tp_model_worker(tiny_folder(tmp_path, shape, is_quantised=True), ExecutorSettings(**settings))
    weights = parameters(shape).values()
    # Q8_0: 34 bytes for 32 values; norms stay float32.
    quantised = sum(values.size * 34 // 32 if values.ndim > 1 else values.nbytes for values in weights)
    expected = {"torch": sum(values.nbytes for values in weights), "native": quantised}
    assert worker.memory.weights_bytes == expected[kernels]
    assert 0 < worker.memory.free_bytes() <= psutil.virtual_memory().total
    worker.close()


def test_every_start_is_another_incarnation(folder, worker):
    other = build_tp_model_worker(folder, ExecutorSettings(**SETTINGS))
    assert other.worker_info().incarnation != worker.worker_info().incarnation
    assert other.worker_info().fingerprints == worker.worker_info().fingerprints


def test_tokens_are_the_same_alone_chunked_and_among_mates(worker):
    def requests():
        options = {"max_new": 5, "top_logprobs": 3}
        return [
            Request(prompt_ids=prompt(seed, 3 + 9 * seed), temperature=0.7 * (seed % 2), seed=seed, **options)
            for seed in range(8)
        ]

    together, chunked = requests(), requests()
    PlanDriver(worker, budget_tokens=120).run(*together)
    PlanDriver(worker, budget_tokens=16, page_seed=1).run(*chunked)
    for seed, alone in enumerate(requests()):
        PlanDriver(worker, page_seed=2 + seed).run(alone)
        for other in (together[seed], chunked[seed]):
            assert other.token_ids == alone.token_ids
            assert (other.logprobs, other.top) == (alone.logprobs, alone.top)


@pytest.mark.parametrize(
    ("change", "error", "field"),
    [
        ({"dtype": "float16"}, UnsupportedFeature, "dtype"),
        ({"dtype": "bfloat16"}, UnsupportedFeature, "dtype"),
        ({"numerics": "exact"}, UnsupportedFeature, "numerics"),
        ({"num_pages": 1}, InvalidRequest, "num_pages"),
        ({"num_pages": 10**9}, InvalidRequest, "num_pages"),
        ({"num_pages": None, "kv_bytes": 10}, InvalidRequest, "kv_bytes"),
    ],
)
def test_settings_that_cannot_work_are_refused(folder, change, error, field):
    with pytest.raises(error) as caught:
        build_tp_model_worker(folder, ExecutorSettings(**(SETTINGS | change)))
    assert caught.value.field == field
