"""What an operator can scrape from a served model: the figures of issue-level promises, from all three processes."""

import asyncio

import pytest

from protos.client.generation_client import AsyncGenerationClient, GenerationClient
from protos.client.messages import Chat, GenerateOptions, TokenIds
from protos.wire.enums import GraphRefusal
from protos.wire.errors import InvalidRequest
from scheduler_svc.core.wait_reasons import WaitReason
from tests.support.served import Served, scrape, served, total

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
SCHEDULER, WORKER = "forwardplane_scheduler_", "forwardplane_worker_"
REQUESTS, TOKENS = 6, 5


async def traffic(server: Served) -> None:
    options = GenerateOptions(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    async with AsyncGenerationClient(server.target) as client:

        async def one(number: int) -> None:
            async for _ in client.stream(TokenIds((40 + number, 50)), options):
                pass

        await asyncio.gather(*(one(number) for number in range(REQUESTS)))
        with pytest.raises(InvalidRequest):
            async for _ in client.stream(Chat.user("x"), GenerateOptions(top_p=0.0)):
                pass


@pytest.fixture(scope="module")
def server():
    with served(numerics="fast") as running:
        yield running


@pytest.fixture(scope="module")
def scraped(server):
    asyncio.run(traffic(server))
    ports = server.options.ports
    return {
        "core": scrape(ports.metrics_port),
        "edge": scrape(ports.edge_metrics_port),
        "worker": scrape(ports.worker_metrics_port),
    }


def test_the_edge_counts_requests_by_outcome_and_times_tokens(scraped):
    edge = scraped["edge"]
    assert total(edge, f"{SCHEDULER}requests_total", code="OK") == REQUESTS
    assert total(edge, f"{SCHEDULER}requests_total", code="INVALID_ARGUMENT") == 1
    assert total(edge, f"{SCHEDULER}time_to_first_token_seconds_count") == REQUESTS
    assert total(edge, f"{SCHEDULER}inter_token_latency_seconds_count") > 0
    assert total(edge, f"{SCHEDULER}request_output_tokens_sum") == REQUESTS * TOKENS


def test_the_core_shows_load_pages_plans_and_tokens(scraped):
    core = scraped["core"]
    assert total(core, f"{SCHEDULER}requests_running") == 0
    assert total(core, f"{SCHEDULER}requests_waiting") == 0
    assert total(core, f"{SCHEDULER}kv_pages") > 0
    assert total(core, f"{SCHEDULER}kv_pages_used") == 0
    assert total(core, f"{SCHEDULER}output_tokens_total") == REQUESTS * TOKENS
    assert total(core, f"{SCHEDULER}prompt_tokens_total") == REQUESTS * 2
    plans = total(core, f"{SCHEDULER}plan_bytes_count")
    assert plans >= TOKENS
    assert total(core, f"{SCHEDULER}plan_rtt_seconds_count") == plans
    assert total(core, f"{SCHEDULER}requests_finished_total", reason="length") == REQUESTS


def test_the_worker_counts_every_forward_once_with_its_reason(server, scraped):
    worker = scraped["worker"]
    forwards = total(worker, f"{WORKER}forwards_total")
    assert forwards == total(worker, f"{WORKER}forward_seconds_count")
    assert forwards == total(worker, f"{WORKER}graph_misses_total", reason="disabled")
    assert sum(sample.value for sample in worker.get(f"{WORKER}graph_replays_total", [])) == 0
    assert total(worker, f"{WORKER}forwards_total", mode="decode") > 0
    assert total(worker, f"{WORKER}batch_rows_sum") >= REQUESTS * (TOKENS - 1)
    assert forwards == total(scraped["core"], f"{SCHEDULER}plan_bytes_count")
    with GenerationClient(server.target) as client:
        (worker_load,) = client.load().workers
    assert {reason for use in worker_load.graphs for reason, _ in use.misses} == {GraphRefusal.DISABLED}
    assert (worker_load.graph_replays, worker_load.padded_tokens) == (0, 0)


async def test_masks_predictions_and_reasons_to_wait_are_shown(server, scraped):
    before = scraped["core"]
    options = GenerateOptions(max_tokens=24, temperature=0.0, regex="[a-z ]{80}")
    async with AsyncGenerationClient(server.target) as client:
        (generation,) = await client.generate(["Once upon a time"], options)
    core = scrape(server.options.ports.metrics_port)

    outputs = generation.usage.output_tokens
    assert outputs > 16
    assert total(before, f"{SCHEDULER}grammar_mask_seconds_count") == 0
    assert total(core, f"{SCHEDULER}grammar_mask_seconds_count") == outputs
    assert total(core, f"{SCHEDULER}grammar_compile_seconds_count") == 1
    assert total(core, f"{SCHEDULER}step_prediction_ratio_count") > 0
    reasons = core[f"{SCHEDULER}requests_waiting_by_reason"]
    assert {sample.labels["reason"] for sample in reasons} == {reason.value for reason in WaitReason}
    assert all(sample.value == 0 for sample in reasons)
