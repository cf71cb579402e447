"""`forwardplane plan-capacity`: from measured steps to workers, pages, buckets and the latency to expect.

Reads files, shows tables. What it decides is in `capacity_plan.py`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, validators
from rich.console import Console
from rich.table import Table

from protos.client.bench_report import write_file
from protos.client.bench_workload import parse_lengths
from protos.client.capacity_bench_fit import fit_bench_runs
from protos.client.capacity_costs import FIELD, FittedCost, StepCost, TableCost, fit_cost
from protos.client.capacity_plan import MAX_WORKERS, Demand, Expected, Targets, expect, fewest_workers
from protos.client.capacity_simulation import WorkerShape
from protos.client.capacity_sources import full_pool_pages, read_bench_run, read_recordings, source_kind
from protos.client.exit_codes import OK, REFUSED, WrongUsage
from protos.service.step_times import read_step_times
from protos.wire.limits import MAX_PLAN_ROWS, MAX_PLAN_TOKENS
from protos.wire.step_budget import GPU_BUDGET, step_budget
from protos.wire.worker_info import WorkerInfo

_SPARE_PAGES_RATIO = 0.1
Positive = Annotated[float, Parameter(validator=validators.Number(gt=0))]
Ratio = Annotated[float, Parameter(validator=validators.Number(gte=0, lt=1))]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class DemandOptions:
    """What all callers together ask for."""

    rate: Positive | None = None
    """Requests per second, at random times."""
    concurrency: Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=1_000_000))] = None
    """Requests at once, each followed by the next, in place of --rate."""
    prompt_tokens: str = "256"
    """Length of prompts: `256`, `64-1024` (even) or `lognormal:256:0.7` (median, sigma)."""
    output_tokens: str = "128"
    """Length of answers, in the same forms."""
    cached_ratio: Ratio = 0.0
    """Share of prompt tokens found in a prefix cache, 0 to 1."""
    headroom_ratio: Annotated[float, Parameter(validator=validators.Number(gte=0, lte=10))] = 0.0
    """Further load that must fit: 0.3 plans for 30 % more than asked."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """What callers are promised, as 95th percentiles."""

    inter_token_ms: Positive = 100.0
    """Time between two tokens of an answer."""
    first_token_ms: Positive = 2000.0
    """Time to the first token, waiting included."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimitsOptions:
    """What a worker is like where the sources do not say, or another one is meant."""

    num_pages: Annotated[int | None, Parameter(validator=validators.Number(gte=2))] = None
    """KV pages of a worker. Default: the recorded worker's, or what the table's memory gives; else without bound."""
    page_size: Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=1024))] = None
    """Tokens of a page. Default: the recorded worker's, else 16."""
    max_rows: Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=MAX_PLAN_ROWS))] = None
    """Most requests that run on a worker at once. Default: the recorded worker's, else 256."""
    budget_tokens: Annotated[int | None, Parameter(validator=validators.Number(gte=16, lte=MAX_PLAN_TOKENS))] = None
    """Prefill tokens of a plan, fixed. Default: what fits 250 ms on a CPU, 50 ms elsewhere."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOptions:
    """What to plan for."""

    demand: DemandOptions = field(default_factory=DemandOptions)
    """What all callers together ask for."""
    targets: TargetOptions = field(default_factory=TargetOptions)
    """What callers are promised."""
    worker: WorkerLimitsOptions = field(default_factory=WorkerLimitsOptions)
    """What a worker is like."""
    workers: Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=MAX_WORKERS))] = None
    """Say what so many workers give, instead of searching for the fewest."""
    json: Path | None = None
    """Write everything as JSON, too."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What the sources say."""

    cost: StepCost
    worker: WorkerShape
    origin: str
    fit: FittedCost | None


