"""The dashboards of the plan path, of graphs, of workers and of a rollout."""

from k8s.observability.dashboard import Board, Drawing, Panel, Query, Row, Unit
from k8s.observability.queries import gained, linked, mean, one, quantiles, rate, scheduler, total, worker

_MODEL = 'name=~"$model"'
_HITS = rate(worker("graph_replays_total"), "phase")
_MISSES = rate(worker("graph_misses_total"), "phase")
_PADDED = rate(worker("graph_padded_tokens_total"), "phase, bucket")
_REAL = rate(worker("graph_real_tokens_total"), "phase, bucket")

PLAN_PATH = Board(
    slug="plan-path",
    title="Plan path",
    rows=(
        Row(
            title="What a plan costs",
            panels=(
                Panel(
                    title="Round trip",
                    help="From a plan's send to its result.",
                    queries=quantiles("plan_rtt_seconds"),
                    unit=Unit.SECONDS,
                ),
                Panel(
                    title="Overhead",
                    help="Round trip less the worker's own time.",
                    queries=quantiles("plan_overhead_seconds"),
                    unit=Unit.SECONDS,
                ),
                Panel(
                    title="Encode and parse",
                    help="Mean time to encode a plan in the scheduler, and to decode and validate it in a worker.",
                    queries=(
                        Query(expr=mean("plan_encode_seconds"), legend="encode"),
                        Query(expr=mean("plan_parse_seconds", of="worker"), legend="parse"),
                    ),
                    unit=Unit.SECONDS,
                ),
                Panel(
                    title="Size of a plan",
                    help="Mean bytes, by encoding.",
                    queries=one(mean("plan_bytes", "encoding"), "{{encoding}}"),
                    unit=Unit.BYTES,
                ),
                Panel(
                    title="Plans in flight",
                    help="Plans without a result.",
                    queries=one(total(linked("plans_in_flight"), "worker"), "{{worker}}"),
                ),
                Panel(
                    title="Bubble share",
                    help="Time a device waited for a plan that carries on the plan before it.",
                    queries=one(rate(worker("bubble_seconds_total"), "instance"), "{{instance}}"),
                    unit=Unit.SHARE,
                ),
            ),
        ),
        Row(
            title="What goes wrong",
            panels=(
                Panel(
                    title="Plans not run, by answer",
                    help="Plans that a worker answered without running them.",
                    queries=one(rate(scheduler("plan_nacks_total"), "reason"), "{{reason}}"),
                    unit=Unit.PER_SECOND,
                ),
                Panel(
                    title="Sent again, and late",
                    help="Plans sent once more under their seq, results nobody was waiting for, streams opened again.",
                    queries=(
                        Query(expr=rate(scheduler("plan_resends_total")), legend="sent again"),
                        Query(expr=rate(scheduler("late_results_total")), legend="late results"),
                        Query(expr=rate(scheduler("plan_streams_reopened_total")), legend="streams reopened"),
                    ),
                    unit=Unit.PER_SECOND,
                ),
                Panel(
                    title="Plans by outcome",
                    help="What became of plans in the workers.",
                    queries=one(rate(worker("plans_total"), "outcome"), "{{outcome}}"),
                    unit=Unit.PER_SECOND,
                ),
            ),
        ),
    ),
)

