"""`forwardplane status`: a server's load, its workers, and how their forwards ran."""

from rich.console import Console
from rich.table import Table

from protos.client.exit_codes import OK
from protos.client.generation_client import GenerationClient
from protos.client.load_messages import GraphUse, Load, WorkerLoad
from protos.client.server_access import ServerAccess


def status(server: ServerAccess, console: Console) -> int:
    """Ask and show. Returns the exit code.

    Raises:
        EngineError: the server does not answer.
    """
    with GenerationClient(server.target, credentials=server.credentials()) as client:
        model, load = client.model(), client.load()
    console.print(f"{model.name}: {load.requests_running} running, {load.requests_waiting} waiting", highlight=False)
    console.print(worker_table(load))
    graphs = graph_table(load)
    if graphs.row_count:
        console.print(graphs)
    return OK


def worker_table(load: Load) -> Table:
    """One line a worker."""
    table = Table("worker", "state", "device", "numerics", "kernels", "running", "pages used", "plans")
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
        )
    return table


def graph_table(load: Load) -> Table:
    """One line a worker and phase: its graphs, forwards that replayed one, and the reasons of those that did not."""
    table = Table("worker", "phase", "captured", "replays", "padded tokens", "misses", "reasons")
    for worker in load.workers:
        for use in worker.graphs:
            table.add_row(
                worker.name,
                use.phase.name.lower(),
                captured_text((use,)),
                str(use.replays),
                padding_text(use.padded_tokens, use.real_tokens) if use.replays else "",
                str(use.num_misses),
                reasons_text((use,)),
            )
    return table


def captured_text(uses: tuple[GraphUse, ...]) -> str:
    """How many graphs are live, what failed, and what they took; of none: nothing."""
    planned = sum(use.planned for use in uses)
    if not planned:
        return ""
    dead = sum(use.dead for use in uses)
    failed = f", {dead} failed" if dead else ""
    megabytes, seconds = sum(use.graph_bytes for use in uses) / 1e6, sum(use.capture_ms for use in uses) / 1e3
    return f"{sum(use.live for use in uses)} of {planned}{failed}; {megabytes:.1f} MB, {seconds:.1f} s"


def padding_text(padded: int, real: int) -> str:
    """Padding as a number and as a share of what replays computed."""
    return f"{padded} ({padded / max(padded + real, 1):.0%}) beside {real} real"


def reasons_text(uses: tuple[GraphUse, ...]) -> str:
    """Why forwards ran eagerly, most frequent first."""
    counts: dict[str, int] = {}
    for use in uses:
        for reason, count in use.misses:
            counts[reason.name.lower()] = counts.get(reason.name.lower(), 0) + count
    ranked = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    return ", ".join(f"{reason} {count}" for reason, count in ranked)


def graph_rows(workers: tuple[WorkerLoad, ...]) -> tuple[tuple[str, str], ...]:
    """What graphs did for all workers together, as lines of a summary."""
    uses = tuple(use for worker in workers for use in worker.graphs)
    replays, misses = sum(use.replays for use in uses), sum(use.num_misses for use in uses)
    reasons = reasons_text(uses)
    padded, real = sum(use.padded_tokens for use in uses), sum(use.real_tokens for use in uses)
    return (
        ("captured graphs", captured_text(uses) or "none"),
        ("graph replays", str(replays)),
        ("graph misses", f"{misses}: {reasons}" if reasons else str(misses)),
        ("padded tokens", padding_text(padded, real) if replays else "0"),
    )
