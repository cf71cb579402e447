"""`make bench-peers`: this engine beside others on the same weights in one run: bare steps, then streams.

Peers are built in environments of their own under build/peers. Every figure alternates with its peer's over several
rounds; ratios are of medians. Prints a table with the CPU use of neighbours and writes build/bench_peers.{json,png}.

    python -m tests.bench.bench_peers [--peers llama,vllm] [--rounds 3] [--hf-model FOLDER]
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import psutil
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from kernels.native import ThreadPool
from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions
from protos.client.serve_command import ServeOptions, resolve_model
from tests.bench.bare_model import bare_model, decode, native_library, prefilled, timed
from tests.bench.peer_servers import LLAMA_SERVER, ServerPeer, StreamTimes, llama_server, vllm_server
from tests.bench.peers import ROOT, LinePeer, environment
from tests.support.served import served_for_figures

DECODE = ((1, 64), (4, 64), (16, 64), (64, 64), (16, 1024))
PREFILL = (256, 512)
STREAMS = (1, 16, 64)
NEW_TOKENS = 48
WORDS = ("the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with")


@dataclass(frozen=True)
class Figures:
    """One row of the table: larger is better, but for times."""

    what: str
    peer: str
    ours: float
    theirs: float
    unit: str
    neighbours: float
    """Percent of the machine's CPU that processes other than ours and the peer's used."""

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours if self.unit == "ms" else self.ours / self.theirs


class Neighbours:
    """CPU use of everything that is not of this measurement, since it was made."""

    def __init__(self) -> None:
        self._since, self._own_before, self._all_before = time.monotonic(), _own_seconds(), _all_seconds()

    def percent(self) -> float:
        """Of the whole machine."""
        others = _all_seconds() - self._all_before - (_own_seconds() - self._own_before)
        return max(0.0, 100 * others / (time.monotonic() - self._since) / (psutil.cpu_count() or 1))


def _all_seconds() -> float:
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def _own_seconds() -> float:
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (own, *own.children(recursive=True)))


def alternate(rounds: int, theirs: Callable[[], list[float]], ours: Callable[[], list[float]]) -> tuple[float, float]:
    """Median seconds of the peer and of ours."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        taken[0].extend(theirs())
        taken[1].extend(ours())
    return statistics.median(taken[0]), statistics.median(taken[1])


def bare_steps(weights: Path, *, rounds: int, threads: int) -> list[Figures]:
    """Decode and prefill of the kernels beside llama.cpp's batched decode."""
    script = Path(__file__).parent / "llama_peer.py"
    peer = LinePeer(environment("llama", LLAMA_SERVER), script, str(weights), str(threads))
    found = []
    with ThreadPool(native_library(), threads=threads) as pool, bare_model(weights, pool) as model:
        for rows, context in DECODE:
            steps, neighbours = 16 if rows <= 4 else 8, Neighbours()
            order = {"kind": "decode", "rows": rows, "context": context, "steps": steps}
            theirs, ours = alternate(
                rounds,
                lambda order=order: peer.ask(order)["seconds"],
                lambda rows=rows, context=context, steps=steps: decode(model, rows, context, steps),
            )
            label = f"bare decode, {rows} rows at {context}"
            found.append(Figures(label, "llama.cpp", rows / ours, rows / theirs, "tokens/s", neighbours.percent()))
        for tokens in PREFILL:
            neighbours = Neighbours()
            theirs, ours = alternate(
                rounds,
                lambda tokens=tokens: peer.ask({"kind": "prefill", "tokens": tokens})["seconds"],
                lambda tokens=tokens: [timed(model, [(prefilled(model, 1, 0, room=tokens)[0], np.arange(tokens))])],
            )
            label = f"bare prefill of {tokens}"
            found.append(Figures(label, "llama.cpp", tokens / ours, tokens / theirs, "tokens/s", neighbours.percent()))
    peer.close()
    return found


