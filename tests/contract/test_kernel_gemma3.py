"""The native kernels on real Gemma 3: windows on pages of their own, known answers, the KL rule of rounded activations.

As for SmolLM2, the check variant stands for float32; its distributions are compared where they are computed, a stretch
of positions at a time, since each is a quarter of a million numbers.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from kernels.native import Native, ThreadPool, load_native
from kernels.native_model import NativeModel
from kernels.native_spec import NativeLimits
from kernels.native_types import Variant
from tests.support.golden import cases
from tests.support.model import GEMMA3, model_folder
from tests.support.native_cases import Sequence, step_input
from worker_svc.models.native_source import native_source

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

CASES = cases("gemma3_greedy.json")
HALF_KV_TOLERANCE = 0.02
"""Of a log-probability: keys and values are kept in fp16."""
MAX_KL = 0.005
MIN_SAME_BEST = 0.97
STRETCH = 64
JUDGED = 96
"""Positions before the first known one that are compared, at most."""


class Judged(NamedTuple):
    kl: torch.Tensor
    same_best: torch.Tensor


@pytest.fixture(scope="module")
def models():
    """With float activations, and with rounded ones."""
    native = load_native()
    assert isinstance(native, Native), native
    source = native_source(model_folder(GEMMA3))
    with ThreadPool(native, threads=2) as pool:
        made = []
        for variant in (Variant.CHECK, Variant.AUTO):
            limits = NativeLimits(num_pages=(60, 60), max_context=1100, max_tokens=1024, max_rows=8, variant=variant)
            made.append(NativeModel(source.spec, source.weights, limits=limits, pool=pool))
        yield made
        for model in made:
            model.close()


def window_start(length: int) -> int:
    """First position of the first page that a token at position `length` sees in a windowed layer."""
    return max(0, length - 511) // 16 * 16


def stretches(model, ids, *, begin):
    """Log-probabilities from position `begin` on, some positions at a time; pages before windows are left out."""
    row = Sequence(np.random.default_rng(2).permutation(59) + 1)
    if begin:
        model.step(step_input([(row, ids[:begin])], num_groups=2, out_tokens=[]))
    while row.length < len(ids):
        part = ids[row.length : row.length + STRETCH]
        starts = [window_start(row.length)]
        output = model.step(step_input([(row, part)], num_groups=2, out_tokens=range(len(part)), starts=starts))
        yield torch.log_softmax(torch.from_numpy(output.logits), -1)


def assert_known(case, log_probs, *, first_step):
    """Rows of `log_probs` whose step is below 0 are of the prompt."""
    for step, row in enumerate(log_probs, start=first_step):
        for token, log_prob in case["top5_logprobs"][step] if step >= 0 else ():
            assert abs(float(row[token]) - log_prob) < HALF_KV_TOLERANCE, (case["prompt"][:40], step)


def test_known_answers_with_float_activations_and_the_kl_rule_with_rounded_ones(models):
    exact, fast = models
    judged = []
    for case in CASES:
        ids = case["prompt_ids"] + case["greedy_ids"][:-1]
        first = len(case["prompt_ids"]) - 1
        begin = max(0, first - JUDGED)
        position = begin
        for known, found in zip(stretches(exact, ids, begin=begin), stretches(fast, ids, begin=begin), strict=True):
            assert_known(case, known, first_step=position - first)
            judged.append(Judged((known.exp() * (known - found)).sum(-1), known.argmax(-1) == found.argmax(-1)))
            position += len(known)
    kl, same = torch.cat([part.kl for part in judged]), torch.cat([part.same_best for part in judged])
    print(f"mean KL {float(kl.mean()):.5f} over {len(kl)} positions, same best id at {float(same.float().mean()):.4f}")
    assert kl.mean() <= MAX_KL
    assert same.float().mean() >= MIN_SAME_BEST


def test_decode_after_pages_were_given_up_has_the_bits_of_one_prefill(models):
    """The long prompt and then known ids one by one, beside a short row, windows starting ever later."""
    _, fast = models
    long, short = CASES[1], CASES[0]
    ids = long["prompt_ids"] + long["greedy_ids"][:-1]
    first = len(long["prompt_ids"])
    whole = Sequence(range(1, 60))
    alone = fast.step(step_input([(whole, ids)], num_groups=2, out_tokens=range(first, first + 6))).logits
    rows = [Sequence(np.arange(59, 14, -1)), Sequence(range(1, 14))]
    fast.step(step_input([(rows[0], ids[:600]), (rows[1], short["prompt_ids"])], num_groups=2, starts=[0, 0]))
    fast.step(step_input([(rows[0], ids[600:first])], num_groups=2, starts=[window_start(600)]))
    for step in range(6):
        starts = [window_start(rows[0].length), 0]
        work = [(rows[0], ids[first + step : first + step + 1]), (rows[1], [short["greedy_ids"][step]])]
        output = fast.step(step_input(work, num_groups=2, starts=starts))
        assert np.array_equal(output.logits[0], alone[step])
