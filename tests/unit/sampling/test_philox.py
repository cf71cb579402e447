import json
from pathlib import Path

import numpy as np
import pytest

from tests.support import oracle
from worker_svc.sampling.philox import GUMBEL_MAX, gumbels, noise_words, uniforms

VECTORS = json.loads((Path(__file__).parents[2] / "golden" / "execution_vectors.json").read_text())["noise"]


def column(name, dtype):
    return np.array([case[name] for case in VECTORS], dtype)


def vector_words():
    return noise_words(
        column("seed", np.uint64),
        ids=column("vocabulary_id", np.int64),
        positions=column("position", np.int32),
        sample_indices=column("sample_index", np.uint32),
    )


def test_words_equal_the_vectors():
    assert len(VECTORS) >= 20
    np.testing.assert_array_equal(vector_words(), column("word", np.uint32))


def test_uniforms_equal_the_vectors_exactly():
    np.testing.assert_array_equal(uniforms(vector_words()).astype(np.float64), column("u", np.float64))


def test_words_equal_the_integer_oracle():
    draw = np.random.default_rng(5)
    for _ in range(50):
        seed, position = int(draw.integers(2**64, dtype=np.uint64)), int(draw.integers(2**31))
        vocabulary_id, index = int(draw.integers(2**18)), int(draw.integers(16))
        word = noise_words(
            np.array([seed], np.uint64),
            ids=np.array([vocabulary_id]),
            positions=np.array([position]),
            sample_indices=np.array([index]),
        )
        assert int(word[0]) == oracle.philox_word(
            seed, vocabulary_id=vocabulary_id, position=position, sample_index=index
        )


def test_uniform_is_never_0_or_1_and_noise_is_bounded():
    extremes = np.array([0, 511, 2**32 - 512, 2**32 - 1], np.uint32)
    values = uniforms(extremes)
    assert values.dtype == np.float32
    assert values.min() == np.float32(2.0**-24)
    assert values.max() == np.float32(1 - 2.0**-24)
    assert np.isfinite(gumbels(extremes)).all()
    assert gumbels(extremes).max() <= GUMBEL_MAX


def test_words_do_not_depend_on_the_number_of_elements():
    ids = np.arange(10000)
    seeds = np.full(10000, 2**64 - 1, np.uint64)

    def words(count):
        zeros = np.zeros(count, np.uint32)
        return noise_words(seeds[:count], ids=ids[:count], positions=zeros, sample_indices=zeros)

    np.testing.assert_array_equal(words(10000)[:5000], words(5000))
    np.testing.assert_array_equal(words(10000)[:3], words(3))
    assert len(words(0)) == 0


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 15, 17, 31, 33, 1000])
def test_noise_does_not_depend_on_the_place_in_the_array(length):
    words = np.random.default_rng(length).integers(2**32, size=1024, dtype=np.uint32)
    whole = gumbels(words)
    for begin in (0, 1, 5, 13):
        np.testing.assert_array_equal(gumbels(words[begin : begin + length].copy()), whole[begin : begin + length])


def test_noise_equals_the_scalar_oracle():
    words = np.random.default_rng(2).integers(2**32, size=200, dtype=np.uint32)
    assert [float(value) for value in gumbels(words)] == [float(oracle.gumbel(int(word))) for word in words]
