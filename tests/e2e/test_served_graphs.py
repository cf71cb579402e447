"""A served model on captured graphs: streams run while they are captured, every forward counts once, padding adds up.

Asserted from scraped metrics of real traffic.
"""

import asyncio
import io
import time
from typing import NamedTuple

import pytest
from prometheus_client.samples import Sample
from rich.console import Console

from protos.client.bucket_sources import Observed, add_metrics
from protos.client.buckets_command import AdviceOptions, buckets_advise
from protos.client.generation_client import AsyncGenerationClient, GenerationClient
from protos.client.load_messages import Load
from protos.client.messages import GenerateOptions, TokenIds
from protos.client.serve_execution import ServeExecution
from protos.wire.enums import GraphPhase
from tests.e2e.test_served_metrics import WORKER, scrape, total
from tests.support.served import Served, served

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
DECODE, PREFILL = (1, 4, 8), (16, 32)
BURSTS = (1, 3, 5, 8, 10)
TOKENS = 6


async def burst(server: Served, count: int) -> list[list[int]]:
    options = GenerateOptions(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    async with AsyncGenerationClient(server.target) as client:

        async def one(number: int) -> list[int]:
            prompt = TokenIds(tuple(40 + 7 * number + index for index in range(4 + number)))
            return [token async for chunk in client.stream(prompt, options) for token in chunk.token_ids]

        return await asyncio.gather(*(one(number) for number in range(count)))


def captured(server: Served) -> float:
    samples = scrape(server.options.ports.worker_metrics_port)
    return sum(sample.value for sample in samples.get(f"{WORKER}captured_graphs", []))


class Run(NamedTuple):
    early: list[list[int]]
    late: list[list[list[int]]]
    load: Load
    worker: dict[str, list[Sample]]
    url: str


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Answers while graphs are captured, answers of every burst afterwards, and what the worker's metrics say then."""
    flags = {
        "--decode-buckets": ",".join(map(str, DECODE)),
        "--prefill-buckets": ",".join(map(str, PREFILL)),
        "--graph-memory-file": str(tmp_path_factory.mktemp("graphs") / "graphs.json"),
    }
    worker_flags = tuple(part for pair in flags.items() for part in pair)
    with served(execution=ServeExecution(graph="all"), worker_flags=worker_flags) as server:
        early = asyncio.run(burst(server, BURSTS[-1]))
        deadline = time.monotonic() + 120
        while captured(server) < len(DECODE + PREFILL):
            assert time.monotonic() < deadline, "the captures do not end"
            time.sleep(0.2)
        time.sleep(1.0)  # the next report tells the scheduler
        late = [asyncio.run(burst(server, count)) for count in BURSTS]
        with GenerationClient(server.target) as client:
            load = client.load()
        url = f"http://127.0.0.1:{server.options.ports.worker_metrics_port}/metrics"
        yield Run(early, late, load, scrape(server.options.ports.worker_metrics_port), url)


def test_a_prompt_gets_the_same_tokens_while_graphs_are_captured_and_on_them_at_any_batch_size(run):
    early, late, *_ = run
    for answers in late:
        assert answers == early[: len(answers)]
    assert all(len(tokens) == TOKENS for tokens in early)


def test_replays_and_misses_add_up_to_the_forwards(run):
    worker = run.worker
    replays = total(worker, f"{WORKER}graph_replays_total")
    misses = total(worker, f"{WORKER}graph_misses_total")
    assert replays > 0 < misses
    assert replays + misses == total(worker, f"{WORKER}forwards_total")
    assert total(worker, f"{WORKER}graph_misses_total", reason="disabled") == 0
    assert total(worker, f"{WORKER}graph_replays_total", phase="prefill") > 0


def test_padding_is_the_bucket_less_what_was_real(run):
    worker = run.worker
    found = {
        (sample.labels["phase"], sample.labels["bucket"]): sample.value
        for sample in worker[f"{WORKER}graph_replays_total"]
    }
    assert {bucket for phase, bucket in found if phase == "decode"} == {str(size) for size in DECODE}
    for (phase, bucket), replays in found.items():
        real = total(worker, f"{WORKER}graph_real_tokens_total", phase=phase, bucket=bucket)
        padded = total(worker, f"{WORKER}graph_padded_tokens_total", phase=phase, bucket=bucket)
        assert real + padded == int(bucket) * replays
        assert real > 0


def test_memory_and_time_of_the_graphs_are_exported_by_phase(run):
    worker = run.worker
    for phase in ("decode", "prefill"):
        assert total(worker, f"{WORKER}graph_memory_bytes", phase=phase) > 0
        assert total(worker, f"{WORKER}capture_seconds_total", phase=phase) > 0
    assert total(worker, f"{WORKER}memory_bytes", kind="graphs") == total(worker, f"{WORKER}graph_memory_bytes")
    for kind in ("weights", "kv", "free", "resident"):
        assert total(worker, f"{WORKER}memory_bytes", kind=kind) > 0


def test_the_scheduler_tells_the_same_counts_to_its_callers(run):
    (worker,) = run.load.workers
    assert {use.phase for use in worker.graphs} == set(GraphPhase)
    for use in worker.graphs:
        phase = use.phase.name.lower()
        assert use.replays == total(run.worker, f"{WORKER}graph_replays_total", phase=phase)
        assert use.live == use.planned == total(run.worker, f"{WORKER}captured_graphs", phase=phase)
        assert use.graph_bytes == total(run.worker, f"{WORKER}graph_memory_bytes", phase=phase)
        assert use.capture_ms == int(1000 * total(run.worker, f"{WORKER}capture_seconds_total", phase=phase))
        assert use.real_tokens == total(run.worker, f"{WORKER}graph_real_tokens_total", phase=phase)
        assert use.padded_tokens == total(run.worker, f"{WORKER}graph_padded_tokens_total", phase=phase)
        for reason, count in use.misses:
            labels = {"phase": phase, "reason": reason.name.lower()}
            assert count == total(run.worker, f"{WORKER}graph_misses_total", **labels)
    assert worker.graph_replays + worker.graph_misses == total(run.worker, f"{WORKER}forwards_total")


def test_advice_reads_the_served_metrics(run):
    sizes = run.worker[f"{WORKER}forward_tokens_count"]
    assert sum(sample.value for sample in sizes) == total(run.worker, f"{WORKER}forwards_total")
    observed = Observed()
    add_metrics(observed, run.url)
    assert observed.sizes() == {GraphPhase.DECODE: DECODE, GraphPhase.PREFILL: PREFILL}
    console = Console(width=200, file=io.StringIO())
    assert buckets_advise(AdviceOptions(from_metrics=(run.url,), max_graphs=4), console) == 0
    assert "--decode-buckets " in console.file.getvalue()
