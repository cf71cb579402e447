"""Every metric of the reference's tables is registered, or there is a reason why not."""

import re

import pytest

from tests.support.manifests import ROOT
from tests.support.promql_check import registered

PAGE = ROOT.parent / "shared" / "reference" / "metrics.md"
PREFIXES = {"sched_": "forwardplane_scheduler_", "worker_": "forwardplane_worker_"}

WANTED = [
    "sched_requests_total",
    "sched_requests_finished_total",
    "sched_requests_running",
    "sched_requests_waiting",
    "sched_requests_waiting_by_reason",
    "sched_queue_seconds",
    "sched_time_to_first_token_seconds",
    "sched_inter_token_latency_seconds",
    "sched_time_per_output_token_seconds",
    "sched_request_duration_seconds",
    "sched_prompt_tokens_total",
    "sched_prompt_tokens_cached_total",
    "sched_output_tokens_total",
    "sched_request_prompt_tokens",
    "sched_request_output_tokens",
    "sched_request_rejections_total",
    "sched_tenant_tokens_total",
    "sched_kv_pages",
    "sched_kv_pages_used",
    "sched_kv_usage_ratio",
    "sched_prefix_cache_queried_tokens_total",
    "sched_prefix_cache_hit_tokens_total",
    "sched_prefix_cache_evicted_pages_total",
    "sched_preemptions_total",
    "sched_step_build_seconds",
    "sched_plan_encode_seconds",
    "sched_plan_bytes",
    "sched_plan_rtt_seconds",
    "sched_plan_overhead_seconds",
    "sched_plans_in_flight",
    "sched_plan_nacks_total",
    "sched_plan_resends_total",
    "sched_late_results_total",
    "sched_scheduled_tokens_total",
    "sched_padded_tokens_total",
    "sched_batch_rows",
    "sched_spec_draft_tokens_total",
    "sched_spec_accepted_tokens_total",
    "sched_grammar_compile_seconds",
    "sched_grammar_mask_seconds",
    "sched_migrations_total",
    "sched_worker_up",
    "sched_worker_state",
    "sched_leader",
    "sched_epoch",
    "sched_loop_lag_seconds",
    "sched_build_info",
    "sched_model_info",
    "sched_cache_info",
    "worker_plans_total",
    "worker_forwards_total",
    "worker_graph_replays_total",
    "worker_graph_misses_total",
    "worker_graph_padded_tokens_total",
    "worker_graph_real_tokens_total",
    "worker_forward_seconds",
    "worker_sample_seconds",
    "worker_plan_parse_seconds",
    "worker_h2d_seconds",
    "worker_idle_seconds_total",
    "worker_gpu_busy_seconds_total",
    "worker_kv_transfer_bytes_total",
    "worker_kv_transfer_seconds",
    "worker_memory_bytes",
    "worker_startup_seconds",
    "worker_captured_graphs",
    "worker_nan_rows_total",
    "worker_fatal_errors_total",
    "worker_weights_info",
]
"""Names of the page, as it writes them."""

ABSENT = {
    "sched_preemptions_total": "called retractions_total; a lack of pages is its one cause",
    "sched_spec_draft_tokens_total": "speculation has no executor yet",
    "sched_spec_accepted_tokens_total": "speculation has no executor yet",
    "worker_gpu_busy_seconds_total": "called busy_seconds_total, since the CPU is a device too",
    "worker_kv_transfer_bytes_total": "transfer of KV pages has no executor yet",
    "worker_kv_transfer_seconds": "transfer of KV pages has no executor yet",
}
INSTEAD = {
    "sched_preemptions_total": "forwardplane_scheduler_retractions_total",
    "worker_gpu_busy_seconds_total": "forwardplane_worker_busy_seconds_total",
}
LABELS = {
    "sched_requests_total": {"method", "code"},
    "sched_requests_finished_total": {"reason"},
    "sched_requests_running": set(),
    "sched_requests_waiting": set(),
    "sched_kv_usage_ratio": set(),
    "sched_requests_waiting_by_reason": {"reason"},
    "sched_request_rejections_total": {"reason"},
    "sched_tenant_tokens_total": {"tenant_class", "kind"},
    "sched_plan_bytes": {"encoding"},
    "sched_plan_rtt_seconds": {"worker"},
    "sched_plan_overhead_seconds": {"worker"},
    "sched_plans_in_flight": {"worker"},
    "sched_plan_nacks_total": {"reason"},
    "sched_scheduled_tokens_total": {"phase"},
    "sched_padded_tokens_total": {"kind"},
    "sched_migrations_total": {"cause"},
    "sched_worker_state": {"worker", "state"},
    "sched_cache_info": {"page_size", "num_pages"},
    "sched_model_info": {"name", "architecture", "weights"},
    "worker_plans_total": {"outcome"},
    "worker_forwards_total": {"mode"},
    "worker_graph_replays_total": {"phase", "bucket"},
    "worker_graph_misses_total": {"phase", "reason"},
    "worker_graph_padded_tokens_total": {"phase", "bucket"},
    "worker_graph_real_tokens_total": {"phase", "bucket"},
    "worker_forward_seconds": {"mode"},
    "worker_memory_bytes": {"kind"},
    "worker_startup_seconds": {"stage"},
    "worker_captured_graphs": {"phase"},
}


@pytest.fixture(scope="module")
def known():
    return registered().series


def full(name):
    return next(long + name.removeprefix(short) for short, long in PREFIXES.items() if name.startswith(short))


def found(known, name):
    """Type and labels of a metric, of a histogram without its bound."""
    kind, labels = known.get(name) or known.get(name + "_bucket") or ("", frozenset())
    return kind, labels - {"le"}


@pytest.mark.parametrize("name", WANTED)
def test_a_metric_of_the_reference_is_registered_or_has_a_reason(known, name):
    is_there = bool(found(known, full(name))[0])

    assert is_there != (name in ABSENT), ABSENT.get(name, "neither registered nor explained")
    assert name not in INSTEAD or INSTEAD[name] in known


@pytest.mark.parametrize("name", LABELS)
def test_its_labels_are_those_and_no_more(known, name):
    assert found(known, full(name))[1] == LABELS[name]


@pytest.mark.skipif(not PAGE.is_file(), reason="the reference page is not beside the checkout")
def test_the_list_is_the_pages():
    text = PAGE.read_text(encoding="utf-8")
    tables = text[text.index("### 5.2") : text.index("### 5.3")]
    names = set()
    for row in re.findall(r"^\| (`.+?) \| (.+?) \|$", tables, flags=re.MULTILINE):
        for name in re.findall(r"`([a-z0-9_.]+)`", " ".join(row)):
            if name.startswith("..."):  # a name of the row before with another end
                name = {"..._seconds": "worker_kv_transfer_seconds"}.get(name, "sched_prefix_cache" + name[3:])
            names.add(name)

    assert names == set(WANTED)
