"""`make bench-peers`: this engine beside others on the same weights in one run: steps without a network, then streams.

Peers are built in environments of their own under build/peers. Every figure alternates with its peer's over several
rounds; ratios are of medians. Prints a table with the CPU use of neighbours and writes build/bench_peers.{json,png}.
Parts may be measured in calls of their own: the files keep what earlier calls found.

    python -m tests.bench.bench_peers [--parts steps,streams] [--peers llama,vllm,transformers] [--rounds 3]
        [--model gemma3-270m] [--build-only]
"""

import argparse
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import psutil
from rich.console import Console

from protos.client.serve_command import ServeOptions, resolve_model
from protos.service.model_files import ModelFolder
from tests.bench.peer_servers import LLAMA_SERVER, VLLM, ServerPeer, llama_server, vllm_server
from tests.bench.peer_steps import Comparison, beside_llama, beside_transformers, beside_vllm, comparison
from tests.bench.peer_streams import end_to_end
from tests.bench.peer_table import Figures, report
from tests.bench.peers import TRANSFORMERS, environment


@dataclass(frozen=True)
class Peer:
    packages: tuple[str, ...]
    steps: Callable[[Comparison], list[Figures]]
    server: Callable[..., ServerPeer] | None
    """None: it has none."""


PEERS = {
    "llama": Peer(LLAMA_SERVER, beside_llama, llama_server),
    "vllm": Peer(VLLM, beside_vllm, vllm_server),
    "transformers": Peer(TRANSFORMERS, beside_transformers, None),
}
PARTS = ("steps", "streams")


def is_built(name: str, *, console: Console) -> bool:
    """Build the peer's environment unless it is there; if that fails, say so in a line."""
    try:
        environment(name, PEERS[name].packages)
    except (subprocess.CalledProcessError, OSError) as error:
        console.print(f"{name} is left out: its environment cannot be built: {error}")
        return False
    return True


def measured(part: str, peer: Peer, folder: ModelFolder, *, rounds: int, threads: int) -> list[Figures]:
    """One part of the table beside one peer."""
    if part == "steps":
        with comparison(folder, threads=threads, rounds=rounds) as each:
            return peer.steps(each)
    return [] if peer.server is None else end_to_end(folder, peer.server(folder, threads=threads), rounds=rounds)


def main() -> None:
    """Measure what is asked for, a part after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    parser.add_argument("--model", default=None)
    parser.add_argument("--build-only", action="store_true", help="make the environments, measure nothing")
    arguments = parser.parse_args()
    console = Console(width=180)
    names = [name for name in arguments.peers.split(",") if is_built(name, console=console)]
    if arguments.build_only:
        return
    folder = resolve_model(ServeOptions(model=arguments.model), console)
    for part in arguments.parts.split(","):
        for name in names:
            console.print(f"== {part} beside {name}")
            peer, options = PEERS[name], {"rounds": arguments.rounds, "threads": arguments.threads}
            report(measured(part, peer, folder, **options), console=console)


if __name__ == "__main__":
    main()
