"""The chain hash of a request's tokens, as far as plans needed it.

Carried on token by token, so that a plan costs what is new in it. Guards: only tokens that are known count; a prefix
that ends in one that is not has hash 0, which is not compared.
"""

from array import array
from dataclasses import dataclass

import numpy as np

from protos.wire.canary_chain import UNKNOWN, chain_hash, domain_seed


@dataclass(slots=True)
class CanaryChain:
    """The chain of one request's tokens. Tokens are only ever appended, so that what was hashed stays true."""

    seed: int
    length: int = 0
    """How many tokens `value` covers."""
    value: int = 0

    @classmethod
    def of(cls, isolation_domain: bytes) -> "CanaryChain":
        """The chain of no tokens."""
        seed = domain_seed(isolation_domain)
        return cls(seed=seed, value=seed)

    def at(self, tokens: "array[int]", length: int) -> int:
        """The hash of the first `length` tokens; `UNKNOWN` if there are not so many yet."""
        if length > len(tokens):
            return UNKNOWN
        if length < self.length:
            self.length, self.value = 0, self.seed
        if length > self.length:
            new = np.array(tokens[self.length : length], np.int32)
            self.value = chain_hash(self.value, new, self.length)
            self.length = length
        return self.value
