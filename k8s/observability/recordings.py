"""The recording rules: ratios that alerts and dashboards share. Knows nothing of who reads them."""

from types import MappingProxyType

from k8s.observability.rule import RecordingRule

SLO_SECONDS = "2.5"
"""The first token's limit; a bound of its histogram's buckets."""
SLO_TARGET = 0.99
"""Share of requests that must keep the limit."""
BURN_WINDOWS = ("5m", "30m", "1h", "6h")

_SCHEDULER = "forwardplane_scheduler_"
_WORKER = "forwardplane_worker_"
# Eager by choice, or for as long as a start takes: no fault of the buckets.
_WANTED_MISSES = 'reason!~"disabled|not_captured_yet"'


def late_first_tokens(window: str) -> str:
    """Name of the share of requests whose first token came late, over `window`."""
    return f"namespace:{_SCHEDULER}late_first_tokens:ratio_rate{window}"


def _late_first_tokens(window: str) -> RecordingRule:
    metric = f"{_SCHEDULER}time_to_first_token_seconds"
    kept = f'sum by (namespace) (rate({metric}_bucket{{le="{SLO_SECONDS}"}}[{window}]))'
    return RecordingRule(
        record=late_first_tokens(window), expr=f"1 - {kept} / sum by (namespace) (rate({metric}_count[{window}]))"
    )


def _share(part: str, rest: str, by: str) -> str:
    """`part` of `part + rest`; where one of the two has no series yet it counts as 0."""
    whole = f"({part} or 0 * {rest}) + ({rest} or 0 * {part})"
    return f"sum by ({by}) ({part} or 0 * {rest}) / sum by ({by}) ({whole})"


def _rate(metric: str, by: str, labels: str = "") -> str:
    selector = f"{{{labels}}}" if labels else ""
    return f"sum by ({by}) (rate({_WORKER}{metric}{selector}[5m]))"


NAMES = MappingProxyType(
    {
        "graph_miss_share": f"namespace:{_WORKER}graph_misses:ratio_rate5m",
        "padding_share": f"namespace_bucket:{_WORKER}graph_padded_tokens:ratio_rate5m",
        "overhead_p99": f"namespace_worker:{_SCHEDULER}plan_overhead_seconds:p99_rate5m",
        "forward_mean": f"namespace:{_WORKER}forward_seconds:mean_rate5m",
        "queue_p95": f"namespace:{_SCHEDULER}queue_seconds:p95_rate5m",
        "loop_lag_p99": f"namespace:{_SCHEDULER}loop_lag_seconds:p99_rate5m",
        "bubble_share": f"namespace_instance:{_WORKER}bubble_seconds:ratio_rate5m",
    }
)
"""The other recorded series, by what they hold."""


def _quantile(quantile: str, metric: str, by: str) -> str:
    return f"histogram_quantile({quantile}, sum by ({by}, le) (rate({_SCHEDULER}{metric}_bucket[5m])))"


def _recorded(name: str, expr: str) -> RecordingRule:
    return RecordingRule(record=NAMES[name], expr=expr)


RECORDINGS: tuple[RecordingRule, ...] = (
    *(_late_first_tokens(window) for window in BURN_WINDOWS),
    _recorded(
        "graph_miss_share",
        _share(
            _rate("graph_misses_total", "namespace", _WANTED_MISSES),
            _rate("graph_replays_total", "namespace"),
            "namespace",
        ),
    ),
    _recorded(
        "padding_share",
        _share(
            _rate("graph_padded_tokens_total", "namespace, phase, bucket"),
            _rate("graph_real_tokens_total", "namespace, phase, bucket"),
            "namespace, phase, bucket",
        ),
    ),
    _recorded("overhead_p99", _quantile("0.99", "plan_overhead_seconds", "namespace, worker")),
    _recorded(
        "forward_mean", f"{_rate('forward_seconds_sum', 'namespace')} / {_rate('forward_seconds_count', 'namespace')}"
    ),
    _recorded("queue_p95", _quantile("0.95", "queue_seconds", "namespace")),
    _recorded("loop_lag_p99", _quantile("0.99", "loop_lag_seconds", "namespace")),
    _recorded("bubble_share", _rate("bubble_seconds_total", "namespace, instance")),
)
