"""Streams over the network beside a peer's server: our gRPC against its HTTP, equal prompts, in turn."""

import asyncio
import time
from contextlib import ExitStack
from statistics import median

import numpy as np

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions
from protos.service.model_files import ModelFolder
from tests.bench.peer_servers import ServerPeer, StreamTimes
from tests.bench.peer_table import Figures, Neighbours
from tests.support.served import served_for_figures

STREAMS = {1: 1.2, 16: 2.5, 64: 2.5}
"""Least ratio of throughput, by concurrent streams."""
NEW_TOKENS, PROMPT_WORDS = 48, 32
WORDS = ("the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with")
Round = tuple[float, list[StreamTimes]]
"""Seconds of all of it, and what each caller saw."""


def end_to_end(folder: ModelFolder, peer: ServerPeer, *, rounds: int) -> list[Figures]:
    """Throughput, time to the first token, gap between arrivals, at each number of streams. Closes the peer."""
    with ExitStack() as stack:
        stack.callback(peer.close)
        asyncio.run(peer.wait_serving())
        server = stack.enter_context(served_for_figures(model=str(folder.path), numerics="fast"))
        found = []
        for streams in STREAMS:
            seen, neighbours = _rounds(peer, server.target, streams=streams, rounds=rounds)
            found += _figures(folder, peer, seen, streams=streams, neighbours=neighbours)
        return found


def _rounds(peer: ServerPeer, target: str, *, streams: int, rounds: int) -> tuple[dict[str, list[Round]], Neighbours]:
    """Ours and the peer's in turn, on prompts that are new each round; one short round warms both up."""
    rng = np.random.default_rng(streams)
    seen: dict[str, list[Round]] = {"ours": [], "theirs": []}
    _round(peer, target, "ours", _prompts(rng, 1)), _round(peer, target, "theirs", _prompts(rng, 1))
    neighbours = Neighbours()
    for index in range(rounds):
        prompts = _prompts(rng, streams)
        for who in ("ours", "theirs")[:: -1 if index % 2 else 1]:
            seen[who].append(_round(peer, target, who, prompts))
    return seen, neighbours


def _prompts(rng: np.random.Generator, streams: int) -> list[str]:
    return [" ".join(rng.choice(WORDS, PROMPT_WORDS)) for _ in range(streams)]


def _round(peer: ServerPeer, target: str, who: str, prompts: list[str]) -> Round:
    begin = time.perf_counter()
    times = asyncio.run(_own_round(target, prompts) if who == "ours" else peer.round(prompts, NEW_TOKENS))
    return time.perf_counter() - begin, times


async def _own_round(target: str, prompts: list[str]) -> list[StreamTimes]:
    options = GenerateOptions(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    async with AsyncGenerationClient(target) as client:

        async def one(prompt: str) -> StreamTimes:
            times, begin = StreamTimes(), time.perf_counter()
            async for chunk in client.stream(prompt, options):
                if chunk.text:
                    times.arrived(begin)
            return times

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def _figures(
    folder: ModelFolder, peer: ServerPeer, seen: dict[str, list[Round]], *, streams: int, neighbours: Neighbours
) -> list[Figures]:
    busy = neighbours.percent()
    return [
        Figures(
            model=folder.card.name,
            what=f"{streams} streams, {what}",
            peer=peer.name,
            ours=measure(seen["ours"]),
            theirs=measure(seen["theirs"]),
            unit=unit,
            kernels="as served",
            neighbours=busy,
            goal=goal,
        )
        for what, measure, unit, goal in (
            ("throughput", _rate, "tokens/s", STREAMS[streams]),
            ("time to first token, median", _first_ms, "ms", None),
            ("gap between arrivals, p99", _gap_ms, "ms", 1.0),
        )
    ]


def _rate(seen: list[Round]) -> float:
    return median(len(times) * NEW_TOKENS / seconds for seconds, times in seen)


def _first_ms(seen: list[Round]) -> float:
    return 1e3 * median(stream.first_s for _, times in seen for stream in times)


def _gap_ms(seen: list[Round]) -> float:
    return 1e3 * float(np.percentile([gap for _, times in seen for stream in times for gap in stream.gaps_s], 99))
