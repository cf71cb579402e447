"""Steps without a network beside each peer: decode and prefill of core and executor on equal shapes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from protos.service.model_files import ModelFolder
from tests.bench.engine import Engine, generated, native_worker
from tests.bench.peer_servers import LLAMA_SERVER, VLLM
from tests.bench.peer_table import Figures, Neighbours, alternate
from tests.bench.peers import TRANSFORMERS, LinePeer, environment, hub_form
from worker_svc.tp_model_worker import TpModelWorker

HERE = Path(__file__).parent
LLAMA_GOALS = {(1, 64): 1.4, (4, 64): 3.0, (16, 64): 3.0, (64, 64): 3.0, (16, 1024): 2.0}
"""Least ratio of decode, by (rows, context)."""
GEMMA_GOALS = {(16, 64): 2.0}
LLAMA_PREFILL = {256: 4.0, 512: 4.0}
GENERATED = (1, 16, 64)
"""Rows of peers that are asked for whole answers; no ratio is asked for."""
NEW_TOKENS, PROMPT = 24, 64


@dataclass(frozen=True)
class Comparison:
    """What both sides share."""

    folder: ModelFolder
    worker: TpModelWorker
    threads: int
    rounds: int
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def prompts(self, rows: int, length: int) -> list[list[int]]:
        """Never the same twice: nothing is cached."""
        most = min(40_000, self.folder.card.vocab_size)
        return self.rng.integers(100, most, (rows, length)).tolist()

    def figures(
        self, what: str, peer: str, *, ours: float, theirs: float, neighbours: Neighbours, goal: float | None
    ) -> Figures:
        """One row, in tokens a second."""
        return Figures(
            model=self.folder.card.name,
            what=what,
            peer=peer,
            ours=ours,
            theirs=theirs,
            unit="tokens/s",
            kernels=self.worker.worker_info().kernels,
            neighbours=neighbours.percent(),
            goal=goal,
        )


@contextmanager
def comparison(folder: ModelFolder, *, threads: int, rounds: int) -> Iterator[Comparison]:
    """With an executor of our own."""
    with native_worker(folder, threads=threads) as worker:
        yield Comparison(folder, worker, threads, rounds)


def beside_llama(each: Comparison) -> list[Figures]:
    """llama.cpp's batched decode on the same file, step by step."""
    peer = LinePeer(
        environment("llama", LLAMA_SERVER), HERE / "llama_peer.py", str(each.folder.weights), str(each.threads)
    )
    is_gemma = "gemma" in each.folder.card.name
    try:
        decoded = [_llama_decode(each, peer, *shape, is_gemma=is_gemma) for shape in LLAMA_GOALS]
        return decoded + [_llama_prefill(each, peer, tokens, is_gemma=is_gemma) for tokens in LLAMA_PREFILL]
    finally:
        peer.close()


def _llama_decode(each: Comparison, peer: LinePeer, rows: int, context: int, *, is_gemma: bool) -> Figures:
    steps, neighbours = 16 if rows <= 4 else 8, Neighbours()
    order = {"kind": "decode", "rows": rows, "context": context, "steps": steps}

    def ours() -> list[float]:
        engine = Engine(each.worker, each.prompts(rows, context), max_tokens=steps + 8)
        engine.fill()
        return [engine.turn() for _ in range(steps)]

    theirs_s, ours_s = alternate(each.rounds, lambda: peer.ask(order)["seconds"], ours)
    goal = (GEMMA_GOALS if is_gemma else LLAMA_GOALS).get((rows, context))
    return each.figures(
        f"decode, {rows} rows at {context}",
        "llama.cpp",
        ours=rows / ours_s,
        theirs=rows / theirs_s,
        neighbours=neighbours,
        goal=goal,
    )


def _llama_prefill(each: Comparison, peer: LinePeer, tokens: int, *, is_gemma: bool) -> Figures:
    neighbours, order = Neighbours(), {"kind": "prefill", "tokens": tokens}
    theirs_s, ours_s = alternate(
        each.rounds,
        lambda: [second for _ in range(2) for second in peer.ask(order)["seconds"]],
        lambda: [generated(each.worker, each.prompts(1, tokens), new_tokens=1) for _ in range(2)],
    )
    return each.figures(
        f"prefill of {tokens}",
        "llama.cpp",
        ours=tokens / ours_s,
        theirs=tokens / theirs_s,
        neighbours=neighbours,
        goal=None if is_gemma else LLAMA_PREFILL[tokens],
    )


def beside_vllm(each: Comparison) -> list[Figures]:
    """vLLM's offline engine in float32 on the same weights, dequantised."""
    python = environment("vllm", VLLM)
    peer = LinePeer(python, HERE / "vllm_peer.py", str(hub_form(each.folder, python=python)), str(each.threads))
    return _beside_generate(each, peer, "vLLM", prefill_goal=1.9)


def beside_transformers(each: Comparison) -> list[Figures]:
    """transformers' batched greedy `generate` in float32 on the same file."""
    python = environment("transformers", TRANSFORMERS)
    peer = LinePeer(python, HERE / "transformers_peer.py", str(each.folder.weights), str(each.threads))
    return _beside_generate(each, peer, "transformers", prefill_goal=None)


def _beside_generate(each: Comparison, peer: LinePeer, name: str, *, prefill_goal: float | None) -> list[Figures]:
    """A peer that generates whole batches: decode is what more tokens than one take, per token."""
    try:
        found = [_generate(each, peer, name, rows) for rows in GENERATED]
        neighbours, tokens = Neighbours(), 512
        theirs_s, ours_s = alternate(
            each.rounds,
            lambda: [_asked(peer, each.prompts(1, tokens), 1) for _ in range(2)],
            lambda: [generated(each.worker, each.prompts(1, tokens), new_tokens=1) for _ in range(2)],
        )
        rates = {"ours": tokens / ours_s, "theirs": tokens / theirs_s}
        found.append(each.figures(f"prefill of {tokens}", name, **rates, neighbours=neighbours, goal=prefill_goal))
        return found
    finally:
        peer.close()


def _generate(each: Comparison, peer: LinePeer, name: str, rows: int) -> Figures:
    neighbours = Neighbours()

    def theirs() -> list[float]:
        first = _asked(peer, each.prompts(rows, PROMPT), 1)
        return [(_asked(peer, each.prompts(rows, PROMPT), NEW_TOKENS) - first) / (NEW_TOKENS - 1)]

    def ours() -> list[float]:
        first = generated(each.worker, each.prompts(rows, PROMPT), new_tokens=1)
        whole = generated(each.worker, each.prompts(rows, PROMPT), new_tokens=NEW_TOKENS)
        return [(whole - first) / (NEW_TOKENS - 1)]

    theirs()  # compiles and fills caches
    theirs_s, ours_s = alternate(each.rounds, theirs, ours)
    rates = {"ours": rows / ours_s, "theirs": rows / theirs_s}
    return each.figures(f"decode, {rows} rows at {PROMPT}", name, **rates, neighbours=neighbours, goal=None)


def _asked(peer: LinePeer, prompts: list[list[int]], new_tokens: int) -> float:
    reply = peer.ask({"prompts": prompts, "new_tokens": new_tokens})
    assert reply["tokens"] == new_tokens * len(prompts)
    return reply["seconds"]
