"""`forwardplane buckets advise`: which bucket sizes would pad least for the forwards that workers have run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators
from rich.console import Console
from rich.table import Table

from protos.client.bucket_advice import Fit, Histogram, PhaseAdvice, advise
from protos.client.bucket_sources import Observed, add_metrics, add_plans
from protos.client.exit_codes import OK, WrongUsage
from protos.wire.bucket_lists import default_sizes, shown
from protos.wire.enums import GraphPhase
from protos.wire.errors import InvalidRequest
from protos.wire.limits import MAX_PLAN_ROWS, MAX_PLAN_TOKENS

_FIELDS = {GraphPhase.DECODE: "max_rows", GraphPhase.PREFILL: "max_tokens"}
_MOST = {GraphPhase.DECODE: MAX_PLAN_ROWS, GraphPhase.PREFILL: MAX_PLAN_TOKENS}


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceOptions:
    """What was seen, and what may be captured."""

    from_metrics: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = ()
    """Metrics of a worker: a URL such as http://127.0.0.1:9465/metrics, or a file of the text. Several are added up."""
    from_plans: Annotated[tuple[Path, ...], Parameter(negative="", show_default=False)] = ()
    """Recordings of `serve --record`. Several are added up."""
    max_graphs: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None
    """Most graphs, of all phases together. Default: as many as now."""
    max_rows: Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=MAX_PLAN_ROWS))] = None
    """Largest decode graph. Default: the largest of now; larger forwards stay eager."""
    max_tokens: Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=MAX_PLAN_TOKENS))] = None
    """Largest prefill graph. Default: the largest of now."""


def buckets_advise(options: AdviceOptions, console: Console) -> int:
    """Print the advice. Returns the exit code.

    Raises:
        WrongUsage: no source is named, or two kinds.
        InvalidRequest: a source cannot be read or holds no forwards, or there are too few graphs for two phases.
    """
    observed = _observed(options)
    forwards: dict[GraphPhase, Histogram] = dict(observed.forwards)
    now = dict(observed.sizes())
    what = "now"
    if now:
        # A phase without graphs is off by choice.
        forwards = {phase: found for phase, found in forwards.items() if phase in now}
    else:
        what = "default"
        now = {phase: default_sizes(phase, limit=_MOST[phase], device=observed.device) for phase in forwards}
    limits = {phase: getattr(options, _FIELDS[phase]) or sizes[-1] for phase, sizes in now.items()}
    forwards = {phase: found for phase, found in forwards.items() if any(size <= limits[phase] for size in found)}
    if not forwards:
        raise InvalidRequest("the source holds no forwards that a graph could replay", field="from")
    max_graphs = options.max_graphs or sum(len(now[phase]) for phase in forwards)
    if max_graphs < len(forwards):
        raise InvalidRequest(
            f"max-graphs is {max_graphs}, and {len(forwards)} phases have forwards", field="max_graphs"
        )
    advices = advise(forwards, now=now, limits=limits, max_graphs=max_graphs)
    if observed.note:
        console.print(observed.note, style="yellow", highlight=False, markup=False)
    if what == "default":
        console.print("no graphs are captured there now: default is what would be", style="yellow", highlight=False)
    console.print(advice_table(advices, what=what))
    console.print(_conclusion(advices), highlight=False, soft_wrap=True)
    for advice in advices:
        if advice.advised.buckets[-1] < advice.now.buckets[-1]:
            console.print(_warning(advice), highlight=False)
    return OK


def _observed(options: AdviceOptions) -> Observed:
    if bool(options.from_metrics) == bool(options.from_plans):
        raise WrongUsage("name where the forwards are known from: --from-metrics or --from-plans")
    observed = Observed()
    for source in options.from_metrics:
        add_metrics(observed, source)
    for path in options.from_plans:
        add_plans(observed, path)
    return observed


def advice_table(advices: tuple[PhaseAdvice, ...], *, what: str) -> Table:
    """Two lines a phase: the present list, named `what`, and the advised one."""
    table = Table("phase", "list", "graphs", "forwards replayed", "real tokens", "padded tokens", "padding")
    table.add_column("buckets", overflow="fold")
    for advice in advices:
        for name, found in ((what, advice.now), ("advised", advice.advised)):
            table.add_row(*_cells(advice, name, found))
    return table


def _cells(advice: PhaseAdvice, name: str, found: Fit) -> tuple[str, ...]:
    return (
        advice.phase.name.lower(),
        name,
        str(len(found.buckets)),
        f"{found.replayed} of {advice.forwards}",
        str(advice.real),
        str(found.padded),
        f"{_share(found.padded, advice.real + found.padded):.1%}",
        shown(found.buckets),
    )


def _conclusion(advices: tuple[PhaseAdvice, ...]) -> str:
    saved = sum(advice.saved for advice in advices)
    computed = sum(advice.real + advice.now.padded for advice in advices)
    flags = " ".join(f"--{advice.phase.name.lower()}-buckets {shown(advice.advised.buckets)}" for advice in advices)
    word, change = ("saves", saved) if saved >= 0 else ("with fewer graphs costs", -saved)
    return f"{word} {change} of {computed} computed tokens ({_share(change, computed):.1%}): {flags}"


def _warning(advice: PhaseAdvice) -> str:
    last = advice.advised.buckets[-1]
    return f"{advice.phase.name.lower()}: nothing above {last} was seen, and with this list it would run eagerly"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
