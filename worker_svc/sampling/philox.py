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
_PIECE = 4096
"""Elements worked on at once: what fits the cache."""

GUMBEL_MAX = np.float32(-np.log(np.float32(-np.log(1.0 - 2.0**-24))))
"""No noise is above this: u <= 1 - 2^-24."""


def noise_words(seeds: Array, *, ids: Array, positions: Array, sample_indices: Array) -> Array:
    """[n] uint32: first output word of each element. All arguments are [n].

    Args:
        seeds: uint64, key: low word, high word.
        ids: vocabulary ids, counter word 0.
        positions: of the row's last input token, counter word 1.
        sample_indices: counter word 2.
    """
    words = np.empty(len(ids), np.uint32)
    for begin in range(0, len(ids), _PIECE):
        piece = slice(begin, begin + _PIECE)
        counter = [part[piece].astype(np.uint64) for part in (ids, positions, sample_indices)]
        words[piece] = _first_word(counter, keys=seeds[piece].astype(np.uint64))
    return words


def uniforms(words: Array) -> Array:
    """(w >> 9) * 2^-23 + 2^-24, float32: exact, never 0 or 1."""
    return (words >> np.uint32(9)).astype(np.float32) * np.float32(2.0**-23) + np.float32(2.0**-24)


def gumbels(words: Array) -> Array:
    """-ln(-ln u), float32."""
    inner = (-np.log(uniforms(words).astype(np.float64))).astype(np.float32)
    return (-np.log(inner.astype(np.float64))).astype(np.float32)


def _first_word(counter: list[Array], *, keys: Array) -> Array:
    """Counter words as uint64 [n] that hold 32 bits; they are used up. Returns word 0 after ten rounds."""
    word_0, word_1, word_2 = counter
    word_3 = np.zeros_like(word_0)
    key_0, key_1 = keys & _LOW, keys >> _HALF
    product_0, product_1 = np.empty_like(word_0), np.empty_like(word_0)
    for _ in range(_ROUNDS):
        np.multiply(word_0, _MULTIPLIER_0, out=product_0)
        np.multiply(word_2, _MULTIPLIER_1, out=product_1)
        np.right_shift(product_1, _HALF, out=word_0)
        word_0 ^= word_1
        word_0 ^= key_0
        np.right_shift(product_0, _HALF, out=word_2)
        word_2 ^= word_3
        word_2 ^= key_1
        np.bitwise_and(product_1, _LOW, out=word_1)
        np.bitwise_and(product_0, _LOW, out=word_3)
        key_0 += _KEY_STEP_0
        key_0 &= _LOW
        key_1 += _KEY_STEP_1
        key_1 &= _LOW
    return word_0
