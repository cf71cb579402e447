"""The known answers of SmolLM2 through whole services whose worker refuses every KV slot that is not a row's own."""

import urllib.request

import pytest

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import Chat, GenerateOptions
from tests.support.golden import assert_free_run, cases
from tests.support.served import served

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
CASES = cases("smollm2_greedy.json")[:2]


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORWARDPLANE_KV_CANARY", "refuse")
        with served() as running:
            yield running


def metric(server, name):
    port = server.options.ports.worker_metrics_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"forwardplane_worker_{name} ")).split()[1])


async def test_known_answers_cold_warm_and_sampled_side_by_side(server):
    """Cached pages, several samples of one prompt and chunks all pass the canary, and it had something to check."""
    async with AsyncGenerationClient(server.target) as client:
        for case in CASES:
            prompt = Chat.user(case["prompt"]) if case["kind"] == "chat" else case["prompt"]
            options = GenerateOptions(max_tokens=len(case["greedy_ids"]), temperature=0.0)
            runs = []
            for _ in range(2):
                chunks = [chunk async for chunk in client.stream(prompt, options)]
                runs.append([token_id for chunk in chunks for token_id in chunk.token_ids])
            assert_free_run(case, runs[0])
            assert runs[1] == runs[0]
        sampled = GenerateOptions(max_tokens=12, temperature=0.8, n=3, ignore_eos=True)
        answers = [chunk async for chunk in client.stream("Once upon a time, " * 12, sampled)]
    assert {chunk.sample_index for chunk in answers} == {0, 1, 2}
    assert metric(server, "canary_hits_total") == 0
