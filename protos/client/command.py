"""The `forwardplane` command: parses, calls, and turns errors into one line and an exit code.

Starts services as processes and imports neither.
"""

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.table import Table

from protos.client import exit_codes
from protos.client.bench_command import bench
from protos.client.bench_options import BenchOptions
from protos.client.capacity_command import CapacityOptions, plan_capacity
from protos.client.demo_command import QUESTION, demo
from protos.client.embed_command import Pooling, embed
from protos.client.fetch_model import fetch_model
from protos.client.generate_command import DEFAULT_TARGET, GenerateArguments, generate
from protos.client.generation_client import GenerationClient
from protos.client.messages import Load
from protos.client.replay_command import ReplayOptions, replay
from protos.client.serve_command import DEFAULT_MODEL, ServeOptions, serve
from protos.wire.errors import EngineError

PIPED_WIDTH = 200
"""Columns of a table that goes to a file or a pipe: nothing is cut."""
DEFAULT_SERVE = ServeOptions()
DEFAULT_GENERATE = GenerateArguments()
DEFAULT_BENCH = BenchOptions()
DEFAULT_REPLAY = ReplayOptions()
DEFAULT_CAPACITY = CapacityOptions()

app = App(
    name="forwardplane",
    version=lambda: version("forwardplane"),
    help="LLM inference in two gRPC services: a scheduler that plans each step, and workers that execute the plans.",
    help_epilogue="Exit codes: 0 done, 1 failure, 2 wrong usage, 3 refused.",
)


@app.command(name="serve")
def serve_command(*, options: ServeOptions = DEFAULT_SERVE) -> int:
    """Serve a model on this machine until Ctrl-C: one scheduler and its workers, each a process of its own.

    Example: `forwardplane serve --model smollm2-135m-instruct --port 50051`, then `forwardplane generate "Hello"`.
    """
    return serve(options, Console(stderr=True))


@app.command(name="demo")
def demo_command(question: str = QUESTION, *, options: ServeOptions = DEFAULT_SERVE) -> int:
    """Serve a model, ask one question, stream the answer, print a summary, and stop.

    Args:
        question: what to ask.
        options: what to serve, how, and on which ports.
    """
    return demo(options, question, Console())


@app.command(name="generate")
def generate_command(prompt: str | None = None, *, arguments: GenerateArguments = DEFAULT_GENERATE) -> int:
    """Ask a running server for text and stream it to the terminal.

    The prompt is a chat question unless --raw. With --json the one line printed last holds text, token_ids,
    finish_reason, usage and logprobs.

    Args:
        prompt: the question or the text to go on from.
        arguments: where to ask, what to ask for, and how to show it.
    """
    return generate(prompt, arguments, Console(soft_wrap=True))


@app.command(name="bench")
def bench_command(*, options: BenchOptions = DEFAULT_BENCH) -> int:
    """Put load on a running server and measure it from outside: latencies, throughput, refusals.

    Closed loop (`--concurrency 32`): so many requests at once; shows the most the server can do. Open loop
    (`--rate 5`): requests arrive at random times whatever the server does; shows what callers of a busy service see.
    Only what follows the warm-up is measured; Ctrl-C ends the run and shows what was measured until then.

    For example, the most of a server: `forwardplane bench --concurrency 16 --prompt-tokens 64-1024 --duration-s 60`

    For example, a busy service: `forwardplane bench --rate 4 --requests 500 --json figures.json --plot figures.png`

    Without a GPU: `forwardplane serve --device simulated`, then `forwardplane bench --concurrency 64 --verify`

    Args:
        options: where to measure, with what load, and what to do with the figures.
    """
    console = Console()
    return bench(options, console if console.is_terminal else Console(width=PIPED_WIDTH))


@app.command(name="replay")
def replay_command(file: Path, *, options: ReplayOptions = DEFAULT_REPLAY) -> int:
    """Run recorded plans again on a fresh executor, in order, and report the first row whose result differs.

    Record with `forwardplane serve --record FILE`. Pages that plans read and did not write are computed first.

    Args:
        file: a recording.
        options: what runs the plans again, and what is compared.
    """
    return replay(file, options, Console(soft_wrap=True))