GRAPHS = Board(
    slug="graphs",
    title="Graphs and padding",
    rows=(
        Row(
            title="Captured graphs",
            panels=(
                Panel(
                    title="Hit share by phase",
                    help="Forwards that replayed a captured graph. A phase without a replay shows 0.",
                    queries=one(
                        f"({_HITS} or 0 * {_MISSES}) / (({_HITS} or 0 * {_MISSES}) + ({_MISSES} or 0 * {_HITS}))",
                        "{{phase}}",
                    ),
                    unit=Unit.SHARE,
                ),
                Panel(
                    title="Misses by reason",
                    help="Forwards that ran eagerly, a second.",
                    queries=one(rate(worker("graph_misses_total"), "phase, reason"), "{{phase}} {{reason}}"),
                    unit=Unit.PER_SECOND,
                ),
                Panel(
                    title="Replays by bucket",
                    help="Replayed forwards a second.",
                    queries=one(rate(worker("graph_replays_total"), "phase, bucket"), "{{phase}} {{bucket}}"),
                    unit=Unit.PER_SECOND,
                ),
            ),
        ),
        Row(
            title="Padding",
            panels=(
                Panel(
                    title="Padding share by bucket",
                    help="Padding units of replayed buckets.",
                    queries=one(f"{_PADDED} / ({_PADDED} + {_REAL})", "{{phase}} {{bucket}}"),
                    unit=Unit.SHARE,
                    width=12,
                ),
                Panel(
                    title="Padded and real tokens",
                    help="Units of replayed buckets a second.",
                    queries=(
                        Query(expr=rate(worker("graph_padded_tokens_total"), "phase"), legend="{{phase}} padded"),
                        Query(expr=rate(worker("graph_real_tokens_total"), "phase"), legend="{{phase}} real"),
                    ),
                    unit=Unit.PER_SECOND,
                    width=12,
                ),
            ),
        ),
        Row(
            title="Capture",
            panels=(
                Panel(
                    title="Capture progress",
                    help="Share of the buckets whose graphs are live; what failed stays below 1.",
                    queries=one(f"avg by (phase) ({worker('graph_bucket_live')})", "{{phase}}"),
                    unit=Unit.SHARE,
                ),
                Panel(
                    title="Captured graphs and failures",
                    help="Graphs that can be replayed, and captures that failed in the last day.",
                    queries=(
                        Query(expr=total(worker("captured_graphs"), "phase"), legend="{{phase}}"),
                        Query(expr=gained(worker("failed_captures_total"), "phase"), legend="{{phase}} failed"),
                    ),
                ),
                Panel(
                    title="Graph memory",
                    help="Memory that captured graphs take.",
                    queries=one(total(worker("graph_memory_bytes"), "instance, phase"), "{{instance}} {{phase}}"),
                    unit=Unit.BYTES,
                ),
                Panel(
                    title="Time spent on captures",
                    help="Share of a worker's time that captures take, beside serving.",
                    queries=one(rate(worker("capture_seconds_total"), "instance"), "{{instance}}"),
                    unit=Unit.SHARE,
                    width=12,
                ),
                Panel(
                    title="Sizes of forwards",
                    help="Mean of decode forwards' rows and other forwards' tokens, what buckets are chosen from.",
                    queries=one(mean("forward_tokens", "phase", of="worker"), "{{phase}}"),
                    width=12,
                ),
            ),
        ),
    ),
)


WORKERS = Board(
    slug="workers",
    title="Workers",
    rows=(
        Row(
            title="Devices",
            panels=(
                Panel(
                    title="Forward time",
                    help="Mean time of one forward, by mode.",
                    queries=one(mean("forward_seconds", "mode", of="worker"), "{{mode}}"),
                    unit=Unit.SECONDS,
                ),
                Panel(
                    title="Sampling time",
                    help="Time sampling took in one plan.",
                    queries=quantiles("sample_seconds", of="worker"),
                    unit=Unit.SECONDS,
                ),
                Panel(
                    title="Way to the device",
                    help="Time one plan's columns took to the device.",
                    queries=quantiles("h2d_seconds", of="worker"),
                    unit=Unit.SECONDS,
                ),
                Panel(
                    title="Forwards by mode",
                    help="Forwards a second; a plan holds one or more.",
                    queries=one(rate(worker("forwards_total"), "mode"), "{{mode}}"),
                    unit=Unit.PER_SECOND,
                ),
                Panel(
                    title="Busy and idle",
                    help="Where the device thread's time goes.",
                    queries=(
                        Query(expr=rate(worker("busy_seconds_total"), "instance"), legend="{{instance}} busy"),
                        Query(expr=rate(worker("idle_seconds_total"), "instance"), legend="{{instance}} idle"),
                    ),
                    unit=Unit.SHARE,
                ),
                Panel(
                    title="Memory by use",
                    help="Bytes: weights, KV pages, graphs, what is free; resident is the process in host memory.",
                    queries=one(total(worker("memory_bytes"), "instance, kind"), "{{instance}} {{kind}}"),
                    unit=Unit.BYTES,
                ),
                Panel(
                    title="Rows of a plan",
                    help="Batch sizes as workers see them.",
                    queries=quantiles("batch_rows", of="worker"),
                ),
            ),
        ),
        Row(
            title="Health",
            panels=(
                Panel(
                    title="Attached",
                    help="1 while the scheduler holds the worker.",
                    queries=one(f"max by (worker) ({linked('worker_up')})", "{{worker}}"),
                    drawing=Drawing.NUMBER,
                ),
                Panel(
                    title="State",
                    help="The state each worker last reported, and those that are suspected.",
                    queries=(
                        Query(
                            expr=f"max by (worker, state) ({linked('worker_state')}) == 1",
                            legend="{{worker}} {{state}}",
                        ),
                        Query(expr=f"max by (worker) ({linked('worker_suspect')}) == 1", legend="{{worker}} suspected"),
                    ),
                    drawing=Drawing.TABLE,
                ),
                Panel(
                    title="Losses and refused attaches",
                    help="Terms that ended and attaches that failed, a second, by reason.",
                    queries=(
                        Query(expr=rate(linked("worker_losses_total"), "reason"), legend="lost: {{reason}}"),
                        Query(expr=rate(linked("attach_refusals_total"), "reason"), legend="refused: {{reason}}"),
                    ),
                    unit=Unit.PER_SECOND,
                ),
                Panel(
                    title="Faults",
                    help="Rows that were not finite, KV slots that held other tokens, and fatal errors, a second.",
                    queries=(
                        Query(expr=rate(worker("nan_rows_total")), legend="not finite"),
                        Query(expr=rate(worker("canary_hits_total")), legend="canary"),
                        Query(expr=rate(worker("fatal_errors_total")), legend="fatal"),
                    ),
                    unit=Unit.PER_SECOND,
                ),
            ),
        ),
    ),
)