def plan_capacity(sources: Sequence[Path], options: CapacityOptions, console: Console) -> int:
    """Plan and show. Returns the exit code: 3 when so many --workers do not keep the promises.

    Raises:
        EngineError: a source cannot be used, or no number of workers keeps the promises.
        WrongUsage: options contradict each other.
    """
    demand, targets = _demand(options.demand), _targets(options.targets)
    with console.status("reading"):
        known = _known(sources, options.worker)
    with console.status("simulating"):
        found = _found(demand, targets, known, workers=options.workers)
    chosen = next(line for line in found if options.workers is not None or line.meets(targets))
    console.print(known.origin, style="dim", highlight=False)
    console.print(_table(found, targets, chosen))
    console.print(_advice(chosen, known))
    if options.json is not None:
        write_file(options.json, _as_json(found, chosen, known=known, options=options), field="json")
    return OK if chosen.meets(targets) else REFUSED


def _found(demand: Demand, targets: Targets, known: _Known, *, workers: int | None) -> list[Expected]:
    """Ascending by workers: the asked number, or the fewest with its neighbours."""
    if workers is not None:
        return [expect(demand, workers, worker=known.worker, cost=known.cost)]
    fewest = fewest_workers(demand, targets, worker=known.worker, cost=known.cost)
    neighbours = [fewest.workers - 1, fewest.workers, fewest.workers + 1]
    return [
        fewest if number == fewest.workers else expect(demand, number, worker=known.worker, cost=known.cost)
        for number in neighbours
        if number >= 1
    ]


def _demand(options: DemandOptions) -> Demand:
    if (options.rate is None) == (options.concurrency is None):
        raise WrongUsage("say how much load there is: either --rate (requests a second) or --concurrency (at once)")
    return Demand(
        rate=options.rate,
        concurrency=options.concurrency,
        prompt=parse_lengths(options.prompt_tokens, flag="--prompt-tokens"),
        output=parse_lengths(options.output_tokens, flag="--output-tokens"),
        cached_ratio=options.cached_ratio,
        headroom_ratio=options.headroom_ratio,
    )


def _targets(options: TargetOptions) -> Targets:
    return Targets(
        inter_token_p95_s=options.inter_token_ms / 1e3,
        first_token_p95_s=options.first_token_ms / 1e3,
    )


def _known(sources: Sequence[Path], options: WorkerLimitsOptions) -> _Known:
    """What the files say, by their kind.

    Raises:
        WrongUsage: none, or of several kinds.
    """
    if not sources:
        raise WrongUsage("name a recording (`serve --record`), figures (`bench --json`) or a .toml table of step times")
    kinds = {source_kind(path) for path in sources}
    if len(kinds) > 1:
        raise WrongUsage(f"sources are of one kind at a time, these are {' and '.join(sorted(kinds))}")
    match kinds.pop():
        case "recording":
            return _of_recordings(sources, options)
        case "bench":
            return _of_bench_runs(sources, options)
        case _:
            return _of_table(sources, options)


def _of_recordings(sources: Sequence[Path], options: WorkerLimitsOptions) -> _Known:
    recorded = read_recordings(sources)
    fit = fit_cost(recorded.steps)
    origin = (
        f"{recorded.info.model_name} on {recorded.info.device} ({recorded.info.numerics}): {_fit_text(fit, 'steps')}"
    )
    return _Known(fit.cost, _chosen(_recorded_worker(recorded.info), options), origin, fit)


def _recorded_worker(info: WorkerInfo) -> WorkerShape:
    return WorkerShape(
        page_size=info.sub_pools[0].page_size,
        num_pages=full_pool_pages(info),
        max_rows=info.limits.max_rows,
        max_tokens=info.limits.max_tokens,
        window=info.limits.window,
        budget=step_budget(info.device),
    )


def _of_bench_runs(sources: Sequence[Path], options: WorkerLimitsOptions) -> _Known:
    worker = _chosen(WorkerShape(), options)
    fit = fit_bench_runs([read_bench_run(path) for path in sources], worker)
    return _Known(fit.cost, worker, f"{len(sources)} figures: {_fit_text(fit, 'requests')}", fit)


