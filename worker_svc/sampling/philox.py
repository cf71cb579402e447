"""Philox4x32-10: the noise of sampling, a pure function of seed, token id, position and sample index.

Knows nothing of batches, ranks or graphs, so a row's noise cannot depend on them. Integer arithmetic is exact; the two
logarithms are taken in float64 and rounded to float32, so that every machine gets the same float32.
"""

import numpy as np

Array = np.ndarray

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_KEY_STEP_0 = np.uint64(0x9E3779B9)
_KEY_STEP_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10

GUMBEL_MAX = np.float32(-np.log(np.float32(-np.log(1.0 - 2.0**-24))))
"""No noise is above this: u <= 1 - 2^-24."""


def noise_words(seeds: Array, *, ids: Array, positions: Array, sample_indices: Array) -> Array:
    """First output word of each element, uint32. Arguments broadcast against each other.

    Args:
        seeds: uint64, key: low word, high word.
        ids: vocabulary ids, counter word 0.
        positions: of the row's last input token, counter word 1.
        sample_indices: counter word 2.
    """
    key_0 = seeds.astype(np.uint64) & _LOW
    key_1 = seeds.astype(np.uint64) >> _HALF
    counter_0 = ids.astype(np.uint64)
    counter_1 = positions.astype(np.uint64)
    counter_2 = sample_indices.astype(np.uint64)
    counter_3: Array | np.uint64 = np.uint64(0)
    for _ in range(_ROUNDS):
        product_0 = counter_0 * _MULTIPLIER_0
        product_1 = counter_2 * _MULTIPLIER_1
        counter_0 = (product_1 >> _HALF) ^ counter_1 ^ key_0
        counter_1 = product_1 & _LOW
        counter_2 = (product_0 >> _HALF) ^ counter_3 ^ key_1
        counter_3 = product_0 & _LOW
        key_0 = (key_0 + _KEY_STEP_0) & _LOW
        key_1 = (key_1 + _KEY_STEP_1) & _LOW
    return counter_0.astype(np.uint32)


def uniforms(words: Array) -> Array:
    """(w >> 9) * 2^-23 + 2^-24, float32: exact, never 0 or 1."""
    return (words >> np.uint32(9)).astype(np.float32) * np.float32(2.0**-23) + np.float32(2.0**-24)


def gumbels(words: Array) -> Array:
    """-ln(-ln u), float32."""
    inner = (-np.log(uniforms(words).astype(np.float64))).astype(np.float32)
    return (-np.log(inner.astype(np.float64))).astype(np.float32)