async def own_round(target: str, prompts: list[str]) -> list[StreamTimes]:
    options = GenerateOptions(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    async with AsyncGenerationClient(target) as client:

        async def one(prompt: str) -> StreamTimes:
            times, begin = StreamTimes(), time.perf_counter()
            async for chunk in client.stream(prompt, options):
                if chunk.text:
                    times.arrived(begin)
            return times

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def end_to_end(peer: ServerPeer, *, rounds: int) -> list[Figures]:
    """Streams over the network: throughput, time to the first token, gap between arrivals."""
    with served_for_figures(numerics="fast") as server:
        return [row for streams in STREAMS for row in beside(peer, server.target, streams=streams, rounds=rounds)]


def beside(peer: ServerPeer, target: str, *, streams: int, rounds: int) -> list[Figures]:
    """Rounds of so many streams, ours and the peer's in turn, on equal prompts."""
    rng = np.random.default_rng(streams)
    seen: dict[str, list[tuple[float, list[StreamTimes]]]] = {"ours": [], "theirs": []}
    neighbours = Neighbours()
    for _ in range(rounds):
        prompts = [" ".join(rng.choice(WORDS, 32)) for _ in range(streams)]
        for who, taken in seen.items():
            begin = time.perf_counter()
            times = asyncio.run(own_round(target, prompts) if who == "ours" else peer.round(prompts, NEW_TOKENS))
            taken.append((time.perf_counter() - begin, times))
    busy = neighbours.percent()
    return [
        Figures(f"{streams} streams, {what}", peer.name, measure(seen["ours"]), measure(seen["theirs"]), unit, busy)
        for what, measure, unit in (
            ("throughput", rate, "tokens/s"),
            ("time to first token, median", first_ms, "ms"),
            ("gap between arrivals, p99", gap_ms, "ms"),
        )
    ]


def rate(seen: list[tuple[float, list[StreamTimes]]]) -> float:
    return statistics.median(len(times) * NEW_TOKENS / seconds for seconds, times in seen)


def first_ms(seen: list[tuple[float, list[StreamTimes]]]) -> float:
    return 1e3 * statistics.median(stream.first_s for _, times in seen for stream in times)


def gap_ms(seen: list[tuple[float, list[StreamTimes]]]) -> float:
    return 1e3 * float(np.percentile([gap for _, times in seen for stream in times for gap in stream.gaps_s], 99))


def report(found: list[Figures], *, console: Console) -> None:
    table = Table("what", "peer", "ours", "theirs", "unit", "ratio, above 1: ours is better", "neighbours' CPU")
    for row in found:
        cells = (f"{row.ours:.1f}", f"{row.theirs:.1f}", row.unit, f"{row.ratio:.2f}", f"{row.neighbours:.0f} %")
        table.add_row(row.what, row.peer, *cells)
    console.print(table)
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    rows = [{**asdict(row), "ratio": row.ratio} for row in found]
    result = {"kernels": native_library().describe(threads=psutil.cpu_count(logical=False) or 1), "rows": rows}
    (folder / "bench_peers.json").write_text(json.dumps(result, indent=2))
    mpl.use("Agg")
    figure = Figure(figsize=(9, 0.4 * len(found) + 1.5), layout="constrained")
    axes = figure.subplots()
    axes.barh([f"{row.what} ({row.peer})" for row in reversed(found)], [row.ratio for row in reversed(found)])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("ratio to the peer; above 1: ours is better")
    figure.savefig(folder / "bench_peers.png", dpi=110)


def started(name: str, arguments: argparse.Namespace, *, console: Console) -> ServerPeer | None:
    """The peer's server, or None after a line that says why not."""
    folder = resolve_model(ServeOptions(), console)
    try:
        if name == "llama":
            return llama_server(folder.weights, threads=arguments.threads, eos_token_ids=folder.card.eos_token_ids)
        if arguments.hf_model is None:
            console.print(
                "vllm is left out: it reads no GGUF here; name the model in Hugging Face's form by --hf-model"
            )
            return None
        return vllm_server(arguments.hf_model)
    except (subprocess.CalledProcessError, OSError) as error:
        console.print(f"{name} is left out: its environment cannot be built: {error}")
        return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", default="llama,vllm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    parser.add_argument("--hf-model", type=Path, default=None)
    arguments = parser.parse_args()
    console, found = Console(), []
    names = arguments.peers.split(",")
    if "llama" in names:
        weights = resolve_model(ServeOptions(), console).weights
        found += bare_steps(weights, rounds=arguments.rounds, threads=arguments.threads)
    for name in names:
        peer = started(name, arguments, console=console)
        if peer is None:
            continue
        with ExitStack() as stack:
            stack.callback(peer.close)
            asyncio.run(peer.wait_serving())
            found += end_to_end(peer, rounds=arguments.rounds)
    report(found, console=console)


if __name__ == "__main__":
    main()
