"""`forwardplane demo`: everything once, from fetching the model to a streamed answer and an orderly end.

The summary's figures come from the answer's own chunks and from `GetLoad`; nothing is estimated.
"""

import signal
import threading
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from protos.client.generation_client import GenerationClient
from protos.client.load_messages import WorkerLoad
from protos.client.messages import Chat, GenerateOptions, Usage
from protos.client.process_group import ProcessGroup
from protos.client.serve_command import ServeOptions, resolve_model, service_commands, start_serving
from protos.client.status_command import graph_rows
from protos.wire.errors import InternalFault

QUESTION = "What is the capital of France, and what is it famous for?"
MAX_TOKENS = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFigures:
    """What one streamed answer measured, at the client."""

    first_token_s: float
    duration_s: float
    usage: Usage

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second after the first."""
        return (self.usage.output_tokens - 1) / max(self.duration_s - self.first_token_s, 1e-9)


def demo(options: ServeOptions, question: str, console: Console) -> int:
    """Start, ask, stream, sum up, stop. Returns the exit code.

    Raises:
        EngineError: some step failed.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    group = ProcessGroup()
    begin = time.monotonic()
    try:
        group.start(service_commands(options, resolve_model(options, console)))
        start_serving(group, console, threading.Event())
        console.print(f"services ready after {time.monotonic() - begin:.1f} s", style="dim", highlight=False)
        with GenerationClient(f"{options.ports.host}:{options.ports.port}") as client:
            console.print(f"\n> {question}\n", style="bold", highlight=False)
            figures = stream_answer(client, Chat.user(question), console)
            since_start_s = time.monotonic() - begin - figures.duration_s + figures.first_token_s
            console.print(summary(figures, since_start_s, client.load().workers))
    finally:
        code = group.stop()
    return 0 if code == 0 else 1


def stream_answer(client: GenerationClient, prompt: Chat, console: Console) -> AnswerFigures:
    """Print an answer as it arrives; returns what it took.

    Raises:
        EngineError: the stream failed or ended without its last chunk.
    """
    begin = time.monotonic()
    first_token_s = 0.0
    usage: Usage | None = None
    for chunk in client.stream(prompt, GenerateOptions(max_tokens=MAX_TOKENS, temperature=0.0)):
        if chunk.token_ids and not first_token_s:
            first_token_s = time.monotonic() - begin
        console.out(chunk.text, end="", highlight=False)
        usage = chunk.usage or usage
    console.out("\n")
    if usage is None:
        raise InternalFault("the stream ended without its last chunk")
    return AnswerFigures(first_token_s=first_token_s, duration_s=time.monotonic() - begin, usage=usage)


def summary(figures: AnswerFigures, since_start_s: float, workers: tuple[WorkerLoad, ...]) -> Table:
    """The figures of one answer and of the plans behind it."""
    plans = sum(worker.plans for worker in workers)
    rows = sum(worker.plan_rows for worker in workers)
    plan_bytes = sum(worker.plan_bytes for worker in workers)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("prompt, output tokens", f"{figures.usage.prompt_tokens}, {figures.usage.output_tokens}")
    table.add_row("time to first token", f"{figures.first_token_s * 1e3:.0f} ms")
    table.add_row("first token after start", f"{since_start_s:.1f} s")
    table.add_row("tokens/s", f"{figures.tokens_per_s:.1f}")
    table.add_row("plans", f"{plans}")
    table.add_row("rows a plan", f"{rows / max(plans, 1):.2f}")
    table.add_row("bytes a plan", f"{plan_bytes / max(plans, 1):.0f}")
    for line in graph_rows(workers):
        table.add_row(*line)
    return table
