"""The dashboards of the service and of the engine, and the list of all. Their metrics are checked by a test."""

from k8s.observability.boards_worker import GRAPHS, PLAN_PATH, ROLLOUT, WORKERS
from k8s.observability.dashboard import Board, Drawing, Panel, Query, Row, Unit
from k8s.observability.queries import (
    heatmap,
    linked,
    mean,
    one,
    quantiles,
    rate,
    scheduler,
    share,
    total,
)

SERVICE = Board(
    slug="service",
    title="Service",
    rows=(
        Row(
            title="Requests",
            panels=(
                Panel(
                    title="Calls by code",
                    help="Ended calls of both doors a second, by gRPC code.",
                    queries=one(rate(scheduler("requests_total"), "code"), "{{code}}"),
                    unit=Unit.PER_SECOND,
                ),
                Panel(
                    title="Running and waiting",
                    help="Requests that hold pages, and requests that wait for admission.",
                    queries=(
                        Query(expr=total(scheduler("requests_running")), legend="running"),
                        Query(expr=total(scheduler("requests_waiting")), legend="waiting"),
                    ),
                ),
                Panel(
                    title="What requests wait for",
                    help="Waiting requests by reason.",
                    queries=one(total(scheduler("requests_waiting_by_reason"), "reason"), "{{reason}}"),
                ),
                Panel(
                    title="Ends by reason",
                    help="Why requests ended.",
                    queries=one(rate(scheduler("requests_finished_total"), "reason"), "{{reason}}"),
                    unit=Unit.PER_SECOND,
                ),
                Panel(
                    title="Refusals by reason",
                    help="Refused at the door, refused by the core, or failed.",
                    queries=one(rate(scheduler("request_rejections_total"), "reason"), "{{reason}}"),
                    unit=Unit.PER_SECOND,
                ),
                Panel(
                    title="Open calls",
                    help="Calls that are being served, by door.",
                    queries=(
                        Query(expr=total(scheduler("grpc_open_calls")), legend="gRPC"),
                        Query(expr=total(scheduler("http_open_calls")), legend="HTTP"),
                    ),
                ),
                Panel(
                    title="Closed connections",
                    help="Connections of a hardened port that were ended, since they wasted most of their calls.",
                    queries=one(rate(scheduler("closed_connections_total")), "closed"),
                    unit=Unit.PER_SECOND,
                ),
                Panel(
                    title="Bytes of running requests",
                    help="Prompts and options that edges hold, together and of the caller with the most.",
                    queries=(
                        Query(expr=total(scheduler("held_request_bytes")), legend="all"),
                        Query(expr=f"max({scheduler('caller_held_request_bytes')})", legend="one caller"),
                    ),
                    unit=Unit.BYTES,
                ),
            ),
        ),
        Row(
            title="Latency",
            panels=(
                Panel(
                    title="Time to first token",
                    help="From a request's arrival to its first chunk.",
                    queries=quantiles("time_to_first_token_seconds"),
                    unit=Unit.SECONDS,
                ),
                Panel(
                    title="Inter-token latency",
                    help="Between two chunks of a stream, by token.",
                    queries=quantiles("inter_token_latency_seconds"),
                    unit=Unit.SECONDS,
                ),
                Panel(
                    title="Time per output token",
                    help="Mean of one request behind its first chunk.",
                    queries=quantiles("time_per_output_token_seconds"),
                    unit=Unit.SECONDS,
                ),
                Panel(
                    title="Duration",
                    help="From a generation call's arrival to its end.",
                    queries=quantiles("request_duration_seconds"),
                    unit=Unit.SECONDS,
                ),
                Panel(
                    title="Queue",
                    help="From a request's arrival in the core to its first plan.",
                    queries=quantiles("queue_seconds"),
                    unit=Unit.SECONDS,
                ),
                Panel(
                    title="Time to first token, all requests",
                    help="How first tokens spread over the buckets.",
                    queries=heatmap("time_to_first_token_seconds"),
                    drawing=Drawing.HEATMAP,
                ),
            ),
        ),
        Row(
            title="Tokens",
            panels=(
                Panel(
                    title="Tokens",
                    help="Prompt tokens, those of them found in a prefix cache, and output tokens, a second.",
                    queries=(
                        Query(expr=rate(scheduler("prompt_tokens_total")), legend="prompt"),
                        Query(expr=rate(scheduler("prompt_tokens_cached_total")), legend="prompt, cached"),
                        Query(expr=rate(scheduler("output_tokens_total")), legend="output"),
                    ),
                    unit=Unit.PER_SECOND,
                ),
                Panel(
                    title="Tokens by class of callers",
                    help="Tokens of ended requests a second, by the class that the file of callers names.",
                    queries=one(
                        rate(scheduler("tenant_tokens_total"), "tenant_class, kind"), "{{tenant_class}} {{kind}}"
                    ),
                    unit=Unit.PER_SECOND,
                ),
                Panel(
                    title="Prompt lengths",
                    help="Prompt tokens of admitted requests.",
                    queries=heatmap("request_prompt_tokens"),
                    drawing=Drawing.HEATMAP,
                ),
                Panel(
                    title="Output lengths",
                    help="Output tokens of ended requests.",
                    queries=heatmap("request_output_tokens"),
                    drawing=Drawing.HEATMAP,
                ),
            ),
        ),
    ),
)

