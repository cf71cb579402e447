"""Commands about load: put it on a server, run it again, say what it needs. Parses and calls.

`add_load_commands` hangs them into the command's own app.
"""

from pathlib import Path

from cyclopts import App
from rich.console import Console

from protos.client.bench_command import bench
from protos.client.bench_options import BenchOptions
from protos.client.buckets_command import AdviceOptions, buckets_advise
from protos.client.capacity_command import CapacityOptions, plan_capacity
from protos.client.replay_command import ReplayOptions, replay

PIPED_WIDTH = 200
"""Columns of a table that goes to a file or a pipe: nothing is cut."""
DEFAULT_BENCH = BenchOptions()
DEFAULT_REPLAY = ReplayOptions()
DEFAULT_ADVICE = AdviceOptions()
DEFAULT_CAPACITY = CapacityOptions()


def add_load_commands(app: App) -> None:
    """Offer them under `app`."""
    app.command(bench_command, name="bench")
    app.command(replay_command, name="replay")
    buckets = App(name="buckets", help="Sizes of captured graphs.")
    buckets.command(buckets_advise_command, name="advise")
    app.command(buckets)
    app.command(plan_capacity_command, name="plan-capacity")


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
    return bench(options, wide_console())


def replay_command(file: Path, *, options: ReplayOptions = DEFAULT_REPLAY) -> int:
    """Run recorded plans again on a fresh executor, in order, and report the first row whose result differs.

    Record with `forwardplane serve --record FILE`. Pages that plans read and did not write are computed first.

    Args:
        file: a recording.
        options: what runs the plans again, and what is compared.
    """
    return replay(file, options, Console(soft_wrap=True))


def buckets_advise_command(*, options: AdviceOptions = DEFAULT_ADVICE) -> int:
    """Propose the bucket sizes of captured graphs that pad least for the forwards that were seen, and what that saves.

    Decode buckets count rows, prefill buckets tokens. The result is exact: no other list of so many graphs pads less. A
    prefill that finds only a bucket above twice its tokens runs eagerly; it is counted as if it were padded.

    For example: `forwardplane buckets advise --from-metrics http://127.0.0.1:9465/metrics --max-graphs 16`, then
    `forwardplane serve` with the two lists that it prints.

    Args:
        options: what was seen, and what may be captured.
    """
    return buckets_advise(options, wide_console())


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
    return plan_capacity(sources, options, wide_console())


def wide_console() -> Console:
    """For tables."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)
