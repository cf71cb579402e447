"""The forms of PromQL that panels use, over the board's variables. Names no metric but the two prefixes."""

from k8s.observability.dashboard import Query

_SCHEDULER = "forwardplane_scheduler_"
_WORKER = "forwardplane_worker_"
_WINDOW = "$__rate_interval"
_QUANTILES = ("0.5", "0.9", "0.95", "0.99")


def scheduler(metric: str, *labels: str) -> str:
    """A series of the schedulers that the variables choose: of one namespace and model."""
    return _selector(_SCHEDULER + metric, labels)


def linked(metric: str, *labels: str) -> str:
    """A scheduler's series about one worker."""
    return scheduler(metric, 'worker=~"$worker"', *labels)


def worker(metric: str, *labels: str) -> str:
    """A series of the workers' own."""
    return _selector(_WORKER + metric, labels)


def _selector(name: str, labels: tuple[str, ...]) -> str:
    chosen = ", ".join(('namespace=~"$namespace"', *labels))
    return f"{name}{{{chosen}}}"


def rate(series: str, by: str = "") -> str:
    """What a counter gains a second, summed."""
    return f"{summed_by(by)}(rate({series}[{_WINDOW}]))"


def gained(series: str, by: str = "", *, window: str = "1d") -> str:
    """What a counter gained over the window, summed."""
    return f"{summed_by(by)}(increase({series}[{window}]))"


def total(series: str, by: str = "") -> str:
    """A gauge, summed."""
    return f"{summed_by(by)}({series})"


def summed_by(by: str) -> str:
    """`sum`, keeping these labels."""
    return f"sum by ({by}) " if by else "sum"


def share(part: str, whole: str) -> str:
    """One rate over another."""
    return f"{part} / {whole}"


def mean(histogram: str, by: str = "", *, of: str = "scheduler") -> str:
    """The mean of what a histogram saw."""
    select = worker if of == "worker" else scheduler
    return share(rate(select(f"{histogram}_sum"), by), rate(select(f"{histogram}_count"), by))


def quantiles(histogram: str, *, of: str = "scheduler") -> tuple[Query, ...]:
    """p50, p90, p95 and p99."""
    select = worker if of == "worker" else scheduler
    buckets = rate(select(f"{histogram}_bucket"), "le")
    return tuple(
        Query(expr=f"histogram_quantile({quantile}, {buckets})", legend=f"p{quantile[2:].ljust(2, '0')}")
        for quantile in _QUANTILES
    )


def heatmap(histogram: str) -> tuple[Query, ...]:
    """What a histogram saw, by bucket."""
    return (Query(expr=rate(scheduler(f"{histogram}_bucket"), "le"), legend="{{le}}"),)


def one(expr: str, legend: str = "") -> tuple[Query, ...]:
    """A panel's only query."""
    return (Query(expr=expr, legend=legend),)
