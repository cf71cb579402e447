"""`forwardplane status`: a server's load and a table of its workers."""

from rich.console import Console
from rich.table import Table

from protos.client import exit_codes
from protos.client.generation_client import GenerationClient
from protos.client.messages import Load


def status(console: Console, *, target: str) -> int:
    """Ask and show. Returns the exit code.

    Raises:
        EngineError: no server answers.
    """
    with GenerationClient(target) as client:
        model, load = client.model(), client.load()
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
