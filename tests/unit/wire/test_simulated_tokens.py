"""The simulated model: what its tokens depend on, and that its sampling follows its distribution."""

import numpy as np
import pytest

from protos.wire.simulated_tokens import (
    MOST_RANKS,
    Draws,
    SimulatedVocabulary,
    TokenDraw,
    drawn_ranks,
    expected_tokens,
    token_tags,
    uniforms,
)

WORDS = SimulatedVocabulary(500, (7,))
NUM_DRAWS = 20_000
PROMPT = (11, 12, 13, 14)


def tokens(prompt=PROMPT, count=12, vocabulary=WORDS, **draw):
    return expected_tokens(prompt, count, vocabulary=vocabulary, draw=TokenDraw(**draw))


def ranks(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    shape = np.ones(NUM_DRAWS)
    draws = Draws(
        temperatures=shape * temperature,
        top_ks=shape * top_k,
        top_ps=shape * top_p,
        min_ps=shape * min_p,
        uniforms=(np.arange(NUM_DRAWS) + 0.5) / NUM_DRAWS,
    )
    return drawn_ranks(draws, num_ids=500)


def shares(**sampling):
    return np.bincount(ranks(**sampling), minlength=8)[:8] / NUM_DRAWS


def test_a_token_depends_on_every_token_before_it_and_on_their_order():
    assert tokens() == tokens()
    assert len({tuple(tokens(prompt)) for prompt in (PROMPT, (12, 11, 13, 14), (11, 12, 13), (11, 12, 13, 15))}) == 4


def test_what_was_generated_conditions_what_follows_like_a_prompt():
    whole = tokens(count=12)
    assert tokens((*PROMPT, *whole[:5]), count=7) == whole[5:]


def test_greedy_ignores_the_seed_and_sampling_does_not():
    assert tokens(seed=1) == tokens(seed=2)
    assert tokens(temperature=1.0, seed=1) == tokens(temperature=1.0, seed=1)
    outcomes = [tokens(temperature=1.0, seed=seed, sample_index=index) for seed in (1, 2) for index in (0, 1)]
    assert len({tuple(outcome) for outcome in outcomes}) == 4


def test_top_k_of_one_is_greedy():
    assert tokens(temperature=1.0, seed=9, top_k=1) == tokens()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, [1 / 2, 1 / 4, 1 / 8, 1 / 16]),
        ({"top_k": 2}, [2 / 3, 1 / 3]),
        ({"top_p": 0.75}, [2 / 3, 1 / 3]),
        ({"top_p": 0.76}, [4 / 7, 2 / 7, 1 / 7]),
        ({"min_p": 0.25}, [4 / 7, 2 / 7, 1 / 7]),
        ({"top_k": 3, "top_p": 4 / 7}, [1.0]),
        ({"temperature": 2.0, "top_k": 2}, [1 / (1 + 2**-0.5), 1 / (1 + 2**0.5)]),
        ({"temperature": 0.0}, [1.0]),
    ],
)
def test_draws_follow_the_filtered_distribution(sampling, expected):
    found = shares(**sampling)
    np.testing.assert_allclose(found[: len(expected)], expected, atol=2e-3)
    if sampling:
        assert found[len(expected) :].sum() == 0


def test_the_logits_of_a_word_order_the_vocabulary_as_its_ranks_do():
    vocabulary = SimulatedVocabulary(500, (7,), eos_ratio=0.5)
    for word in range(20):
        logits = vocabulary.logits(word)
        order = np.argsort(-logits, kind="stable")
        every = np.arange(MOST_RANKS)
        assert order[:MOST_RANKS].tolist() == vocabulary.ids_at(np.full(MOST_RANKS, word, np.uint64), every).tolist()
        np.testing.assert_allclose(logits[order[:3]], np.log([1 / 2, 1 / 4, 1 / 8]), rtol=1e-6)


def test_the_end_comes_as_often_as_asked_for_and_never_otherwise():
    prompts = [(seed, seed + 1) for seed in range(200)]
    assert all(7 not in tokens(prompt, count=20) for prompt in prompts[:20])
    ending = SimulatedVocabulary(500, (7,), eos_ratio=0.1)
    outputs = [tokens(prompt, count=1, vocabulary=ending) for prompt in prompts]
    assert 8 <= sum(output == [7] for output in outputs) <= 40
    last = tokens((1, 2), count=500, vocabulary=ending)
    assert last[-1] == 7
    assert 7 not in last[:-1]


def test_draws_are_even_and_tags_are_distinct():
    seeds = np.arange(4000, dtype=np.uint64)
    draws = uniforms(seeds, positions=np.zeros(4000, np.int64), sample_indices=np.zeros(4000, np.int64))
    assert (np.histogram(draws, bins=10, range=(0, 1))[0] > 330).all()
    grid = np.arange(100)
    tags = token_tags(np.repeat(grid, 100), np.tile(grid, 100))
    assert len(set(tags.tolist())) == 10_000
