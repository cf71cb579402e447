from dataclasses import replace

import numpy as np
import pytest
import torch

from protos.wire.plan import Mask
from tests.support import oracle
from tests.support.plans import f32, u32
from worker_svc.batch.logit_rules import LogitRules, RowBias, RowPenalties
from worker_svc.batch.row_groups import SamplingGroup
from worker_svc.sampling.ruled_row import ruled_row
from worker_svc.sampling.sampler import sample

WIDTH = 83


def penalties(prompt, output, *, repetition=1.0, frequency=0.0, presence=0.0):
    ids, counts = np.unique(np.array(output, np.uint32), return_counts=True)
    return RowPenalties(
        repetition=np.float32(repetition),
        frequency=np.float32(frequency),
        presence=np.float32(presence),
        prompt_ids=np.unique(np.array(prompt, np.uint32)),
        output_ids=ids,
        output_counts=counts.astype(np.uint32),
    )


def row_of(seed):
    return (np.random.default_rng(seed).normal(size=WIDTH) * 3).astype(np.float32)


def masks_of(allowed):
    """The same set in every form."""
    flags = np.zeros(WIDTH, np.uint8)
    flags[allowed] = 1
    return [
        Mask(allowed_bits=np.packbits(flags, bitorder="little")),
        Mask(allowed_ids=u32(*allowed)),
        Mask(denied_ids=u32(*np.flatnonzero(flags == 0).tolist())),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_penalties_bias_and_masks_equal_the_oracle(seed):
    draw = np.random.default_rng(seed)
    row = row_of(seed)
    prompt, output = draw.integers(0, WIDTH, 12).tolist(), draw.integers(0, 9, 12).tolist()
    strengths = {
        "repetition": float(draw.choice([1.0, 1.3, 0.5, 10.0])),
        "frequency": float(draw.choice([0.0, 0.7, -2.0])),
        "presence": float(draw.choice([0.0, 1.5, -0.25])),
    }
    bias = {int(i): float(value) for i, value in zip(draw.permutation(WIDTH)[:5], draw.normal(size=5) * 9, strict=True)}
    allowed = sorted(draw.permutation(WIDTH)[: draw.integers(1, WIDTH)].tolist())
    expected = oracle.ruled_logits(row, prompt=prompt, output=output, bias=bias, allowed=allowed, **strengths)
    for mask in masks_of(allowed):
        rules = LogitRules(
            penalties=penalties(prompt, output, **strengths),
            bias=RowBias(ids=u32(*bias), values=f32(*bias.values())),
            mask=mask,
        )
        before = row.copy()
        assert ruled_row(row, rules).tobytes() == expected.tobytes()
        assert np.array_equal(row, before)


def test_referenced_tokens_count_like_those_that_were_sent():
    row = row_of(1)
    strengths = {"repetition": 1.5, "frequency": 0.3, "presence": 0.9}
    known = penalties([3], [5, 5, 6], **strengths)
    sent = LogitRules(penalties=replace(known, referenced_ids=(6, 70)))
    whole = LogitRules(penalties=penalties([3], [5, 5, 6, 6, 70], **strengths))
    assert np.array_equal(ruled_row(row, sent), ruled_row(row, whole))


def group_of(count, temperature=0.0, rules=None):
    def column(value, dtype):
        return np.full(count, value, dtype)

    return SamplingGroup(
        rows=np.arange(count),
        positions=np.arange(count) + 3,
        temperatures=column(temperature, np.float32),
        top_ks=column(20, np.uint32),
        top_ps=column(0.95, np.float32),
        min_ps=column(0.01, np.float32),
        seeds=column(77, np.uint64),
        sample_indices=column(0, np.uint32),
        rules=rules or {},
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rules_come_before_the_draw_and_touch_only_their_row(temperature):
    logits = torch.from_numpy(np.array([row_of(seed) for seed in range(40)]))
    rules = {
        k: LogitRules(penalties=penalties([k], [k + 1, k + 1], frequency=1.0, repetition=2.0), mask=masks_of([k, 9])[0])
        for k in range(0, 40, 3)
    }
    plain = sample(logits, group_of(40, temperature)).token_ids
    before = logits.clone()
    sampled = sample(logits, group_of(40, temperature, rules))
    assert torch.equal(logits, before)
    assert sampled.has_candidate.all()
    for k in range(40):
        if k not in rules:
            assert sampled.token_ids[k] == plain[k]
            continue
        row = oracle.ruled_logits(
            logits[k].numpy(), prompt=[k], output=[k + 1, k + 1], frequency=1.0, repetition=2.0, allowed={k, 9}
        )
        options = {"temperature": temperature, "seed": 77, "position": k + 3, "top_k": 20, "top_p": 0.95, "min_p": 0.01}
        assert sampled.token_ids[k] == oracle.sampled_id(row, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_whose_rules_leave_nothing_finite_has_no_candidate(temperature):
    logits = torch.from_numpy(np.array([row_of(seed) for seed in range(3)]))
    logits[1, 4] = -np.inf
    logits[2, 7] = np.nan
    rules = {k: LogitRules(mask=Mask(allowed_ids=u32(4))) for k in (1, 2)}
    sampled = sample(logits, group_of(3, temperature, rules))
    assert sampled.finite.tolist() == [True, True, False]
    assert sampled.has_candidate.tolist() == [True, False, False]
    assert sampled.token_ids[1:].tolist() == [0, 0]
    assert sampled.token_ids[0] == sample(logits[:1], group_of(1, temperature)).token_ids[0]
