"""Simulated workers as processes: start, no torch, exact tokens through the whole service, several workers, a death."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from protos.client.fetch_model import fetch_model
from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import Chat, GenerateOptions, TokenIds
from protos.client.serve_command import SimulatedOptions
from protos.client.simulated_model import SIMULATED_MODEL
from protos.wire.simulated_tokens import SimulatedVocabulary, TokenDraw, expected_tokens
from tests.support.plans import extend, make_identity, make_plan
from tests.support.served import served
from tests.support.worker_client import WorkerClient

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(120)
START_LIMIT_S = 1.0


@pytest.fixture(scope="module")
def model_cache(tmp_path_factory) -> Path:
    cache = tmp_path_factory.mktemp("models")
    fetch_model(SIMULATED_MODEL, cache=cache)
    return cache


@contextlib.asynccontextmanager
async def worker_process(model_cache: Path):
    flags = ("--device", "simulated", "--model", SIMULATED_MODEL, "--model-cache", str(model_cache))
    ports = ("--port", "0", "--health-port", "0", "--metrics-port", "0", "--log-format", "json")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.simulated_worker_process", *flags, *ports, "--simulated-step-ms", "1"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def logged(process, event):
    while line := await process.stderr.readline():
        entry = json.loads(line)
        if entry["event"] == event:
            return entry
    raise AssertionError(event)


async def test_a_simulated_worker_starts_within_a_second_and_never_loads_torch(model_cache):
    starts_s = []
    for _ in range(3):  # processor time, and the best of three: the machine may be busy
        async with worker_process(model_cache) as process:
            port = (await logged(process, "listening"))["port"]
            await logged(process, "worker loaded")
            starts_s.append(sum(psutil.Process(process.pid).cpu_times()[:2]))
            client = WorkerClient(port)
            info = await client.attach()
            stream, expected_seq = await client.open(incarnation=info.incarnation)
            identity = make_identity(seq=expected_seq, incarnation=info.incarnation)
            result = await stream.run(make_plan([extend(0, 5, ids=[1, 2, 3, 4, 5])], info=info, identity=identity))
            await client.close()
            process.send_signal(signal.SIGTERM)
            output, _ = await process.communicate()
        vocabulary = SimulatedVocabulary(info.logits_width, (info.logits_width - 1,))
        assert result.rows.token_ids.tolist() == expected_tokens([1, 2, 3, 4, 5], 1, vocabulary=vocabulary)
        assert 1_000_000 <= result.timings.forward_ns < 100_000_000
        assert json.loads(output) == {"code": 0, "torch": False, "kernels": False}
        if starts_s[-1] < START_LIMIT_S:
            return
    raise AssertionError(f"starts took {starts_s} s")


def simulated_server(model_cache, *, workers):
    simulated = SimulatedOptions(simulated_step_ms=2.0)
    return served(device="simulated", workers=workers, model_cache=model_cache, simulated=simulated, numerics="fast")


@pytest.fixture(scope="module")
def server(model_cache):
    with simulated_server(model_cache, workers=3) as running:
        yield running


async def ask(client, prompt, **options):
    choices = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.0, **options}
    ids = []
    async for chunk in client.stream(TokenIds(tuple(prompt)), GenerateOptions(**choices)):
        assert chunk.first_pos == len(ids)
        ids.extend(chunk.token_ids)
    return ids


def prompts(count, *, length=70):
    return [[(37 * number + k * k) % 8000 for k in range(length + number % 13)] for number in range(count)]


def model_tokens(prompt, count=60, **draw):
    return expected_tokens(prompt, count, vocabulary=SimulatedVocabulary(8192, (8191,)), draw=TokenDraw(**draw))


async def test_every_stream_gets_the_tokens_of_the_model_and_load_spreads_over_the_workers(server):
    asked = prompts(60)
    async with AsyncGenerationClient(server.target) as client:
        running = [
            asyncio.create_task(ask(client, prompt, temperature=0.8 * (number % 2), seed=number, top_k=40))
            for number, prompt in enumerate(asked)
        ]
        most = [0, 0, 0]
        while not all(task.done() for task in running):
            load = await client.load()
            most = [max(pair) for pair in zip(most, (worker.requests_running for worker in load.workers), strict=True)]
            await asyncio.sleep(0.01)
        found = [task.result() for task in running]
    draws = [{"temperature": 0.8 * (number % 2), "seed": number, "top_k": 40} for number in range(60)]
    assert found == [model_tokens(prompt, **draw) for prompt, draw in zip(asked, draws, strict=True)]
    assert min(most) >= 10, most


async def test_requests_with_a_cached_prefix_go_where_it_is_cached(server):
    prompt = [5] * 160
    async with AsyncGenerationClient(server.target) as client:
        await ask(client, prompt, max_tokens=4)
        before = {worker.name: worker.plans for worker in (await client.load()).workers}
        for number in range(4):
            await ask(client, [*prompt, number], max_tokens=4)
        after = {worker.name: worker.plans for worker in (await client.load()).workers}
    assert sum(after[name] > before[name] for name in after) == 1


async def test_chat_text_choices_and_text_prompts_work_with_the_built_in_tokenizer(server):
    async with AsyncGenerationClient(server.target) as client:
        (answer,) = await client.generate([Chat.user("hello")], GenerateOptions(max_tokens=9, choice=("bab", "red")))
        assert answer.text in ("bab", "red")
        (plain,) = await client.generate([" baba babe"], GenerateOptions(max_tokens=8, ignore_eos=True))
        assert (plain.usage.prompt_tokens, plain.usage.output_tokens) == (2, 8)
        assert re.search("[a-z]", plain.text)


async def test_streams_of_a_dead_worker_go_on_elsewhere_with_the_same_tokens(model_cache):
    asked = prompts(30, length=40)
    with simulated_server(model_cache, workers=2) as server:
        async with AsyncGenerationClient(server.target) as client:
            running = [asyncio.create_task(ask(client, prompt, max_tokens=300)) for prompt in asked]
            while sum(worker.requests_running > 0 for worker in (await client.load()).workers) < 2:
                await asyncio.sleep(0.01)
            killed = server.group.pids()[0]
            os.kill(killed, signal.SIGKILL)
            found = await asyncio.gather(*running)
            server.group.supervise()
        assert server.group.pids()[0] != killed
    assert found == [model_tokens(prompt, 300) for prompt in asked]
