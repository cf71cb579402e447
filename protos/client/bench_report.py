"""The figures of a benchmark as a table for people, JSON for programs and a picture. Decides nothing."""

import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from protos.client.bench_figures import BenchFigures, Distribution, inter_token_gaps
from protos.client.bench_options import LoadPlan, PromptOptions
from protos.client.bench_records import RequestRecord
from protos.client.exit_codes import WrongUsage
from protos.wire.errors import InvalidRequest

_PLOT_LIBRARY = "matplotlib"
_BIN_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchContext:
    """What the figures are about."""

    target: str
    model: str
    numerics: str
    dtype: str
    workers: int
    load: LoadPlan
    prompts: PromptOptions
    """Lengths, or the file that was read; the seed."""
    was_cut: bool
    """The user stopped it."""
    is_verified: bool
    """Every token was checked. Else nothing is known of wrong ones."""


def latency_table(figures: BenchFigures) -> Table:
    """One line a quantity, milliseconds."""
    table = Table("ms", "count", "mean", "p50", "p90", "p95", "p99", "max", title="latency")
    latencies = figures.latencies
    for name, values in (
        ("time to first token", latencies.first_token_s),
        ("inter-token", latencies.inter_token_s),
        ("gap between chunks", latencies.chunk_gap_s),
        ("mean per token, by request", latencies.token_mean_s),
        ("whole request", latencies.request_s),
        ("client sent late by", latencies.late_s),
    ):
        if values is not None:
            table.add_row(name, str(values.count), *_milliseconds(values))
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def summary_table(figures: BenchFigures, *, is_verified: bool) -> Table:
    """Requests, tokens and throughput."""
    table = Table(show_header=False, box=None, pad_edge=False)
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(figures.outcomes.items())) or "none"
    table.add_row("measured requests", f"{figures.measured} ({outcomes}); {figures.warm_up} of warm-up left out")
    table.add_row("ended by", ", ".join(f"{name} {count}" for name, count in sorted(figures.reasons.items())))
    table.add_row(
        "tokens", f"{figures.prompt_tokens} prompt ({figures.cached_tokens} cached), {figures.output_tokens} output"
    )
    throughput = figures.throughput
    if throughput is not None:
        table.add_row("requests/s", f"{throughput.requests_per_s:.2f} over {throughput.seconds:.1f} s")
        steady = throughput.steady_output_tokens_per_s
        shown = "" if steady is None else f" ({steady:.1f} while load was complete)"
        table.add_row("output tokens/s", f"{throughput.output_tokens_per_s:.1f}{shown}")
        table.add_row("prompt tokens/s", f"{throughput.prompt_tokens_per_s:.1f}")
    if figures.wrong:
        table.add_row("WRONG TOKENS", f"{figures.wrong} requests")
    elif is_verified:
        table.add_row("verified", f"all {figures.output_tokens} output tokens")
    return table


def as_json(figures: BenchFigures, context: BenchContext) -> str:
    """Everything, seconds throughout."""
    content: dict[str, Any] = {"context": asdict(context), **asdict(figures)}
    return json.dumps(content, indent=2, default=os.fspath) + "\n"


def write_file(path: Path, text: str, *, field: str) -> None:
    """Write a result.

    Raises:
        InvalidRequest: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path.name} cannot be written: {error.strerror}", field=field) from error


def check_plot(path: Path | None) -> None:
    """Say before the run, not after it, that there can be no picture.

    Raises:
        WrongUsage: no PNG, or no library that draws.
    """
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise WrongUsage("--plot takes the path of a .png file")
    if find_spec(_PLOT_LIBRARY) is None:
        raise WrongUsage("--plot needs matplotlib: pip install 'forwardplane[plot]'")


def draw_plot(path: Path, records: Sequence[RequestRecord], *, warm_up: int, title: str) -> None:
    """Four pictures in one file: both latencies as shares of requests, throughput and first-token time over the run.

    Raises:
        InvalidRequest: the file cannot be written.
    """
    pyplot = importlib.import_module(f"{_PLOT_LIBRARY}.figure")
    figure = pyplot.Figure(figsize=(11, 8), layout="constrained")
    (first, gaps), (tokens, over_time) = figure.subplots(2, 2)
    measured = [record for record in records if record.number >= warm_up and record.chunk_tokens]
    first_ms = np.array([record.chunk_times_s[0] - record.due_s for record in measured]) * 1e3
    gaps_ms = np.concatenate([np.zeros(0), *(inter_token_gaps(record) for record in measured)]) * 1e3
    _draw_shares(first, first_ms, "time to first token, ms")
    _draw_shares(gaps, gaps_ms, "inter-token latency, ms")
    times = np.concatenate([np.zeros(0), *(np.array(record.chunk_times_s) for record in records)])
    counts = np.concatenate([np.zeros(0), *(np.array(record.chunk_tokens) for record in records)])
    edges = np.arange(0, max(times.max(initial=0), _BIN_S) + _BIN_S, _BIN_S)
    tokens.stairs(np.histogram(times, edges, weights=counts)[0] / _BIN_S, edges)
    tokens.set(xlabel="s", ylabel="output tokens/s", ylim=(0, None))
    over_time.plot([record.due_s for record in measured], first_ms, ".", markersize=3)
    over_time.set(xlabel="s", ylabel="time to first token, ms", ylim=(0, None))
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise InvalidRequest(f"{path.name} cannot be written: {error.strerror}", field="plot") from error


def _draw_shares(axes: Any, values: np.ndarray, label: str) -> None:
    """Share of values at or below each."""
    axes.plot(np.sort(values), (np.arange(len(values)) + 1) / max(len(values), 1))
    axes.set(xlabel=label, ylabel="share", ylim=(0, 1))
    axes.grid(visible=True, alpha=0.3)


def _milliseconds(values: Distribution) -> list[str]:
    parts = (values.mean, values.p50, values.p90, values.p95, values.p99, values.max)
    return [f"{part * 1e3:.2f}" for part in parts]
