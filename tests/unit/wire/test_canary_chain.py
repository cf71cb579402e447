import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from protos.wire.canary_chain import FACTOR, MIX_FACTOR, POSITION_FACTOR, TOKEN_FACTOR, chain_hash, domain_seed
from scheduler_svc.core.canary_chain import CanaryChain

WORD = 2**64
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=60)


def by_definition(before, tokens, first_position):
    for position, token in enumerate(tokens, start=first_position):
        mix = ((token + 1) * TOKEN_FACTOR + (position + 1) * POSITION_FACTOR) % WORD
        mix = (mix ^ (mix >> 32)) * MIX_FACTOR % WORD
        before = (before * FACTOR + mix) % WORD
    return before


@given(st.integers(0, WORD - 1), TOKENS, st.integers(0, 2**20))
def test_a_hash_is_the_chain_token_by_token(before, tokens, first_position):
    found = chain_hash(before, np.array(tokens, np.int32), first_position)
    assert found == by_definition(before, tokens, first_position)


@given(TOKENS, st.data())
def test_a_chain_carried_on_in_any_steps_is_the_whole_one(tokens, data):
    chain = CanaryChain.of(b"domain")
    for length in data.draw(st.lists(st.integers(0, len(tokens)), max_size=6)):
        assert chain.at(tokens, length) == by_definition(domain_seed(b"domain"), tokens[:length], 0)


def test_a_token_that_is_not_known_leaves_the_hash_unknown():
    assert CanaryChain.of(b"").at([1, 2], 3) == 0


def test_tokens_positions_and_domains_all_count():
    tokens = np.array([1, 2, 3], np.int32)
    seed = domain_seed(b"a")
    others = {
        chain_hash(seed, tokens[::-1], 0),
        chain_hash(seed, tokens, 1),
        chain_hash(domain_seed(b"b"), tokens, 0),
        chain_hash(seed, tokens[:2], 0),
    }
    assert len(others | {chain_hash(seed, tokens, 0)}) == 5
