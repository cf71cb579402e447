"""The chain hash of a sequence's tokens: what the KV canary keeps of each slot, and what a plan says a row has.

    h(-1) = seed of the isolation domain
    h(p)  = h(p - 1) * FACTOR + mix(token at p, p)        mod 2**64

Pure. Guards: both services compute the same numbers; a hash names the whole sequence up to its position, so that rows
that share a prefix share its hashes.
"""

import hashlib

import numpy as np

Array = np.ndarray

FACTOR = 0x9E3779B97F4A7C15
INVERSE = pow(FACTOR, -1, 2**64)
TOKEN_FACTOR = 0xBF58476D1CE4E5B9
POSITION_FACTOR = 0x94D049BB133111EB
MIX_FACTOR = 0xD6E8FEB86659FD93
MIX_SHIFT = 32
UNKNOWN = 0
"""In a plan: the scheduler does not know the row's hash, so that it is not compared."""
_WRAP = 2**64


def domain_seed(isolation_domain: bytes) -> int:
    """The hash before position 0."""
    return int.from_bytes(hashlib.blake2b(isolation_domain, digest_size=8).digest(), "little")


def powers(base: int, count: int) -> Array:
    """u64 [count]: base ** 1, base ** 2 ..."""
    factors = np.full(count, base, np.uint64)
    return np.multiply.accumulate(factors)


def mixed(tokens: Array, first_position: int) -> Array:
    """u64 [n]: what each token adds, the first one at `first_position`."""
    positions = np.arange(first_position, first_position + len(tokens), dtype=np.uint64)
    mix: Array = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(TOKEN_FACTOR)
    mix += (positions + np.uint64(1)) * np.uint64(POSITION_FACTOR)
    mix ^= mix >> np.uint64(MIX_SHIFT)
    mix *= np.uint64(MIX_FACTOR)
    return mix


def chain_hash(before: int, tokens: Array, first_position: int) -> int:
    """The hash after `tokens`, which follow on the hash `before` from `first_position` on."""
    count = len(tokens)
    if not count:
        return before
    # Newest first: each is multiplied once for every token behind it.
    weights = np.ones(count, np.uint64)
    weights[1:] = powers(FACTOR, count - 1)
    total = int((mixed(tokens, first_position)[::-1] * weights).sum(dtype=np.uint64))
    return (before * pow(FACTOR, count, _WRAP) + total) % _WRAP
