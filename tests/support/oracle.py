"""Slow, obvious references: one number at a time, full sorts, Python integers."""

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

MASK_32 = 0xFFFFFFFF


def philox_word(seed: int, *, vocabulary_id: int, position: int, sample_index: int) -> int:
    """First output word of Philox4x32-10, as the paper writes it."""
    counter = [vocabulary_id, position, sample_index, 0]
    key = [seed & MASK_32, seed >> 32]
    for _ in range(10):
        product_0, product_1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (product_1 >> 32) ^ counter[1] ^ key[0],
            product_1 & MASK_32,
            (product_0 >> 32) ^ counter[3] ^ key[1],
            product_0 & MASK_32,
        ]
        key = [(key[0] + 0x9E3779B9) & MASK_32, (key[1] + 0xBB67AE85) & MASK_32]
    return counter[0]


def gumbel(word: int) -> np.float32:
    uniform = (word >> 9) * 2.0**-23 + 2.0**-24
    inner = np.float32(-math.log(uniform))
    return np.float32(-math.log(float(inner)))


def sampled_id(
    logits: Sequence[float] | np.ndarray,
    *,
    temperature: float,
    seed: int,
    position: int,
    sample_index: int = 0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> int:
    """The id the sampler must draw from one row: every id ranked, every survivor scored."""
    row = np.asarray(logits, np.float32)
    if temperature == 0:
        return min(range(len(row)), key=lambda i: (-row[i], i))
    scaled = (row - row.max()) / np.float32(temperature)
    ids = sorted(range(len(row)), key=lambda i: (-scaled[i], i))
    if top_k:
        ids = ids[:top_k]
    weights = {i: math.exp(scaled[i]) for i in ids}
    total, mass, nucleus = sum(weights.values()), 0.0, []
    for i in ids:
        if top_p < 1 and mass >= top_p * total:
            break
        nucleus.append(i)
        mass += weights[i]
    survivors = [i for i in nucleus if weights[i] >= min_p]

    def score(i: int) -> tuple[np.float32, int]:
        word = philox_word(seed, vocabulary_id=i, position=position, sample_index=sample_index)
        return np.float32(scaled[i] + gumbel(word)), -i

    return max(survivors, key=score)


def ruled_logits(
    logits: Sequence[float] | np.ndarray,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
    bias: Mapping[int, float] | None = None,
    allowed: Collection[int] | None = None,
    banned: Collection[int] = (),
) -> np.ndarray:
    """A row after penalties, bias and masks: one id at a time, one float32 operation at a time."""
    row = [np.float32(value) for value in logits]
    for i in sorted({*prompt, *output}):
        if repetition != 1:
            row[i] = row[i] / np.float32(repetition) if row[i] > 0 else row[i] * np.float32(repetition)
    for i in sorted(set(output)):
        row[i] = row[i] - np.float32(frequency) * np.float32(list(output).count(i))
        row[i] = row[i] - np.float32(presence)
    for i, value in (bias or {}).items():
        row[i] = row[i] + np.float32(value)
    return np.array(
        [-np.inf if i in banned or (allowed is not None and i not in allowed) else row[i] for i in range(len(row))],
        np.float32,
    )


def log_softmax(row: np.ndarray) -> np.ndarray:
    values = np.asarray(row, np.float64)
    return values - (values.max() + math.log(np.exp(values - values.max()).sum()))