@app.command(name="plan-capacity")
def plan_capacity_command(*sources: Path, options: CapacityOptions = DEFAULT_CAPACITY) -> int:
    """Say how many workers a load needs, with how many pages and which graph buckets, and the latency to expect.

    Learns what a step costs from runs of yours, then simulates the load step by step. Record runs of the model on the
    machine you mean, with few and with many requests at once; then ask about any other load:

    `forwardplane serve --record run.fprec`, and beside it `forwardplane bench --concurrency 2`, `… 8`, `… 32`

    `forwardplane plan-capacity run.fprec --rate 20 --prompt-tokens 64-512 --inter-token-ms 50 --headroom-ratio 0.3`

    What so many workers would give: `forwardplane plan-capacity run.fprec --concurrency 64 --workers 2`

    Without a recording, from what a client saw: `forwardplane plan-capacity bench-2.json bench-16.json --rate 5`

    From a table of step times, as `serve --simulated-steps` takes it: `forwardplane plan-capacity h100.toml --rate 50`

    Each worker is taken to have its machine for itself, as the recorded one had.

    Args:
        sources: recordings, results of `bench --json` (closed loops of at least two concurrencies), or one .toml table.
        options: the load, the promises and what a worker is like.
    """
    console = Console()
    return plan_capacity(sources, options, console if console.is_terminal else Console(width=PIPED_WIDTH))


@app.command(name="embed")
def embed_command(*texts: str, target: str = DEFAULT_TARGET, pooling: Pooling = "last") -> int:
    """Turn texts into vectors of length 1, printed as one JSON line each.

    Args:
        texts: taken as they are, without the model's chat template.
        target: HOST:PORT of a scheduler.
        pooling: `last`: the state of the last token; `mean`: of all.
    """
    return embed(texts, Console(soft_wrap=True), target=target, pooling=pooling)


@app.command(name="status")
def status_command(*, target: str = DEFAULT_TARGET) -> int:
    """Show a server's load and a table of its workers.

    Args:
        target: HOST:PORT of a scheduler.
    """
    with GenerationClient(target) as client:
        model, load = client.model(), client.load()
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    console.print(f"{model.name}: {load.requests_running} running, {load.requests_waiting} waiting", highlight=False)
    console.print(worker_table(load))
    return exit_codes.OK


def worker_table(load: Load) -> Table:
    """One line a worker."""
    table = Table(
        "worker", "state", "device", "numerics", "kernels", "running", "pages used", "plans", "replays", "misses"
    )
    for worker in load.workers:
        table.add_row(
            worker.name,
            worker.state.name if worker.state else "not attached",
            f"{worker.device} {worker.dtype}",
            worker.numerics,
            worker.kernels,
            str(worker.requests_running),
            f"{worker.pages_used} / {worker.pages}",
            str(worker.plans),
            str(worker.graph_replays),
            str(worker.graph_misses),
        )
    return table


@app.command(name="fetch-model")
def fetch_model_command(
    name: str = DEFAULT_MODEL, *, model_cache: Annotated[Path | None, Parameter(name="--model-cache")] = None
) -> int:
    """Fetch a known model into the cache and print its folder. Safe to repeat.

    Args:
        name: name of a known model.
        model_cache: folder of fetched models. Default: ~/.cache/forwardplane/models.
    """
    console = Console(stderr=True)
    with console.status(f"fetching {name}") as status:
        folder = fetch_model(name, cache=model_cache, progress=status.update)
    Console(soft_wrap=True).print(str(folder.path), highlight=False)
    return exit_codes.OK


def run(call: Callable[[], object], console: Console) -> int:
    """What `call` returns as an exit code; an error becomes one line on `console`."""
    try:
        code = call()
    except CycloptsError:
        return exit_codes.USAGE
    except exit_codes.WrongUsage as error:
        console.print(f"forwardplane: {error}", style="red", highlight=False, markup=False)
        return exit_codes.USAGE
    except EngineError as error:
        console.print(f"forwardplane: {error.message}", style="red", highlight=False, markup=False)
        return exit_codes.exit_code(error)
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    return code if isinstance(code, int) else exit_codes.OK


def main() -> None:
    """Entry point of the `forwardplane` command."""
    console = Console(stderr=True, soft_wrap=True)
    sys.exit(run(lambda: app(exit_on_error=False, result_action="return_value"), console))


if __name__ == "__main__":
    main()
