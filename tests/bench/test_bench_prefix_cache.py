"""Time to the first token behind a shared system prompt of 900 tokens: found in the cache against computed.

python -m pytest -m bench -s tests/bench/test_bench_prefix_cache.py
"""

import statistics
import time

import pytest

from protos.client.generation_client import GenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from tests.support.served import served_for_figures

pytestmark = [pytest.mark.bench, pytest.mark.model, pytest.mark.timeout(900)]
SYSTEM_TOKENS, QUESTION_TOKENS, ROUNDS = 900, 20, 5
MOST = 0.15


def first_token_s(client: GenerationClient, ids: list[int]) -> float:
    began = time.perf_counter()
    for _ in client.stream(TokenIds(tuple(ids)), GenerateOptions(max_tokens=1, temperature=0.0)):
        break
    return time.perf_counter() - began


@pytest.mark.parametrize("numerics", ["fast", "reproducible"])
def test_first_token_behind_a_shared_system_prompt(numerics: str) -> None:
    system = [100 + (37 * position) % 4000 for position in range(SYSTEM_TOKENS)]
    misses, hits = [], []
    with served_for_figures(numerics=numerics) as server, GenerationClient(server.target) as client:
        for round_ in range(ROUNDS):
            client.flush_cache()
            questions = [
                [200 + 50 * round_ + 7 * which + index for index in range(QUESTION_TOKENS)] for which in (0, 1)
            ]
            misses.append(first_token_s(client, system + questions[0]))
            hits.append(first_token_s(client, system + questions[1]))
    miss, hit = statistics.median(misses), statistics.median(hits)
    print(f"\n{numerics}: miss {miss * 1e3:.0f} ms, hit {hit * 1e3:.0f} ms, ratio {hit / miss:.3f}")
    assert hit <= MOST * miss
