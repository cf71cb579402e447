"""The alerts. Each has a paragraph of its own in `k8s/RUNBOOK.md`, named after it."""

from k8s.observability.recordings import NAMES, SLO_SECONDS, SLO_TARGET, late_first_tokens
from k8s.observability.rule import Alert, Severity

_SCHEDULER = "forwardplane_scheduler_"
_WORKER = "forwardplane_worker_"


def _total(metric: str) -> str:
    return f"sum by (namespace) ({_SCHEDULER}{metric})"


def _rate(metric: str, window: str = "5m") -> str:
    return f"sum by (namespace) (rate({_SCHEDULER}{metric}[{window}]))"


def _burn(factor: float, long: str, short: str) -> str:
    """Both windows: the long one says that it matters, the short one that it goes on."""
    limit = f"{factor * (1 - SLO_TARGET):.3f}"
    return f"{late_first_tokens(long)} > {limit} and {late_first_tokens(short)} > {limit}"


SERVICE_ALERTS: tuple[Alert, ...] = (
    Alert(
        name="ForwardplaneNoServingWorker",
        # A scheduler that never found a worker has no series of one.
        expr=f"({_total('worker_up')} or 0 * {_total('requests_running')}) == 0",
        lasts="1m",
        severity=Severity.CRITICAL,
        summary="No worker is attached in {{ $labels.namespace }}: no request is served.",
    ),
    Alert(
        name="ForwardplaneNoLeader",
        expr=f"{_total('leader')} == 0",
        lasts="2m",
        severity=Severity.CRITICAL,
        summary="No scheduler of {{ $labels.namespace }} may serve: the Lease or the epoch cannot be had.",
    ),
    Alert(
        name="ForwardplaneLeaseNotRenewed",
        expr=f'sum by (namespace) (rate({_SCHEDULER}lease_renewals_total{{outcome="failed"}}[5m])) > 0'
        f' unless sum by (namespace) (rate({_SCHEDULER}lease_renewals_total{{outcome="ok"}}[5m])) > 0',
        lasts="5m",
        severity=Severity.WARNING,
        summary="The leader cannot renew its Lease: it serves on, but a standby may take over.",
    ),
    Alert(
        name="ForwardplaneMetricsAbsent",
        expr=f"absent({_SCHEDULER}requests_running)",
        lasts="5m",
        severity=Severity.CRITICAL,
        summary="No scheduler is scraped: nothing of forwardplane can be watched.",
    ),
    Alert(
        name="ForwardplaneQueueOverLimit",
        expr=f"{NAMES['queue_p95']} > 5",
        lasts="5m",
        severity=Severity.WARNING,
        summary="One request in twenty waits {{ $value | humanizeDuration }} for its first plan.",
    ),
    Alert(
        name="ForwardplaneFirstTokenBurnFast",
        expr=_burn(14.4, "1h", "5m"),
        lasts="2m",
        severity=Severity.CRITICAL,
        summary=f"{{{{ $value | humanizePercentage }}}} of first tokens take over {SLO_SECONDS} s: "
        "a month's allowance is gone in two days.",
    ),
    Alert(
        name="ForwardplaneFirstTokenBurnSlow",
        expr=_burn(6, "6h", "30m"),
        lasts="15m",
        severity=Severity.WARNING,
        summary=f"{{{{ $value | humanizePercentage }}}} of first tokens take over {SLO_SECONDS} s: "
        "a month's allowance is gone in five days.",
    ),
    Alert(
        name="ForwardplaneKVPressure",
        expr=f"max by (namespace) ({_SCHEDULER}kv_usage_ratio) > 0.95 and {_rate('retractions_total')} > 0",
        lasts="5m",
        severity=Severity.WARNING,
        summary="KV pages are used up and requests are retracted: their prompts are computed again.",
    ),
    Alert(
        name="ForwardplaneMigrations",
        expr=f"sum by (namespace) (increase({_SCHEDULER}migrations_total[15m])) > 10",
        lasts="0m",
        severity=Severity.WARNING,
        summary="{{ $value | humanize }} requests lost their worker within 15 minutes.",
    ),
    Alert(
        name="ForwardplaneBooksBroken",
        expr=f'sum by (namespace) (increase({_SCHEDULER}invariant_checks_total{{outcome="broken"}}[15m])) > 0',
        lasts="0m",
        severity=Severity.CRITICAL,
        summary="A scheduler's own accounts do not add up: a fault of the program.",
    ),
    Alert(
        name="ForwardplaneCertificateExpiry",
        expr='min by (namespace, name) (certmanager_certificate_expiration_timestamp_seconds{name=~"forwardplane-.*"})'
        " - time() < 14 * 86400",
        lasts="1h",
        severity=Severity.WARNING,
        summary="Certificate {{ $labels.name }} ends in {{ $value | humanizeDuration }}.",
    ),
)

ENGINE_ALERTS: tuple[Alert, ...] = (
    Alert(
        name="ForwardplaneGraphMissShare",
        expr=f"{NAMES['graph_miss_share']} > 0.05",
        lasts="15m",
        severity=Severity.WARNING,
        summary="{{ $value | humanizePercentage }} of forwards found no captured graph.",
    ),
    Alert(
        name="ForwardplanePaddingShare",
        expr=f"{NAMES['padding_share']} > 0.4",
        lasts="30m",
        severity=Severity.WARNING,
        summary="{{ $value | humanizePercentage }} of {{ $labels.phase }} bucket {{ $labels.bucket }} is padding.",
    ),
    Alert(
        name="ForwardplanePlanOverhead",
        expr=f"max by (namespace) ({NAMES['overhead_p99']}) > 0.5 * {NAMES['forward_mean']}",
        lasts="10m",
        severity=Severity.WARNING,
        summary="What a plan's way costs is more than half of a forward: {{ $value | humanizeDuration }}.",
    ),
    Alert(
        name="ForwardplaneBubbleWithQueue",
        expr=f"{NAMES['bubble_share']} > 0.2 and on (namespace) {_total('requests_waiting')} > 0",
        lasts="5m",
        severity=Severity.WARNING,
        summary="{{ $labels.instance }} waits {{ $value | humanizePercentage }} of its time for plans while "
        "requests wait.",
    ),
    Alert(
        name="ForwardplaneNeedFullRate",
        expr=f'sum by (namespace) (rate({_SCHEDULER}plan_nacks_total{{reason="need_full"}}[5m]))'
        f" / {_rate('plan_rtt_seconds_count')} > 0.01",
        lasts="10m",
        severity=Severity.WARNING,
        summary="Workers lack the base of {{ $value | humanizePercentage }} of plans and ask for them in full.",
    ),
    Alert(
        name="ForwardplaneLoopLag",
        expr=f"{NAMES['loop_lag_p99']} > 0.05",
        lasts="5m",
        severity=Severity.WARNING,
        summary="Events wait {{ $value | humanizeDuration }} for the scheduler's core.",
    ),
    Alert(
        name="ForwardplaneWorkerFatal",
        expr=f"sum by (namespace) (increase({_WORKER}fatal_errors_total[15m])) > 0"
        f" or sum by (namespace) (increase({_WORKER}nan_rows_total[15m])) > 0"
        f" or sum by (namespace) (increase({_WORKER}canary_hits_total[15m])) > 0",
        lasts="0m",
        severity=Severity.WARNING,
        summary="A worker's device failed, or its numbers or KV pages cannot be trusted.",
    ),
)

ALERTS = SERVICE_ALERTS + ENGINE_ALERTS
