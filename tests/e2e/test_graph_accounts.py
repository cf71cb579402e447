"""A worker's scraped metrics add up whatever is captured: each forward is a replay, or a miss with its one reason."""

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace

import pytest

from protos.wire.buckets import PHASES, choose_bucket, real_units
from protos.wire.enums import Feature, GraphPhase, GraphRefusal, WorkerState
from protos.wire.plan import GraphChoice
from tests.support.plans import decode, extend, fitting_mode, make_identity, make_plan, whole_forward
from tests.support.running_worker import running_service
from tests.support.served import scrape, total
from tests.support.tiny_llama import tiny_folder
from tests.support.worker_client import WorkerClient
from worker_svc.app import build_executor
from worker_svc.config import ExecutorConfig, GraphConfig, ObservabilityConfig, ServerConfig, WorkerConfig
from worker_svc.rpc.listeners import Listeners
from worker_svc.rpc.service import WorkerService

WORKER = "forwardplane_worker_"
DECODE, PREFILL = (1, 4), (16, 24)
STEPS = (
    [extend(0, 20)],
    [decode(20)],
    [extend(0, 16)],
    [decode(20), decode(9), decode(4)],
    [extend(0, 3)],  # below half of the smallest bucket
    [extend(0, 12), decode(5)],
    [extend(0, 33)],
    [decode(index) for index in range(3, 8)],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@contextlib.asynccontextmanager
async def worker(folder, graphs, *, metrics_port):
    """(info, stream, reports) of a worker service with a real executor in this process."""
    executor = ExecutorConfig(
        numerics="reproducible", kernels="torch", num_pages=64, max_rows=8, max_tokens=64, threads=1
    )
    observability = ObservabilityConfig(metrics_port=metrics_port)
    config = WorkerConfig(
        server=ServerConfig(port=0, health_port=0), executor=executor, graphs=graphs, observability=observability
    )
    service = WorkerService(
        lambda: build_executor(folder, config), Listeners(config.server, observability), config.server
    )
    async with running_service(service):
        client = WorkerClient(service.listeners.port)
        try:
            info = await client.attached()
            stream, _ = await client.open(incarnation=info.incarnation)
            yield info, stream, client.report()
        finally:
            await client.close()


async def until_captured(reports):
    async for report in reports:
        if report.state == WorkerState.SERVING:
            return


def chosen(buckets, rows):
    """What a scheduler that knows these buckets names for a step of these rows, and what the step counts."""
    mode, num_rows, num_tokens = fitting_mode(rows), len(rows), sum(row.extend for row in rows)
    phase = PHASES[mode]
    graph = choose_bucket(buckets, mode=mode, num_rows=num_rows, num_tokens=num_tokens)
    return phase, graph, real_units(phase, num_rows=num_rows, num_tokens=num_tokens)


async def run_steps(info, stream, buckets, *, seq):
    """Every step as a plan of its own; what was named for each."""
    named = []
    for number, rows in enumerate(STEPS):
        phase, graph, units = chosen(buckets, rows)
        identity = make_identity(seq=seq + number, incarnation=info.incarnation)
        if isinstance(graph, GraphChoice):
            identity = replace(identity, required_features=(int(Feature.GRAPHS),))
        plan = make_plan(rows, info=info, forwards=(whole_forward(rows, graph=graph),), identity=identity)
        result = await stream.run(plan)
        assert [outcome.graph for outcome in result.forwards] == [graph]
        named.append((phase, graph, units))
    return named


def assert_accounts(named, samples):
    """What was named is what the metrics say, and nothing else."""
    replays = Counter((phase, graph.bucket) for phase, graph, _ in named if isinstance(graph, GraphChoice))
    misses = Counter((phase, graph) for phase, graph, _ in named if isinstance(graph, GraphRefusal))
    assert replays.total() + misses.total() == total(samples, f"{WORKER}forwards_total") == len(named)
    assert sum(sample.value for sample in samples.get(f"{WORKER}graph_replays_total", [])) == replays.total()
    assert sum(sample.value for sample in samples.get(f"{WORKER}graph_misses_total", [])) == misses.total()
    for (phase, reason), count in misses.items():
        labels = {"phase": phase.name.lower(), "reason": reason.name.lower()}
        assert total(samples, f"{WORKER}graph_misses_total", **labels) == count
    for (phase, bucket), count in replays.items():
        labels = {"phase": phase.name.lower(), "bucket": str(bucket)}
        real = sum(units for _, graph, units in named if graph == GraphChoice(phase=phase, bucket=bucket))
        assert total(samples, f"{WORKER}graph_replays_total", **labels) == count
        assert total(samples, f"{WORKER}graph_real_tokens_total", **labels) == real
        assert total(samples, f"{WORKER}graph_padded_tokens_total", **labels) == count * bucket - real


@pytest.mark.parametrize(
    ("graph", "phases"),
    [
        ("off", set()),
        ("decode", {GraphPhase.DECODE}),
        ("prefill", {GraphPhase.PREFILL}),
        ("all", set(GraphPhase)),
    ],
)
async def test_replays_and_misses_are_the_forwards_and_padding_is_bucket_less_real(
    folder, tmp_path, free_port, graph, phases
):
    graphs = GraphConfig(
        graph=graph, decode_buckets=DECODE, prefill_buckets=PREFILL, graph_memory_file=tmp_path / "graphs.json"
    )
    port = free_port()
    async with worker(folder, graphs, metrics_port=port) as (info, stream, reports):
        assert {entry.phase for entry in info.buckets} == phases
        at_first = tuple(replace(entry, live=()) for entry in info.buckets)
        named = await run_steps(info, stream, at_first, seq=1)
        if phases:
            assert GraphRefusal.NOT_CAPTURED_YET in {graph for _, graph, _ in named}
            await asyncio.wait_for(until_captured(reports), 30)
        live = tuple(replace(entry, live=entry.sizes) for entry in info.buckets)
        named += await run_steps(info, stream, live, seq=1 + len(STEPS))
        assert {graph.phase for _, graph, _ in named if isinstance(graph, GraphChoice)} == phases
        assert_accounts(named, await asyncio.to_thread(scrape, port))
