"""The tokens of a simulated model as pure functions: what a simulated worker answers, and how a checker knows it.

    chain[p] = chain[p - 1] + tag(token[p], p)  mod 2^64        word = mixed(chain of the last input token)

The word orders the vocabulary; the id of rank k < 64 has probability 2^-(k + 1), all others one that is never drawn.
Temperature, top-k, top-p and min-p act on that distribution, the seed chooses in it. So a token depends on every token
before it, its place and its sampling.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

Array = np.ndarray

LN2 = math.log(2.0)
MOST_RANKS = 64
"""Ids that can be drawn at one position; the others need a mask or a bias."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_END = np.uint64(0x5851F42D4C957F2D)
_FIRST_STRIDE = 7919
_UNIT = 2.0**-53


def mixed(values: Array) -> Array:
    """[n] uint64: each value well scrambled (the last step of splitmix64)."""
    words = values + _GOLDEN
    words ^= words >> _SHIFTS[0]
    words *= _MIX_1
    words ^= words >> _SHIFTS[1]
    words *= _MIX_2
    words ^= words >> _SHIFTS[2]
    scrambled: Array = words
    return scrambled


def token_tags(token_ids: Array, positions: Array) -> Array:
    """[n] uint64: what each token at its position adds to its sequence's chain."""
    return mixed(mixed(positions.astype(np.uint64)) ^ token_ids.astype(np.uint64))


def uniforms(seeds: Array, *, positions: Array, sample_indices: Array) -> Array:
    """[n] float64 in (0, 1): the draw of each row; `positions` are of the last input tokens."""
    places = mixed(positions.astype(np.uint64)) ^ sample_indices.astype(np.uint64)
    words = mixed(mixed(seeds.astype(np.uint64)) ^ mixed(places))
    draws: Array = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * _UNIT
    return draws


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """How rows draw, all [n]."""

    temperatures: Array
    """0 = greedy"""
    top_ks: Array
    """0 = off"""
    top_ps: Array
    """1 = off"""
    min_ps: Array
    """0 = off"""
    uniforms: Array
    """Of `uniforms`; not looked at where greedy."""


def drawn_ranks(draws: Draws, *, num_ids: int) -> Array:
    """[n] int64: rank of the drawn id of each row, 0 = likeliest: top-k, then top-p, then min-p, then the draw."""
    num_ids = min(num_ids, MOST_RANKS)
    is_drawn = draws.temperatures > 0
    if not is_drawn.any():
        return np.zeros(len(is_drawn), np.int64)
    log_ratio = -LN2 / np.where(is_drawn, draws.temperatures, 1.0).astype(np.float64)
    top_ks = draws.top_ks.astype(np.float64)
    kept = np.where(top_ks > 0, np.minimum(top_ks, num_ids), num_ids)
    mass = -np.expm1(kept * log_ratio)
    with np.errstate(divide="ignore"):
        nucleus = np.ceil(np.log1p(-np.minimum(draws.top_ps.astype(np.float64) * mass, 1.0)) / log_ratio - 1e-9)
        above = np.floor(np.log(draws.min_ps.astype(np.float64)) / log_ratio + 1e-9) + 1
    kept = np.where(draws.top_ps < 1, np.minimum(kept, nucleus), kept)
    kept = np.maximum(np.where(draws.min_ps > 0, np.minimum(kept, above), kept), 1)
    ranks = np.floor(np.log1p(draws.uniforms * np.expm1(kept * log_ratio)) / log_ratio)
    return np.where(is_drawn, np.clip(ranks, 0, kept - 1), 0).astype(np.int64)