ENGINE = Board(
    slug="engine",
    title="Engine",
    rows=(
        Row(
            title="Memory",
            panels=(
                Panel(
                    title="KV pages in use",
                    help="Share of the KV pages that requests hold.",
                    queries=one(f"max by (instance) ({scheduler('kv_usage_ratio')})", "{{instance}}"),
                    unit=Unit.SHARE,
                ),
                Panel(
                    title="KV pages",
                    help="All usable pages, those that requests hold, and those that only the prefix cache holds.",
                    queries=(
                        Query(expr=total(scheduler("kv_pages")), legend="all"),
                        Query(expr=total(scheduler("kv_pages_used")), legend="held"),
                        Query(expr=total(scheduler("kv_pages_cached")), legend="cached"),
                    ),
                ),
                Panel(
                    title="Prefix cache hit share",
                    help="Of the known tokens of placed requests, those found in a cache.",
                    queries=one(
                        share(
                            rate(scheduler("prefix_cache_hit_tokens_total")),
                            rate(scheduler("prefix_cache_queried_tokens_total")),
                        ),
                        "hits",
                    ),
                    unit=Unit.SHARE,
                ),
                Panel(
                    title="Retractions and evictions",
                    help="Requests that gave their pages back, and cached pages given up, a second.",
                    queries=(
                        Query(expr=rate(scheduler("retractions_total")), legend="retractions"),
                        Query(expr=rate(scheduler("prefix_cache_evicted_pages_total")), legend="evicted pages"),
                    ),
                    unit=Unit.PER_SECOND,
                ),
            ),
        ),
        Row(
            title="Steps",
            panels=(
                Panel(
                    title="Planned tokens",
                    help="Tokens planned a second; a row of one token is decode.",
                    queries=one(rate(scheduler("scheduled_tokens_total"), "phase"), "{{phase}}"),
                    unit=Unit.PER_SECOND,
                ),
                Panel(
                    title="Padding, seen from the scheduler",
                    help="Tokens a second that workers computed beside the planned ones, by kind.",
                    queries=one(rate(scheduler("padded_tokens_total"), "kind"), "{{kind}}"),
                    unit=Unit.PER_SECOND,
                ),
                Panel(title="Rows of a plan", help="Batch sizes.", queries=quantiles("batch_rows")),
                Panel(
                    title="Prefill budget",
                    help="Prefill tokens a plan may carry.",
                    queries=one(total(linked("budget_tokens"), "worker"), "{{worker}}"),
                ),
                Panel(
                    title="Core step",
                    help="Time of one step of the core.",
                    queries=quantiles("step_build_seconds"),
                    unit=Unit.SECONDS,
                ),
                Panel(
                    title="Loop lag",
                    help="From an event's arrival to its core step.",
                    queries=quantiles("loop_lag_seconds"),
                    unit=Unit.SECONDS,
                ),
                Panel(
                    title="Error of predicted step times",
                    help="Mean relative error of predicted device times.",
                    queries=one(f"max by (worker) ({linked('step_prediction_error_ratio')})", "{{worker}}"),
                    unit=Unit.SHARE,
                ),
                Panel(
                    title="Grammar processes",
                    help="Mean time to compile a grammar and to get a mask.",
                    queries=(
                        Query(expr=mean("grammar_compile_seconds"), legend="compile"),
                        Query(expr=mean("grammar_mask_seconds"), legend="mask"),
                    ),
                    unit=Unit.SECONDS,
                ),
                Panel(
                    title="Checks of the core's books",
                    help="Checks a second, by outcome; broken is a fault of the program.",
                    queries=one(rate(scheduler("invariant_checks_total"), "outcome"), "{{outcome}}"),
                    unit=Unit.PER_SECOND,
                ),
            ),
        ),
    ),
)

BOARDS = (SERVICE, ENGINE, PLAN_PATH, GRAPHS, WORKERS, ROLLOUT)
