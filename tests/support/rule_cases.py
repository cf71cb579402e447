"""For each alert, series under which it fires and series, close to them, under which it must not."""

from dataclasses import dataclass

S, W = "forwardplane_scheduler_", "forwardplane_worker_"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCase:
    """Series in promtool's notation, one sample a minute, by their names and labels."""

    alert: str
    firing: dict[str, str]
    quiet: dict[str, str]
    at: str = "30m"
    labels: dict[str, str] | None = None
    """Labels of the alert beside severity; None: the namespace."""


def series(name, values, /, **labels):
    given = {"namespace": "n", **labels}
    return {name + "{" + ", ".join(f'{key}="{value}"' for key, value in given.items()) + "}": values}


def histogram(name, **counts):
    """Cumulative counts a minute by upper bound (`le_0_05=…`), all labels but `le` as given by `by`."""
    by = counts.pop("by", {})
    found = {}
    for bound, count in counts.items():
        le = "+Inf" if bound == "le_inf" else bound.removeprefix("le_").replace("_", ".")
        found |= series(f"{name}_bucket", f"0+{count}x400", le=le, **by)
    return found | series(f"{name}_count", f"0+{counts['le_inf']}x400", **by)


def first_tokens(kept, whole):
    return histogram(f"{S}time_to_first_token_seconds", le_2_5=kept, le_inf=whole)


def lately_late(calm_minutes):
    """First tokens that were in time for so long, and late afterwards."""
    name = f"{S}time_to_first_token_seconds"
    late = 400 - calm_minutes
    top = 100 * calm_minutes
    kept = f"0+100x{calm_minutes} {top}+0x{late}"
    return series(f"{name}_bucket", kept, le="2.5") | series(f"{name}_count", "0+100x400")


def running():
    return series(f"{S}requests_running", "1x60")


def overhead(p99_bucket, forward_s):
    """Plans with their 99th percentile in one bucket, and forwards of that mean."""
    counts = {"le_0_001": 0, "le_0_005": 0, "le_0_01": 0, "le_inf": 1000}
    reached = False
    for bound in counts:
        reached = reached or bound == p99_bucket
        counts[bound] = 1000 if reached else 0
    spent = {f'{W}forward_seconds_sum{{namespace="n", mode="decode"}}': f"0+{1000 * forward_s}x400"}
    return (
        histogram(f"{S}plan_overhead_seconds", by={"worker": "w:1"}, **counts)
        | spent
        | series(f"{W}forward_seconds_count", "0+1000x400", mode="decode")
    )


def graphs(misses, replays, reason="over_max_rows"):
    return series(f"{W}graph_misses_total", f"0+{misses}x60", phase="decode", reason=reason) | series(
        f"{W}graph_replays_total", f"0+{replays}x60", phase="decode", bucket="8"
    )


def padding(padded, real):
    return series(f"{W}graph_padded_tokens_total", f"0+{padded}x90", phase="decode", bucket="8") | series(
        f"{W}graph_real_tokens_total", f"0+{real}x90", phase="decode", bucket="8"
    )


def pressure(usage, retractions):
    return series(f"{S}kv_usage_ratio", f"{usage}x60") | series(f"{S}retractions_total", f"0+{retractions}x60")


def bubble(seconds_a_minute, waiting):
    return series(f"{W}bubble_seconds_total", f"0+{seconds_a_minute}x60", instance="i") | series(
        f"{S}requests_waiting", f"{waiting}x60"
    )


def need_full(nacks, plans):
    return series(f"{S}plan_nacks_total", f"0+{nacks}x60", reason="need_full") | series(
        f"{S}plan_rtt_seconds_count", f"0+{plans}x60", worker="w:1"
    )


def certificate(days):
    name = {"name": "forwardplane-worker"}
    return series("certmanager_certificate_expiration_timestamp_seconds", f"{days * 86400}x120", **name)


