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

from protos.client import exit_codes
from protos.client.bench_command import bench
from protos.client.bench_options import BenchOptions
from protos.client.buckets_command import AdviceOptions, buckets_advise
from protos.client.demo_command import QUESTION, demo
from protos.client.embed_command import Pooling, embed
from protos.client.fetch_model import fetch_model
from protos.client.generate_command import GenerateArguments, generate
from protos.client.replay_command import ReplayOptions, replay
from protos.client.serve_command import DEFAULT_MODEL, ServeOptions, serve
from protos.client.server_access import ServerAccess
from protos.client.status_command import status
from protos.service.config import EX_CONFIG, ConfigError
from protos.wire.errors import EngineError

PIPED_WIDTH = 200
"""Columns of a table that goes to a file or a pipe: nothing is cut."""
DEFAULT_SERVE = ServeOptions()
DEFAULT_GENERATE = GenerateArguments()
DEFAULT_BENCH = BenchOptions()
DEFAULT_REPLAY = ReplayOptions()
DEFAULT_ADVICE = AdviceOptions()
DEFAULT_SERVER = ServerAccess()

app = App(
    name="forwardplane",
    version=lambda: version("forwardplane"),
    help="LLM inference in two gRPC services: a scheduler that plans each step, and workers that execute the plans.",
    help_epilogue="Exit codes: 0 done, 1 failure, 2 wrong usage, 3 refused, 78 settings that cannot be used.",
)
buckets_app = App(name="buckets", help="Sizes of captured graphs.")
app.command(buckets_app)


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
    return bench(options, _wide_console())


@app.command(name="replay")
def replay_command(file: Path, *, options: ReplayOptions = DEFAULT_REPLAY) -> int:
    """Run recorded plans again on a fresh executor, in order, and report the first row whose result differs.

    Record with `forwardplane serve --record FILE`. Pages that plans read and did not write are computed first.

    Args:
        file: a recording.
        options: what runs the plans again, and what is compared.
    """
    return replay(file, options, Console(soft_wrap=True))


@app.command(name="embed")
def embed_command(*texts: str, server: ServerAccess = DEFAULT_SERVER, pooling: Pooling = "last") -> int:
    """Turn texts into vectors of length 1, printed as one JSON line each.

    Args:
        texts: taken as they are, without the model's chat template.
        server: where to ask, and as whom.
        pooling: `last`: the state of the last token; `mean`: of all.
    """
    return embed(texts, Console(soft_wrap=True), server=server, pooling=pooling)


@app.command(name="status")
def status_command(*, server: ServerAccess = DEFAULT_SERVER) -> int:
    """Show a server's load, a table of its workers, and what their captured graphs were used for.

    Args:
        server: where to ask, and as whom.
    """
    return status(server, _wide_console())


@buckets_app.command(name="advise")
def buckets_advise_command(*, options: AdviceOptions = DEFAULT_ADVICE) -> int:
    """Propose the bucket sizes of captured graphs that pad least for the forwards that were seen, and what that saves.

    Decode buckets count rows, prefill buckets tokens. The result is exact: no other list of so many graphs pads less. A
    forward that finds only a bucket above twice its tokens runs eagerly; it is counted as if it were padded.

    For example: `forwardplane buckets advise --from-metrics http://127.0.0.1:9465/metrics --max-graphs 16`, then
    `forwardplane serve` with the two lists that it prints.

    Args:
        options: what was seen, and what may be captured.
    """
    return buckets_advise(options, _wide_console())


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


def _wide_console() -> Console:
    """For tables."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)


def run(call: Callable[[], object], console: Console) -> int:
    """What `call` returns as an exit code; an error becomes one line on `console`."""
    try:
        code = call()
    except CycloptsError:
        return exit_codes.USAGE
    except exit_codes.WrongUsage as error:
        console.print(f"forwardplane: {error}", style="red", highlight=False, markup=False)
        return exit_codes.USAGE
    except ConfigError as error:
        console.print(f"forwardplane: {error}", style="red", highlight=False, markup=False)
        return EX_CONFIG
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
