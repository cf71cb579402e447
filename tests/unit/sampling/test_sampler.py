from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support import oracle
from worker_svc.batch.row_groups import SamplingGroup
from worker_svc.sampling.sampler import best_of_rows, sample

WIDTH = 500
NEUTRAL = {
    "positions": 10,
    "temperatures": 1.0,
    "top_ks": 0,
    "top_ps": 1.0,
    "min_ps": 0.0,
    "seeds": 7,
    "sample_indices": 0,
}
TYPES = {
    "positions": np.int64,
    "temperatures": np.float32,
    "top_ks": np.uint32,
    "top_ps": np.float32,
    "min_ps": np.float32,
    "seeds": np.uint64,
    "sample_indices": np.uint32,
}


def group_of(count, **columns):
    values = {
        name: np.array(np.broadcast_to(np.array(columns.get(name, NEUTRAL[name]), dtype), count))
        for name, dtype in TYPES.items()
    }
    return SamplingGroup(rows=np.arange(count), **values)


def random_logits(count, width=WIDTH, seed=0, spread=3.0):
    return torch.from_numpy((np.random.default_rng(seed).normal(size=(count, width)) * spread).astype(np.float32))


def random_group(count, seed=0):
    draw = np.random.default_rng(seed)
    return group_of(
        count,
        positions=draw.integers(0, 4000, count),
        temperatures=draw.choice([0, 0.3, 0.8, 1.0, 2.5, 20], count),
        top_ks=draw.choice([0, 1, 5, 50, WIDTH, 10**6], count),
        top_ps=draw.choice([1.0, 0.95, 0.5, 0.01], count),
        min_ps=draw.choice([0.0, 0.05, 0.5, 1.0], count),
        seeds=draw.integers(0, 2**63, count),
        sample_indices=draw.integers(0, 4, count),
    )


def pick(group, rows):
    columns = {name: getattr(group, name)[rows] for name in TYPES}
    return SamplingGroup(rows=np.arange(len(rows)), **columns)


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample(logits, group_of(2, temperatures=0)).token_ids.tolist() == [1, 0]


def test_every_row_equals_the_one_number_at_a_time_oracle():
    logits, group = random_logits(40), random_group(40)
    tokens = sample(logits, group).token_ids
    for row in range(40):
        expected = oracle.sampled_id(
            logits[row].numpy(),
            temperature=group.temperatures[row],
            seed=int(group.seeds[row]),
            position=int(group.positions[row]),
            sample_index=int(group.sample_indices[row]),
            top_k=int(group.top_ks[row]),
            top_p=float(group.top_ps[row]),
            min_p=float(group.min_ps[row]),
        )
        assert tokens[row] == expected, row


@pytest.mark.parametrize("width", [33, 500, 1001, 4096])
def test_a_row_is_the_same_alone_and_in_any_batch(width):
    """Odd widths put rows at every alignment; mates have other filters, counts and places."""
    logits, group = random_logits(24, width=width, seed=3), random_group(24, seed=5)
    alone = [int(sample(logits[row : row + 1].clone(), pick(group, np.array([row]))).token_ids[0]) for row in range(24)]
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(24)[: 24 - 5 * seed]
        together = sample(logits[torch.from_numpy(order)], pick(group, order)).token_ids
        assert together.tolist() == [alone[row] for row in order]


def test_pruning_changes_nothing_on_a_flat_and_on_a_peaked_row():
    for spread in (0.01, 1.0, 30.0):
        logits = random_logits(8, spread=spread, seed=11)
        group = group_of(8, seeds=np.arange(8))
        expected = [oracle.sampled_id(logits[row].numpy(), temperature=1.0, seed=row, position=10) for row in range(8)]
        assert sample(logits, group).token_ids.tolist() == expected


def test_seed_position_and_sample_index_each_change_the_draw():
    logits = torch.zeros(1, WIDTH)
    base = sample(logits, group_of(1)).token_ids[0]
    for change in ({"seeds": 8}, {"positions": 11}, {"sample_indices": 1}, {"seeds": 7 + 2**32}):
        assert sample(logits, group_of(1, **change)).token_ids[0] != base


def test_draws_follow_the_distribution():
    probabilities = np.array([0.6, 0.3, 0.1])
    logits = torch.from_numpy(np.log(probabilities).astype(np.float32)).repeat(4000, 1)
    tokens = sample(logits, group_of(4000, positions=np.arange(4000))).token_ids
    np.testing.assert_allclose(np.bincount(tokens, minlength=3) / 4000, probabilities, atol=0.03)


def test_a_tiny_temperature_is_greedy_and_not_nan():
    logits = random_logits(3, seed=9)
    result = sample(logits, group_of(3, temperatures=1e-38))
    assert result.token_ids.tolist() == logits.argmax(-1).tolist()


def test_rows_that_are_not_finite_give_no_token_and_spare_their_mates():
    logits = random_logits(4, seed=2)
    expected = sample(logits, group_of(4)).token_ids
    broken = logits.clone()
    broken[1, 77] = torch.nan
    broken[2] = torch.inf
    result = sample(broken, group_of(4))
    assert result.finite.tolist() == [True, False, False, True]
    assert result.token_ids.tolist() == [expected[0], 0, 0, expected[3]]


def test_logits_are_untouched():
    logits, group = random_logits(6), random_group(6)
    before = logits.clone()
    sample(logits, group)
    assert torch.equal(logits, before)


def test_rows_chosen_by_the_runner_need_no_logits():
    logits, group = random_logits(24), random_group(24)
    logits[3, 9], logits[4] = torch.nan, torch.inf
    whole = best_of_rows(logits)
    wants = ~group.is_greedy()
    assert 0 < wants.sum() < 24
    best = replace(whole, places=np.where(wants, np.cumsum(wants) - 1, -1))

    expected = sample(logits, group)
    got = sample(logits[torch.from_numpy(np.flatnonzero(wants))], group, best=best)

    for name in ("token_ids", "finite", "has_candidate"):
        assert np.array_equal(getattr(got, name), getattr(expected, name)), name
