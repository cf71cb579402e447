"""Memory of a worker with a KV pool of 256 MB, and the time from the start of everything to the first token.

The worker holds torch beside its own: a process that only imports torch is measured alone and printed apart. Prints
figures against the goals, asserts none.

    python -m pytest -m bench -s tests/bench/test_bench_worker_memory.py
"""

import asyncio
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from protos.client.serve_execution import WorkerOptions
from tests.support.model import model_folder
from tests.support.served import served_for_figures

pytestmark = [pytest.mark.bench, pytest.mark.model, pytest.mark.timeout(600)]

BYTES_PER_PAGE = 30 * 2 * 3 * 64 * 16 * 2
POOL_MB, MOST_MB, MOST_FIRST_TOKEN_S = 256, 600, 4.0
ROWS, PROMPT_TOKENS, NEW_TOKENS = 64, 100, 60


def torch_alone_mb():
    """Own memory of a process that has imported torch."""
    script = "import torch, sys; torch.zeros(1); print(1, flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        return psutil.Process(process.pid).memory_full_info().uss / 1e6
    finally:
        process.communicate()


async def ask(target, prompts, new_tokens):
    options = GenerateOptions(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    async with AsyncGenerationClient(target) as client:

        async def one(ids):
            return sum([len(chunk.token_ids) async for chunk in client.stream(TokenIds(tuple(ids)), options)])

        return await asyncio.gather(*(one(ids) for ids in prompts))


def test_memory_under_load_and_the_first_token(capsys):
    model_folder()
    prompts = np.random.default_rng(1).integers(100, 40_000, (ROWS, PROMPT_TOKENS)).tolist()
    limits = WorkerOptions(num_pages=POOL_MB * 10**6 // BYTES_PER_PAGE)
    begin = time.monotonic()
    with served_for_figures(numerics="fast", limits=limits) as server:
        asyncio.run(ask(server.target, [[1, 2, 3]], 1))
        first_token_s = time.monotonic() - begin
        counts = asyncio.run(ask(server.target, prompts, NEW_TOKENS))
        workers = [each for each, line in server.command_lines().items() if "worker_svc" in " ".join(line)]
        used_mb = max(each.memory_full_info().uss for each in workers) / 1e6
    assert counts == [NEW_TOKENS] * ROWS
    torch_mb = torch_alone_mb()
    with capsys.disabled():
        print(
            f"\nworker {used_mb:.0f} MB, {used_mb - torch_mb:.0f} without torch's own {torch_mb:.0f}, "
            f"goal {MOST_MB} with a pool of {POOL_MB}; first token after {first_token_s:.1f} s, "
            f"goal {MOST_FIRST_TOKEN_S}"
        )