ROLLOUT = Board(
    slug="rollout",
    title="Rollout",
    rows=(
        Row(
            title="What runs",
            panels=(
                Panel(
                    title="Schedulers by version",
                    help="Processes of each version.",
                    queries=one(f"count by (version) ({scheduler('build_info')})", "{{version}}"),
                ),
                Panel(
                    title="Workers by version and device",
                    help="Processes of each version, device, type and numerics.",
                    queries=one(
                        f"count by (version, device, dtype, numerics, kernels) ({worker('build_info')})",
                        "{{version}} {{device}} {{dtype}} {{numerics}} {{kernels}}",
                    ),
                ),
                Panel(
                    title="Model",
                    help="Model and weights that schedulers serve.",
                    queries=one(
                        f"count by (name, architecture, weights) ({scheduler('model_info', _MODEL)})",
                        "{{name}}",
                    ),
                    drawing=Drawing.TABLE,
                ),
                Panel(
                    title="KV cache",
                    help="Tokens of a page, and usable pages, as an endpoint picker reads them.",
                    queries=one(f"max by (page_size, num_pages) ({scheduler('cache_info')})", "{{num_pages}} pages"),
                    drawing=Drawing.TABLE,
                ),
                Panel(
                    title="Epoch",
                    help="Highest epoch each scheduler has attached with.",
                    queries=one(f"max by (instance) ({scheduler('epoch')})", "{{instance}}"),
                ),
                Panel(
                    title="Leader",
                    help="1 for the scheduler that may serve, 0 for a standby that waits for the Lease.",
                    queries=one(f"max by (instance) ({scheduler('leader')})", "{{instance}}"),
                ),
                Panel(
                    title="Renewals of the Lease",
                    help="Tries a second, by outcome; failed: no answer of the API server, the leader serves on.",
                    queries=one(rate(scheduler("lease_renewals_total"), "outcome"), "{{outcome}}"),
                    unit=Unit.PER_SECOND,
                ),
                Panel(
                    title="Serving workers",
                    help="Workers that are attached, and all that are known.",
                    queries=(
                        Query(expr=total(scheduler("worker_up")), legend="attached"),
                        Query(expr=f"count({scheduler('worker_up')})", legend="known"),
                    ),
                ),
                Panel(
                    title="Migrations",
                    help="Requests a second that lost their worker, by cause.",
                    queries=one(rate(scheduler("migrations_total"), "cause"), "{{cause}}"),
                    unit=Unit.PER_SECOND,
                ),
                Panel(
                    title="Start of workers",
                    help="Seconds each stage of the last start took.",
                    queries=one(f"max by (instance, stage) ({worker('startup_seconds')})", "{{instance}} {{stage}}"),
                    unit=Unit.SECONDS,
                ),
                Panel(
                    title="Age of processes",
                    help="Seconds since each process started.",
                    queries=one(
                        'time() - max by (job, instance) (process_start_time_seconds{namespace=~"$namespace"})',
                        "{{job}} {{instance}}",
                    ),
                    unit=Unit.SECONDS,
                ),
            ),
        ),
    ),
)