@dataclass(frozen=True)
class SimulatedVocabulary:
    """Ids of a simulated model, and when a sequence ends. Made once from the model's card."""

    logits_width: int
    eos_ids: tuple[int, ...] = ()
    eos_ratio: float = 0.0
    """Share of positions at which the end of the sequence is likeliest; elsewhere it is least likely."""

    @cached_property
    def plain_ids(self) -> Array:
        """int64: every id that ends nothing; all of them if nothing else is left."""
        ids = np.setdiff1d(np.arange(self.logits_width), np.array(self.eos_ids, np.int64))
        return ids if len(ids) else np.arange(self.logits_width)

    @cached_property
    def stride(self) -> int:
        """Distance in `plain_ids` of neighbours in rank; has no divisor in common with their number."""
        num_ids = len(self.plain_ids)
        stride = _FIRST_STRIDE
        while math.gcd(stride, num_ids) != 1:
            stride += 1
        return stride

    def ends(self, words: Array) -> Array:
        """[n] int64, 0 or 1: whether the likeliest id is the first that ends a sequence."""
        if not self.eos_ids or self.eos_ratio <= 0:
            return np.zeros(len(words), np.int64)
        shares = (mixed(words ^ _END) >> np.uint64(11)).astype(np.float64) * _UNIT
        return (shares < self.eos_ratio).astype(np.int64)

    def ids_at(self, words: Array, ranks: Array) -> Array:
        """[n] int64: the id of each rank (below the number of plain ids) in the order of each word."""
        ends = self.ends(words)
        num_ids = len(self.plain_ids)
        places = (words % np.uint64(num_ids)).astype(np.int64) + (ranks - ends) * self.stride
        ids = self.plain_ids[places % num_ids]
        if not ends.any():
            return np.asarray(ids)
        return np.where((ends == 1) & (ranks == 0), self.eos_ids[0], ids)

    def logits(self, word: int) -> Array:
        """[logits_width] float32: natural logarithms of the probabilities of all ids in the order of one word."""
        words = np.array([word], np.uint64)
        end = int(self.ends(words)[0])
        num_ids = len(self.plain_ids)
        first = int(words[0] % np.uint64(num_ids))
        inverse = pow(self.stride, -1, num_ids) if num_ids > 1 else 0
        ranks = np.full(self.logits_width, MOST_RANKS + 1, np.int64)
        ranks[self.plain_ids] = np.minimum((np.arange(num_ids) - first) * inverse % num_ids + end, MOST_RANKS)
        if end:
            ranks[self.eos_ids[0]] = 0
        return ((ranks + 1) * -LN2).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDraw:
    """The sampling of one request, as a checker states it."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0


GREEDY = TokenDraw()


def expected_tokens(
    prompt_ids: Sequence[int],
    num_tokens: int,
    *,
    vocabulary: SimulatedVocabulary,
    draw: TokenDraw = GREEDY,
) -> list[int]:
    """What a simulated worker must answer to a request without penalties, bias or masks.

    Args:
        prompt_ids: the prompt as the server counts it.
        num_tokens: most new tokens; fewer when the end of the sequence comes.
        vocabulary: of the served model.
        draw: the request's sampling, its seed included.
    """
    (output,) = expected_outputs([prompt_ids], [num_tokens], vocabulary=vocabulary, draws=[draw])
    return output


def expected_outputs(
    prompts: Sequence[Sequence[int]],
    nums_tokens: Sequence[int],
    *,
    vocabulary: SimulatedVocabulary,
    draws: Sequence[TokenDraw],
) -> list[list[int]]:
    """As `expected_tokens`, of many requests at once: their number costs little."""
    num_steps = max(nums_tokens, default=0)
    chains, positions = np.zeros(len(prompts), np.uint64), np.zeros(len(prompts), np.int64)
    for index, prompt_ids in enumerate(prompts):
        ids = np.array(prompt_ids, np.int64)
        chains[index] = token_tags(ids, np.arange(len(ids))).sum(dtype=np.uint64)
        positions[index] = len(ids) - 1
    columns = _draw_columns(draws)
    outputs = np.full((len(prompts), num_steps), -1, np.int64)
    running = np.flatnonzero(np.array(nums_tokens, np.int64) > 0)
    ends = np.array(vocabulary.eos_ids, np.int64)
    for step in range(num_steps):
        ranks = drawn_ranks(_draws(columns, running, positions[running]), num_ids=len(vocabulary.plain_ids))
        tokens = vocabulary.ids_at(mixed(chains[running]), ranks)
        outputs[running, step] = tokens
        positions[running] += 1
        chains[running] += token_tags(tokens, positions[running])
        running = running[~np.isin(tokens, ends) & (np.array(nums_tokens)[running] > step + 1)]
    return [output[output >= 0].tolist() for output in outputs]


def _draw_columns(draws: Sequence[TokenDraw]) -> dict[str, Array]:
    return {
        "temperatures": np.array([draw.temperature for draw in draws], np.float32),
        "top_ks": np.array([draw.top_k for draw in draws], np.uint32),
        "top_ps": np.array([draw.top_p for draw in draws], np.float32),
        "min_ps": np.array([draw.min_p for draw in draws], np.float32),
        "seeds": np.array([draw.seed for draw in draws], np.uint64),
        "sample_indices": np.array([draw.sample_index for draw in draws], np.uint32),
    }


def _draws(columns: dict[str, Array], rows: Array, positions: Array) -> Draws:
    chosen = {name: column[rows] for name, column in columns.items()}
    words = uniforms(chosen.pop("seeds"), positions=positions, sample_indices=chosen.pop("sample_indices"))
    return Draws(**chosen, uniforms=words)
