"""Every metric of the worker process, declared once. Labels come from enums and from captured bucket sizes only.

Knows nothing of who measures, except that device time is read from the device thread's own counters at each scrape.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protos.service.histogram_buckets import WORKER_HISTOGRAMS, BucketTable
from protos.service.histogram_metrics import Histograms
from protos.wire.enums import ForwardMode, GraphPhase, GraphRefusal
from worker_svc.executor import CaptureProgress

PREFIX = "forwardplane_worker_"
_NS = 1e-9
_BUCKET = ("phase", "bucket")


class PlanOutcome(StrEnum):
    """What became of a plan that arrived for the first time."""

    EXECUTED = "executed"
    REJECTED = "rejected"
    """Refused before the device was touched."""
    UNREADABLE = "unreadable"
    """Its checksum or envelope could not be read; the stream ended."""
    FAILED = "failed"
    """The device failed under it."""


class MemoryKind(StrEnum):
    """What memory is used for."""

    WEIGHTS = "weights"
    KV = "kv"
    GRAPHS = "graphs"
    """What captured graphs share."""
    FREE = "free"
    """Of the device, as nobody has it."""
    RESIDENT = "resident"
    """Of the whole process, in the host's memory."""


class StartupStage(StrEnum):
    """What a start takes time for."""

    LOAD = "load"
    """Until the device can run plans: libraries, weights, pools."""
    CAPTURE = "capture"
    """Spent on graphs so far, beside serving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNanoseconds:
    """Where the device thread's time went."""

    busy: int
    idle: int
    bubble: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMetrics:
    """Plans and forwards."""

    plans: Counter
    forwards: Counter
    forward_seconds: Histogram
    sample_seconds: Histogram
    h2d_seconds: Histogram
    parse_seconds: Histogram
    batch_rows: Histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMetrics:
    """Replays, the reasons of their absence, and padding."""

    replays: Counter
    misses: Counter
    padded_tokens: Counter
    real_tokens: Counter
    forward_tokens: Histogram
    """Of replays and misses alike: what `forwardplane buckets advise` reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMetrics:
    """The worker as a whole."""

    memory_bytes: Gauge
    nan_rows: Counter
    canary_hits: Counter
    fatal_errors: Counter
    startup_seconds: Gauge
    build: Info
    weights: Info


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMetrics:
    """All of them. Made by the composition root."""

    plans: PlanMetrics
    graphs: GraphMetrics
    process: ProcessMetrics
    registry: CollectorRegistry

    def count_plan(self, outcome: PlanOutcome) -> None:
        """One plan came to this end."""
        self.plans.plans.labels(outcome).inc()

    def forward_ran(self, mode: ForwardMode, *, seconds: float) -> None:
        """One forward of a plan."""
        label = mode.name.lower()
        self.plans.forwards.labels(label).inc()
        self.plans.forward_seconds.labels(label).observe(seconds)

    def graph_missed(self, phase: GraphPhase, reason: GraphRefusal, *, real: int) -> None:
        """A forward of so many real units ran eagerly."""
        self.graphs.misses.labels(phase.name.lower(), reason.name.lower()).inc()
        self.graphs.forward_tokens.labels(phase.name.lower()).observe(real)

    def graph_replayed(self, phase: GraphPhase, bucket: int, *, real: int, padded: int) -> None:
        """A forward was replayed, with so many real and padding units of the bucket."""
        labels = (phase.name.lower(), str(bucket))
        self.graphs.replays.labels(*labels).inc()
        self.graphs.real_tokens.labels(*labels).inc(real)
        self.graphs.padded_tokens.labels(*labels).inc(padded)
        self.graphs.forward_tokens.labels(phase.name.lower()).observe(real)

    def describe(self, *, device: str, dtype: str, numerics: str, kernels: str) -> None:
        """Say once what this process is."""
        values = {"device": device, "dtype": dtype, "numerics": numerics, "kernels": kernels}
        self.process.build.info({"version": metadata.version("forwardplane"), **values})

    def read_device_time(self, device_ns: Callable[[], DeviceNanoseconds]) -> None:
        """Export these counters of the device thread, read at each scrape."""
        self.registry.register(_DeviceTime(device_ns))

    def read_memory(self, weights_bytes: int, free_bytes: Callable[[], int]) -> None:
        """Export what the weights take, and what is free at each scrape."""
        self.process.memory_bytes.labels(MemoryKind.WEIGHTS).set(weights_bytes)
        self.process.memory_bytes.labels(MemoryKind.FREE).set_function(free_bytes)

    def read_captures(self, progress: Callable[[], CaptureProgress]) -> None:
        """Export what captures have come to, read at each scrape."""
        self.registry.register(_Captures(progress))
        graphs = self.process.memory_bytes.labels(MemoryKind.GRAPHS)
        graphs.set_function(lambda: sum(entry.graph_bytes for entry in progress().totals.values()))
        seconds = self.process.startup_seconds.labels(StartupStage.CAPTURE)
        seconds.set_function(lambda: sum(entry.seconds for entry in progress().totals.values()))


class _DeviceTime(Collector):
    def __init__(self, device_ns: Callable[[], DeviceNanoseconds]) -> None:
        self._device_ns = device_ns

    def collect(self) -> Iterable[Metric]:
        spent = self._device_ns()
        for name, text, value in (
            ("busy", "Time the device thread spent on plans and resets.", spent.busy),
            ("idle", "Time the device thread waited for a plan.", spent.idle),
            ("bubble", "Of the idle time, what came before a plan that carries on the plan before it.", spent.bubble),
        ):
            yield CounterMetricFamily(f"{PREFIX}{name}_seconds", text, value=value * _NS)


class _Captures(Collector):
    def __init__(self, progress: Callable[[], CaptureProgress]) -> None:
        self._progress = progress

    def collect(self) -> Iterable[Metric]:
        captured = GaugeMetricFamily(f"{PREFIX}captured_graphs", "Graphs that can be replayed.", labels=["phase"])
        memory = GaugeMetricFamily(f"{PREFIX}graph_memory_bytes", "Memory of captured graphs.", labels=["phase"])
        failed = CounterMetricFamily(f"{PREFIX}failed_captures", "Graphs that could not be captured.", labels=["phase"])
        seconds = CounterMetricFamily(f"{PREFIX}capture_seconds", "Time spent on capturing graphs.", labels=["phase"])
        live = GaugeMetricFamily(
            f"{PREFIX}graph_bucket_live", "Each bucket that is captured: 1 live, 0 not yet or dead.", labels=_BUCKET
        )
        progress = self._progress()
        for entry in progress.buckets:
            for size in entry.sizes:
                live.add_metric([entry.phase.name.lower(), str(size)], size in entry.live)
        for phase, totals in progress.totals.items():
            labels = [phase.name.lower()]
            captured.add_metric(labels, totals.captured)
            memory.add_metric(labels, totals.graph_bytes)
            failed.add_metric(labels, totals.failed)
            seconds.add_metric(labels, totals.seconds)
        return (captured, memory, failed, seconds, live)


def create_metrics(registry: CollectorRegistry, buckets: BucketTable = WORKER_HISTOGRAMS) -> WorkerMetrics:
    """All metrics of the worker process, registered."""
    histogram = Histograms(PREFIX, registry, buckets)
    return WorkerMetrics(
        plans=_plan_metrics(registry, histogram),
        graphs=_graph_metrics(registry, histogram),
        process=_process_metrics(registry),
        registry=registry,
    )


def _plan_metrics(registry: CollectorRegistry, histogram: Histograms) -> PlanMetrics:
    counter = _Counters(registry)
    return PlanMetrics(
        plans=counter("plans", "Plans by what became of them.", "outcome"),
        forwards=counter("forwards", "Forwards; a plan holds one or more.", "mode"),
        forward_seconds=histogram("forward_seconds", "Time of one forward.", "mode"),
        sample_seconds=histogram("sample_seconds", "Time sampling took in one plan."),
        h2d_seconds=histogram("h2d_seconds", "Time one plan's columns took to the device."),
        parse_seconds=histogram("plan_parse_seconds", "Time to decode and validate a plan."),
        batch_rows=histogram("batch_rows", "Rows of a plan."),
    )


def _graph_metrics(registry: CollectorRegistry, histogram: Histograms) -> GraphMetrics:
    counter = _Counters(registry)
    return GraphMetrics(
        replays=counter("graph_replays", "Forwards that replayed a captured graph.", *_BUCKET),
        misses=counter("graph_misses", "Forwards that ran eagerly, by the reason.", "phase", "reason"),
        padded_tokens=counter("graph_padded_tokens", "Padding units of replayed buckets.", *_BUCKET),
        real_tokens=counter("graph_real_tokens", "Real units of replayed buckets.", *_BUCKET),
        forward_tokens=histogram("forward_tokens", "Rows of decode forwards, tokens of others.", "phase"),
    )


def _process_metrics(registry: CollectorRegistry) -> ProcessMetrics:
    counter = _Counters(registry)
    return ProcessMetrics(
        memory_bytes=Gauge(f"{PREFIX}memory_bytes", "Memory by use.", ["kind"], registry=registry),
        nan_rows=counter("nan_rows", "Rows whose last hidden state was not finite."),
        canary_hits=counter("canary_hits", "Rows whose KV slots did not hold their own tokens."),
        fatal_errors=counter("fatal_errors", "Errors that ended the process."),
        startup_seconds=Gauge(
            f"{PREFIX}startup_seconds", "Time of each stage of the start.", ["stage"], registry=registry
        ),
        build=Info(f"{PREFIX}build", "Version, device, numbers and kernels.", registry=registry),
        weights=Info(f"{PREFIX}weights", "Model name and fingerprints.", registry=registry),
    )


@dataclass(frozen=True, slots=True)
class _Counters:
    registry: CollectorRegistry

    def __call__(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)
