"""The native kernels on the real model: known answers with float activations, the KL rule with rounded ones.

The distributions of the check variant stand for float32 at every position; the known log-probabilities tie them to it.
"""

import numpy as np
import pytest

from kernels.native import Native, ThreadPool, load_native
from kernels.native_model import NativeModel
from kernels.native_spec import NativeLimits, RawTensor, spec_from_metadata
from kernels.native_types import Variant
from protos.service.gguf_header import read_gguf_header
from protos.service.gguf_types import TENSOR_TYPES
from tests.support.golden import cases
from tests.support.model import model_folder
from tests.support.native_cases import Sequence, step_input

pytestmark = pytest.mark.model

CASES = cases("smollm2_greedy.json")
TYPE_NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}
HALF_KV_TOLERANCE = 0.02
"""Of a log-probability: keys and values are kept in fp16."""
MAX_KL = 0.005
MIN_SAME_BEST = 0.97
WINDOW = 64
"""Positions whose distributions are compared at once."""


@pytest.fixture(scope="module")
def pool():
    native = load_native()
    assert isinstance(native, Native), native
    with ThreadPool(native, threads=2) as threads:
        yield threads


@pytest.fixture(scope="module")
def source():
    path = model_folder().weights
    header = read_gguf_header(path)
    file = np.memmap(path, np.uint8, "r")
    weights = {
        name: RawTensor(type=TYPE_NUMBERS[info.type.name], data=file[info.offset : info.offset + info.num_bytes])
        for name, info in header.tensors.items()
    }
    return spec_from_metadata(header.metadata, vocab_size=header.tensors["token_embd.weight"].shape[0]), weights


def make(pool, source, variant):
    spec, weights = source
    limits = NativeLimits(num_pages=(80,), max_context=1100, max_tokens=1024, max_rows=64, variant=variant)
    return NativeModel(spec, weights, limits=limits, pool=pool)


@pytest.fixture(scope="module")
def exact(pool, source):
    with make(pool, source, Variant.CHECK) as model:
        yield model


@pytest.fixture(scope="module")
def fast(pool, source):
    with make(pool, source, Variant.AUTO) as model:
        yield model


def log_probs(logits):
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def forced(model, case):
    """Logits at every position of prompt and known ids."""
    ids = case["prompt_ids"] + case["greedy_ids"][:-1]
    return model.step(step_input([(Sequence(range(1, 80)), ids)], out_tokens=range(len(ids)))).logits


def test_float_activations_give_the_known_answers_and_rounded_ones_obey_the_kl_rule(exact, fast):
    divergences, same_best = [], []
    for case in CASES:
        expected, got = forced(exact, case), forced(fast, case)
        known = log_probs(expected[len(case["prompt_ids"]) - 1 :])
        assert known.argmax(-1).tolist() == case["greedy_ids"], case["prompt"][:40]
        for step, best in enumerate(case["top5_logprobs"]):
            for token, log_prob in best:
                assert abs(known[step, token] - log_prob) < HALF_KV_TOLERANCE, (case["prompt"][:40], step)
        for begin in range(0, len(expected), WINDOW):
            p, q = log_probs(expected[begin : begin + WINDOW]), log_probs(got[begin : begin + WINDOW])
            divergences.append((np.exp(p) * (p - q)).sum(-1))
            same_best.append(p.argmax(-1) == q.argmax(-1))

    assert np.concatenate(divergences).mean() <= MAX_KL
    assert np.concatenate(same_best).mean() >= MIN_SAME_BEST


def test_decode_in_a_batch_has_the_bits_of_one_prefill(fast):
    """Prompts in chunks, then forced decode of all cases together, against each case alone as one prompt."""
    chosen = [case for case in CASES if len(case["prompt_ids"]) < 100]
    alone = [forced(fast, case) for case in chosen]
    pages = np.arange(1, 80)
    rows = [Sequence(pages[6 * index : 6 * index + 6]) for index in range(len(chosen))]
    for begin in range(0, 48, 13):
        work = [(seq, case["prompt_ids"][begin : begin + 13]) for seq, case in zip(rows, chosen, strict=True)]
        fast.step(step_input([row for row in work if row[1]]))

    for step in range(40):
        live = [i for i, case in enumerate(chosen) if step + 1 < len(case["greedy_ids"])]
        output = fast.step(step_input([(rows[i], [chosen[i]["greedy_ids"][step]]) for i in live]))
        for row, i in enumerate(live):
            assert np.array_equal(output.logits[row], alone[i][len(chosen[i]["prompt_ids"]) + step]), (i, step)
