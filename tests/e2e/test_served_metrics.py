"""What an operator can scrape from a served model: the figures of issue-level promises, from all three processes."""

import asyncio
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import Chat, GenerateOptions, TokenIds
from protos.wire.errors import InvalidRequest
from tests.support.served import Served, served

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
SCHEDULER, WORKER = "forwardplane_scheduler_", "forwardplane_worker_"
REQUESTS, TOKENS = 6, 5


def scrape(port: int) -> dict[str, list]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    found: dict[str, list] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def total(samples: dict[str, list], name: str, **labels: str) -> float:
    assert name in samples, f"{name} is not exported"
    return sum(
        sample.value
        for sample in samples[name]
        if all(sample.labels.get(label) == value for label, value in labels.items())
    )


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
def scraped():
    with served(numerics="fast") as server:
        asyncio.run(traffic(server))
        ports = server.options.ports
        yield {
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


def test_the_worker_counts_every_forward_once_with_its_reason(scraped):
    worker = scraped["worker"]
    forwards = total(worker, f"{WORKER}forwards_total")
    assert forwards == total(worker, f"{WORKER}forward_seconds_count")
    assert forwards == total(worker, f"{WORKER}graph_misses_total", reason="disabled")
    assert sum(sample.value for sample in worker.get(f"{WORKER}graph_replays_total", [])) == 0
    assert total(worker, f"{WORKER}forwards_total", mode="decode") > 0
    assert total(worker, f"{WORKER}batch_rows_sum") >= REQUESTS * (TOKENS - 1)
    assert forwards == total(scraped["core"], f"{SCHEDULER}plan_bytes_count")