CASES = (
    RuleCase(
        alert="ForwardplaneNoServingWorker",
        firing=running() | series(f"{S}worker_up", "0x60", worker="w:1"),
        quiet=running() | series(f"{S}worker_up", "0x60", worker="w:1") | series(f"{S}worker_up", "1x60", worker="w:2"),
    ),
    RuleCase(
        # A scheduler that never found one.
        alert="ForwardplaneNoServingWorker",
        firing=running(),
        quiet={},
    ),
    RuleCase(
        alert="ForwardplaneNoLeader",
        firing=series(f"{S}leader", "0x60", pod="a") | series(f"{S}leader", "0x60", pod="b"),
        quiet=series(f"{S}leader", "0x60", pod="a") | series(f"{S}leader", "1x60", pod="b"),
    ),
    RuleCase(
        alert="ForwardplaneLeaseNotRenewed",
        firing=series(f"{S}lease_renewals_total", "0+30x60", outcome="failed")
        | series(f"{S}lease_renewals_total", "9x60", outcome="ok"),
        quiet=series(f"{S}lease_renewals_total", "0+1x60", outcome="failed")
        | series(f"{S}lease_renewals_total", "0+29x60", outcome="ok"),
    ),
    RuleCase(alert="ForwardplaneMetricsAbsent", firing={}, quiet=running(), labels={}),
    RuleCase(
        alert="ForwardplaneQueueOverLimit",
        firing=histogram(f"{S}queue_seconds", le_4_096=900, le_8_192=1000, le_inf=1000),
        quiet=histogram(f"{S}queue_seconds", le_4_096=960, le_8_192=1000, le_inf=1000),
    ),
    RuleCase(
        alert="ForwardplaneFirstTokenBurnFast", firing=first_tokens(80, 100), quiet=first_tokens(90, 100), at="2h"
    ),
    RuleCase(
        # Bad for five minutes, and not yet for an hour.
        alert="ForwardplaneFirstTokenBurnFast",
        firing=lately_late(120),
        quiet=lately_late(172),
        at="3h",
    ),
    RuleCase(
        alert="ForwardplaneFirstTokenBurnSlow", firing=first_tokens(90, 100), quiet=first_tokens(95, 100), at="6h"
    ),
    RuleCase(alert="ForwardplaneKVPressure", firing=pressure(0.97, 3), quiet=pressure(0.97, 0)),
    RuleCase(alert="ForwardplaneKVPressure", firing=pressure(0.96, 1), quiet=pressure(0.94, 3)),
    RuleCase(
        alert="ForwardplaneMigrations",
        firing=series(f"{S}migrations_total", "0+1x60"),
        quiet=series(f"{S}migrations_total", "0+0.5x60"),
    ),
    RuleCase(
        alert="ForwardplaneBooksBroken",
        firing=series(f"{S}invariant_checks_total", "0x25 1x30", outcome="broken"),
        quiet=series(f"{S}invariant_checks_total", "0+1x60", outcome="ok"),
    ),
    RuleCase(
        alert="ForwardplaneCertificateExpiry",
        firing=certificate(13),
        quiet=certificate(15),
        at="90m",
        labels={"namespace": "n", "name": "forwardplane-worker"},
    ),
    RuleCase(alert="ForwardplaneGraphMissShare", firing=graphs(6, 94), quiet=graphs(4, 96)),
    RuleCase(alert="ForwardplaneGraphMissShare", firing=graphs(1, 0), quiet=graphs(100, 0, reason="disabled")),
    RuleCase(
        alert="ForwardplanePaddingShare",
        firing=padding(50, 50),
        quiet=padding(30, 70),
        at="60m",
        labels={"namespace": "n", "phase": "decode", "bucket": "8"},
    ),
    RuleCase(alert="ForwardplanePlanOverhead", firing=overhead("le_0_005", 0.005), quiet=overhead("le_0_005", 0.05)),
    RuleCase(
        alert="ForwardplaneBubbleWithQueue",
        firing=bubble(30, 5),
        quiet=bubble(30, 0),
        labels={"namespace": "n", "instance": "i"},
    ),
    RuleCase(
        alert="ForwardplaneBubbleWithQueue",
        firing=bubble(13, 1),
        quiet=bubble(11, 5),
        labels={"namespace": "n", "instance": "i"},
    ),
    RuleCase(alert="ForwardplaneNeedFullRate", firing=need_full(2, 100), quiet=need_full(1, 200)),
    RuleCase(
        alert="ForwardplaneLoopLag",
        firing=histogram(f"{S}loop_lag_seconds", le_0_05=980, le_0_1=1000, le_inf=1000),
        quiet=histogram(f"{S}loop_lag_seconds", le_0_05=995, le_0_1=1000, le_inf=1000),
    ),
    *(
        RuleCase(
            alert="ForwardplaneWorkerFatal",
            firing=series(f"{W}{metric}_total", "0x25 1x30"),
            quiet=series(f"{W}{metric}_total", "3x60"),
        )
        for metric in ("fatal_errors", "nan_rows", "canary_hits")
    ),
)
