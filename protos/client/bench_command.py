"""`forwardplane bench`: drives client processes against a served address and shows what they measured.

Measures from outside, as a caller. Ctrl-C ends the load and shows what was measured until then.
"""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from rich.console import Console

from protos.client.bench_client import STOP, ClientJob, run_client
from protos.client.bench_figures import BenchFigures, bench_figures
from protos.client.bench_options import BenchOptions, LoadPlan, load_plan
from protos.client.bench_records import ClientCounts, RequestRecord
from protos.client.bench_report import (
    BenchContext,
    as_json,
    check_plot,
    draw_plot,
    latency_table,
    summary_table,
    write_file,
)
from protos.client.bench_workload import Workload, prompt_source, workload
from protos.client.exit_codes import FAILURE, INTERRUPTED, OK, WrongUsage
from protos.client.generation_client import GenerationClient
from protos.client.messages import ModelDescription
from protos.client.server_access import CallerCredentials
from protos.wire.errors import FaultError
from protos.wire.simulated_tokens import SimulatedVocabulary

_START_S = 1.0
"""Until the client processes are up."""
_START_EACH_S = 0.5
_POLL_S = 0.2
_SIMULATED = "simulated"


@dataclass(slots=True)
class _Client:
    process: SpawnProcess
    pipe: Connection
    counts: ClientCounts = field(default_factory=ClientCounts)
    records: list[RequestRecord] | None = None


@dataclass(frozen=True, slots=True)
class _Measured:
    records: list[RequestRecord]
    was_cut: bool


def bench(options: BenchOptions, console: Console) -> int:
    """Measure and show. Returns the exit code: 1 when no request was done, or a token was wrong.

    Raises:
        EngineError: no server answers, or a file cannot be used.
        WrongUsage: options contradict each other.
    """
    check_plot(options.result.plot)
    _check_verify(options)
    plan, source = load_plan(options.load), prompt_source(options.prompt)
    target, credentials = options.server.target, options.server.credentials()
    with GenerationClient(target, credentials=credentials) as client:
        model, workers = client.model(), len(client.load().workers)
    asked = workload(source, model)
    vocabulary = _vocabulary(options, model)
    console.print(_described(plan, model), style="dim", highlight=False)
    measured = _run(target, credentials, plan, asked, vocabulary=vocabulary, console=console)
    figures = bench_figures(measured.records, warm_up=plan.warm_up)
    context = BenchContext(
        target=target,
        model=model.name,
        numerics=model.numerics,
        dtype=model.dtype,
        workers=workers,
        load=plan,
        prompts=options.prompt,
        was_cut=measured.was_cut,
        is_verified=vocabulary is not None,
    )
    _show(figures, context, measured.records, options=options, console=console)
    if measured.was_cut:
        return INTERRUPTED
    return OK if figures.outcomes.get("done") and not figures.wrong else FAILURE


def _show(
    figures: BenchFigures,
    context: BenchContext,
    records: list[RequestRecord],
    *,
    options: BenchOptions,
    console: Console,
) -> None:
    console.print(latency_table(figures))
    console.print(summary_table(figures, is_verified=context.is_verified))
    if options.result.json is not None:
        write_file(options.result.json, as_json(figures, context), field="json")
    if options.result.plot is not None:
        title = f"{context.model} at {context.target}"
        draw_plot(options.result.plot, records, warm_up=context.load.warm_up, title=title)


def _described(plan: LoadPlan, model: ModelDescription) -> str:
    load = f"{plan.concurrency} at once" if plan.concurrency else f"{plan.rate:g} requests/s at random times"
    until = [f"{plan.max_requests} requests"] if plan.max_requests is not None else []
    until += [f"{plan.duration_s:g} s"] if plan.duration_s is not None else []
    return f"{model.name} ({model.numerics}): {load}, {' or '.join(until)}, {plan.processes} client process(es)"


def _check_verify(options: BenchOptions) -> None:
    if options.result.verify and options.prompt.prompts is not None:
        raise WrongUsage("--verify needs made-up prompts, not --prompts")


def _vocabulary(options: BenchOptions, model: ModelDescription) -> SimulatedVocabulary | None:
    if not options.result.verify:
        return None
    if model.numerics != _SIMULATED:
        raise WrongUsage(f"--verify needs a simulated worker; the server's numerics are {model.numerics}")
    return SimulatedVocabulary(model.logits_width, model.eos_token_ids)


def _run(
    target: str,
    credentials: CallerCredentials,
    plan: LoadPlan,
    asked: Workload,
    *,
    vocabulary: SimulatedVocabulary | None,
    console: Console,
) -> _Measured:
    start_at_s = time.monotonic() + _START_S + _START_EACH_S * plan.processes
    jobs = [
        ClientJob(
            target=target,
            credentials=credentials,
            index=index,
            plan=plan,
            workload=asked,
            start_at_s=start_at_s,
            vocabulary=vocabulary,
        )
        for index in range(plan.processes)
    ]
    with _clients(jobs) as clients, console.status("starting clients") as status:
        was_cut = False
        while any(client.records is None for client in clients):
            was_cut = _collect_or_stop(clients, was_cut=was_cut)
            status.update(_progress(clients, time.monotonic() - start_at_s, was_cut=was_cut))
        return _Measured([record for client in clients for record in client.records or ()], was_cut)


def _collect_or_stop(clients: list[_Client], *, was_cut: bool) -> bool:
    """Take what was sent; on Ctrl-C, tell the processes to stop, on a second one end. Whether it was cut."""
    try:
        _collect(clients)
    except KeyboardInterrupt:
        if was_cut:
            raise
        for client in clients:
            _tell_stop(client)
        return True
    return was_cut


@contextmanager
def _clients(jobs: list[ClientJob]) -> Iterator[list[_Client]]:
    """The running processes; whatever is left of them ends with the block."""
    context = multiprocessing.get_context("spawn")
    clients: list[_Client] = []
    try:
        for job in jobs:
            ours, theirs = context.Pipe()
            process = context.Process(target=run_client, args=(job, theirs), name=f"bench client {job.index}")
            process.start()
            theirs.close()
            clients.append(_Client(process, ours))
        yield clients
    finally:
        for client in clients:
            if client.records is None:
                client.process.kill()
            client.process.join()
            client.pipe.close()


def _collect(clients: list[_Client]) -> None:
    """Take what the processes have sent.

    Raises:
        FaultError: one ended without its records.
    """
    waiting = {client.pipe: client for client in clients if client.records is None}
    for ready in wait(list(waiting), timeout=_POLL_S):
        assert isinstance(ready, Connection)
        client = waiting[ready]
        try:
            message = ready.recv()
        except EOFError as error:
            client.process.join()
            text = f"{client.process.name} ended with exit code {client.process.exitcode}"
            raise FaultError(text) from error
        if isinstance(message, ClientCounts):
            client.counts = message
        else:
            client.records = message


def _tell_stop(client: _Client) -> None:
    if client.records is None:
        client.pipe.send(STOP)


def _progress(clients: list[_Client], elapsed_s: float, *, was_cut: bool) -> str:
    sent, ended, failed, tokens = (
        sum(getattr(client.counts, name) for client in clients) for name in ("sent", "ended", "failed", "tokens")
    )
    if elapsed_s < 0:
        return "starting clients"
    state = "stopping" if was_cut else f"{elapsed_s:.0f} s"
    return f"{state}: {sent - ended} running, {ended} ended ({failed} refused or failed), {tokens} tokens"