def _of_table(sources: Sequence[Path], options: WorkerLimitsOptions) -> _Known:
    if len(sources) > 1:
        raise WrongUsage(f"one table at a time, not {len(sources)}")
    table = read_step_times(sources[0], field=FIELD)
    page_size = options.page_size or WorkerShape().page_size
    pages = table.kv_bytes // (table.kv_bytes_per_token * page_size)
    worker = WorkerShape(num_pages=pages, budget=GPU_BUDGET, max_tokens=GPU_BUDGET.most_tokens)
    return _Known(TableCost(table), _chosen(worker, options), f"{table.name}: a table, nothing measured here", None)


def _fit_text(fit: FittedCost, unit: str) -> str:
    cost = fit.cost
    prices = (
        f"{cost.base_s * 1e3:.3g} ms a step",
        f"{cost.decode_row_s * 1e3:.3g} a decode row",
        f"{cost.prefill_token_s * 1e3:.3g} a prompt token",
        f"{cost.context_token_s * 1e6:.3g} for 1000 tokens of context",
    )
    return f"{' + '.join(prices)}; {fit.steps} {unit}, median error {fit.error_ratio:.0%}"


def _chosen(worker: WorkerShape, options: WorkerLimitsOptions) -> WorkerShape:
    """With what the user says."""
    given: dict[str, int | None] = {
        "num_pages": None if options.num_pages is None else options.num_pages - 1,  # without the sink
        "page_size": options.page_size,
        "max_rows": options.max_rows,
        "budget_tokens": options.budget_tokens,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(worker, **changes)


def _table(found: Sequence[Expected], targets: Targets, chosen: Expected) -> Table:
    columns = ("workers", "rows a step", "output tokens/s", "busy", "inter-token ms p50 p95", "first token ms p50 p95")
    table = Table(*columns, "pages a worker", "keeps the promises", title="expected")
    for line in found:
        table.add_row(
            str(line.workers),
            f"{line.rows_mean:.1f}",
            f"{line.output_tokens_per_s:.1f}",
            f"{line.utilisation_ratio:.0%}",
            f"{line.inter_token_p50_s * 1e3:.1f} {line.inter_token_p95_s * 1e3:.1f}",
            f"{line.first_token_p50_s * 1e3:.0f} {line.first_token_p95_s * 1e3:.0f}",
            str(line.pages_peak),
            "yes" if line.meets(targets) else "no",
            style="bold" if line is chosen else None,
        )
    return table


def suggested_pages(chosen: Expected) -> int:
    """For `--num-pages` of a worker: what requests hold, a tenth more, and the sink."""
    return int(chosen.pages_peak * (1 + _SPARE_PAGES_RATIO)) + 2


def _advice(chosen: Expected, known: _Known) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    room = known.worker.num_pages
    held = "" if room is None else f"; this worker has {room + 1}"
    table.add_row("--num-pages", f"{suggested_pages(chosen)} for running requests{held}. More pages keep more prefixes")
    for phase in ("decode", "prefill"):
        uses = [use for use in chosen.buckets if use.phase == phase]
        share = sum(use.share for use in uses)
        sizes = ",".join(str(use.size) for use in uses) or "none"
        table.add_row(f"--{phase}-buckets", f"{sizes} ({share:.0%} of the plans)")
    table.add_row("padding", f"{chosen.padding_ratio:.1%} of what those buckets compute")
    return table


def _as_json(found: Sequence[Expected], chosen: Expected, *, known: _Known, options: CapacityOptions) -> str:
    fit = known.fit
    content: dict[str, Any] = {
        "demand": asdict(options.demand),
        "targets": asdict(options.targets),
        "worker": asdict(known.worker),
        "origin": known.origin,
        "fit_error_ratio": None if fit is None else fit.error_ratio,
        "chosen": {**asdict(chosen), "num_pages": suggested_pages(chosen)},
        "expected": [asdict(line) for line in found],
    }
    return json.dumps(content, indent=2) + "\n"
