"""What is wrong with a PromQL expression, given what the services register. Parses with a real parser."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import promql_parser as promql
from prometheus_client import CollectorRegistry, Metric

from k8s.observability.recordings import RECORDINGS
from protos.wire.enums import GraphPhase
from protos.wire.worker_info import Buckets
from scheduler_svc.edge.metrics import create_edge_metrics
from scheduler_svc.metrics import create_metrics as create_core_metrics
from worker_svc.executor import CaptureProgress, CaptureTotals
from worker_svc.metrics import DeviceNanoseconds
from worker_svc.metrics import create_metrics as create_worker_metrics

CAPTURES = CaptureProgress(
    buckets=(Buckets(phase=GraphPhase.DECODE, sizes=(1,), live=(1,)),), totals={GraphPhase.DECODE: CaptureTotals()}
)
TARGET_LABELS = frozenset({"namespace", "job", "instance", "pod"})
"""What Prometheus adds to every series."""
OTHERS = {
    "process_start_time_seconds": ("gauge", frozenset()),
    "certmanager_certificate_expiration_timestamp_seconds": ("gauge", frozenset({"name"})),
}
"""Series that are not ours."""
COUNTER_FUNCTIONS = ("rate", "increase", "irate")
GRAFANA = {"$__rate_interval": "5m"}


@dataclass(frozen=True)
class Known:
    """Every series by name: its type (a histogram's series are counters) and its labels."""

    series: dict[str, tuple[str, frozenset[str]]] = field(default_factory=dict)

    def without(self, name: str) -> "Known":
        return Known({key: value for key, value in self.series.items() if key != name})


def registered() -> Known:
    """What the three processes register, as they would export it, and what recording rules make of it."""
    found = dict(OTHERS)
    core, edge, worker = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
    create_core_metrics(core).describe(model="m", architecture="a", weights="w")
    create_edge_metrics(edge)
    workers = create_worker_metrics(worker)
    workers.describe(device="d", dtype="t", numerics="n", kernels="k")
    workers.read_device_time(lambda: DeviceNanoseconds(busy=0, idle=0, bubble=0))
    workers.read_captures(lambda: CAPTURES)
    for registry in (core, edge, worker):
        labels = {
            name: frozenset(made._labelnames)
            for made, names in registry._collector_to_names.items()
            for name in names
            if hasattr(made, "_labelnames")
        }
        for family in registry.collect():
            found |= dict(_series(family, labels))
    known = Known(found)
    for rule in RECORDINGS:
        known.series[rule.record] = ("gauge", output_labels(promql.parse(rule.expr), known) - TARGET_LABELS)
    return known


def _series(family: Metric, labels: dict[str, frozenset[str]]) -> Iterator[tuple[str, tuple[str, frozenset[str]]]]:
    sampled = {label for sample in family.samples for label in sample.labels}
    own = labels.get(family.name, frozenset(sampled))  # a collector of our own names labels by its samples only
    if family.type == "counter":
        yield f"{family.name}_total", ("counter", own)
    elif family.type == "histogram":
        yield f"{family.name}_bucket", ("counter", own | {"le"})
        yield f"{family.name}_sum", ("counter", own)
        yield f"{family.name}_count", ("counter", own)
    elif family.type == "info":
        yield f"{family.name}_info", ("gauge", own | sampled)
    else:
        yield family.name, ("gauge", own)


def problems(expr: str, known: Known, legend: str = "") -> list[str]:
    """One line for each thing that is wrong."""
    for variable, value in GRAFANA.items():
        expr = expr.replace(variable, value)
    try:
        parsed = promql.parse(expr)
    except ValueError as error:
        return [f"does not parse: {error}"]
    found = list(_problems(parsed, known, within=""))
    if found:
        return found
    shown = output_labels(parsed, known)
    named = {piece.partition("}}")[0] for piece in legend.split("{{")[1:]}
    return [f"the legend names {label}, which the series do not have" for label in sorted(named - shown)]


def _problems(node, known: Known, *, within: str) -> Iterator[str]:
    if isinstance(node, promql.VectorSelector):
        yield from _selector_problems(node, known, within)
        return
    is_quantile = isinstance(node, promql.Call) and node.func.name == "histogram_quantile"
    if is_quantile and "le" not in output_labels(node.args[1], known):
        yield "histogram_quantile of series without le"
    if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
        missing = set(node.modifier.labels) - output_labels(node.expr, known)
        yield from (f"grouped by {label}, which the series do not have" for label in sorted(missing))
    name = node.func.name if isinstance(node, promql.Call) else ""
    for child in _children(node):
        yield from _problems(child, known, within=name)


def _selector_problems(node, known: Known, within: str) -> Iterator[str]:
    if node.name not in known.series:
        yield f"{node.name} is not registered"
        return
    kind, labels = known.series[node.name]
    for matcher in node.matchers.matchers:
        if matcher.name not in labels | TARGET_LABELS:
            yield f"{node.name} has no label {matcher.name}"
    if kind == "counter" and within not in COUNTER_FUNCTIONS:
        yield f"{node.name} is a counter without rate()"
    if kind == "gauge" and within in COUNTER_FUNCTIONS:
        yield f"{node.name} is a gauge under {within}()"


def _children(node) -> list:
    if isinstance(node, promql.Call):
        # A range selector stands for its vector, so that the function is what it is within.
        return [item.vector_selector if isinstance(item, promql.MatrixSelector) else item for item in node.args]
    if isinstance(node, promql.BinaryExpr):
        return [node.lhs, node.rhs]
    if isinstance(node, promql.AggregateExpr | promql.ParenExpr | promql.UnaryExpr):
        return [node.expr]
    assert isinstance(node, promql.NumberLiteral | promql.StringLiteral), f"{type(node)} is not known here"
    return []


def output_labels(node, known: Known) -> set[str]:
    """Labels that the result's series have."""
    if isinstance(node, promql.VectorSelector):
        return set(known.series.get(node.name, ("", frozenset()))[1] | TARGET_LABELS)
    if isinstance(node, promql.AggregateExpr):
        return set(node.modifier.labels) if node.modifier is not None else set()
    if isinstance(node, promql.Call) and node.func.name == "histogram_quantile":
        return output_labels(node.args[1], known) - {"le"}
    sides = [labels for labels in (output_labels(child, known) for child in _children(node)) if labels]
    return sides[0] if sides else set()
