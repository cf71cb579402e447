"""Output throughput at 16 concurrent requests over gRPC beside transformers' batched generate, in one run.

32-token prompts, 64 new tokens, end-of-sequence ignored, float32, prefill included on both sides; three interleaved
rounds with new prompts each (no prefix is cached), medians and their ratio. Both sides use both cores; the gRPC client
shares them with the services.
"""

import asyncio
import json
import statistics
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from protos.client.serve_command import ServeOptions, resolve_model
from tests.bench.peers import PEERS, ROOT, TRANSFORMERS, LinePeer, environment
from tests.support.served import served_for_figures

pytestmark = [pytest.mark.bench, pytest.mark.model, pytest.mark.timeout(3600)]
CONCURRENT, PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 16, 32, 64, 3


async def ours(target: str, prompts: list[list[int]]) -> float:
    options = GenerateOptions(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    async with AsyncGenerationClient(target) as client:

        async def one(prompt: list[int]) -> int:
            return sum([len(chunk.token_ids) async for chunk in client.stream(TokenIds(tuple(prompt)), options)])

        begin = time.monotonic()
        counts = await asyncio.gather(*(one(prompt) for prompt in prompts))
        seconds = time.monotonic() - begin
    assert counts == [NEW_TOKENS] * len(prompts)
    return CONCURRENT * NEW_TOKENS / seconds


def test_output_throughput_at_sixteen_beside_transformers():
    rng = np.random.default_rng(7)
    rounds = rng.integers(100, 40000, (ROUNDS + 1, CONCURRENT, PROMPT_TOKENS)).tolist()
    folder = resolve_model(ServeOptions(), Console(quiet=True))
    python = environment("transformers", TRANSFORMERS)
    rates: dict[str, list[float]] = {"forwardplane": [], "transformers": []}
    peer = LinePeer(python, Path(__file__).parent / "transformers_peer.py", str(folder.weights), "2")
    try:
        with served_for_figures(numerics="fast") as server:
            asyncio.run(ours(server.target, rounds[0]))
            for prompts in rounds[1:]:
                rates["forwardplane"].append(asyncio.run(ours(server.target, prompts)))
                reply = peer.ask({"prompts": prompts, "new_tokens": NEW_TOKENS})
                rates["transformers"].append(reply["tokens"] / reply["seconds"])
    finally:
        peer.close()
    report(rates)


def report(rates: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(values) for name, values in rates.items()}
    table = Table("engine", "tokens/s, median", "rounds")
    for name, values in rates.items():
        table.add_row(name, f"{medians[name]:.1f}", " ".join(f"{value:.1f}" for value in values))
    console = Console()
    console.print(table)
    ratio = medians["forwardplane"] / medians["transformers"]
    console.print(f"forwardplane / transformers = {ratio:.2f}")
    (ROOT / "build").mkdir(exist_ok=True)
    result = {"rates": rates, "ratio_of_medians": ratio, "peers": str(PEERS.name)}
    (ROOT / "build" / "bench_throughput.json").write_text(json.dumps(result, indent=2))
