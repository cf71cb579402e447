"""The bucket sets of all histograms, and how settings choose others. Plain numbers, no metrics library."""

from collections.abc import Mapping
from itertools import pairwise
from math import isfinite
from types import MappingProxyType

Buckets = tuple[float, ...]
BucketTable = Mapping[str, Buckets]
"""By a histogram's name without its service's prefix."""

MAX_LIMITS = 200

FIRST_TOKEN_SECONDS_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
TOKEN_SECONDS_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
REQUEST_SECONDS_BUCKETS = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0),
    *(15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
)
QUEUE_SECONDS_BUCKETS = (*(0.001 * 2**power for power in range(16)), 60.0)
PLAN_SECONDS_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
FORWARD_SECONDS_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
PLAN_BYTES_BUCKETS = tuple(256 * 4**power for power in range(9))
GRAMMAR_SECONDS_BUCKETS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
DEVIATION_RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
ROWS_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
FORWARD_TOKENS_BUCKETS = (
    *(*range(1, 17), *range(18, 33, 2), *range(36, 65, 4), *range(72, 257, 8), *range(272, 513, 16)),
    *(*range(544, 1025, 32), *range(1088, 2049, 64), *range(2304, 8193, 256), 65536),
)
"""Fine enough to choose graph buckets from: one in sixteen at most, and every default bucket is a limit."""
TOKENS_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768)

SCHEDULER_HISTOGRAMS: BucketTable = MappingProxyType(
    {
        "queue_seconds": QUEUE_SECONDS_BUCKETS,
        "time_to_first_token_seconds": FIRST_TOKEN_SECONDS_BUCKETS,
        "inter_token_latency_seconds": TOKEN_SECONDS_BUCKETS,
        "time_per_output_token_seconds": TOKEN_SECONDS_BUCKETS,
        "request_duration_seconds": REQUEST_SECONDS_BUCKETS,
        "request_prompt_tokens": TOKENS_BUCKETS,
        "request_output_tokens": TOKENS_BUCKETS,
        "step_build_seconds": PLAN_SECONDS_BUCKETS,
        "loop_lag_seconds": PLAN_SECONDS_BUCKETS,
        "step_prediction_ratio": DEVIATION_RATIO_BUCKETS,
        "batch_rows": ROWS_BUCKETS,
        "plan_encode_seconds": PLAN_SECONDS_BUCKETS,
        "plan_bytes": PLAN_BYTES_BUCKETS,
        "plan_rtt_seconds": PLAN_SECONDS_BUCKETS,
        "plan_overhead_seconds": PLAN_SECONDS_BUCKETS,
        "grammar_compile_seconds": GRAMMAR_SECONDS_BUCKETS,
        "grammar_mask_seconds": GRAMMAR_SECONDS_BUCKETS,
    }
)
WORKER_HISTOGRAMS: BucketTable = MappingProxyType(
    {
        "forward_seconds": FORWARD_SECONDS_BUCKETS,
        "sample_seconds": PLAN_SECONDS_BUCKETS,
        "h2d_seconds": PLAN_SECONDS_BUCKETS,
        "plan_parse_seconds": PLAN_SECONDS_BUCKETS,
        "batch_rows": ROWS_BUCKETS,
        "forward_tokens": FORWARD_TOKENS_BUCKETS,
    }
)


def chosen_buckets(text: str, usual: BucketTable) -> BucketTable:
    """The table with what `NAME=LIMIT,LIMIT;NAME=LIMIT,...` changes; empty text changes nothing.

    Raises:
        ValueError: a name that is not in the table, or limits that do not ascend.
    """
    chosen = dict(usual)
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        name, equals, limits = (piece.strip() for piece in part.partition("="))
        if not equals or name not in usual:
            message = f"{name!r} is no histogram; there are {', '.join(usual)}"
            raise ValueError(message)
        chosen[name] = _limits(name, limits)
    return MappingProxyType(chosen)


def _limits(name: str, text: str) -> Buckets:
    try:
        limits = tuple(float(limit) for limit in text.split(","))
    except ValueError:
        message = f"the limits of {name} are no numbers with commas between them"
        raise ValueError(message) from None
    ascend = all(low < high for low, high in pairwise(limits))
    if not ascend or not all(map(isfinite, limits)) or len(limits) > MAX_LIMITS:
        message = f"the limits of {name} are not at most {MAX_LIMITS} numbers, each above the one before"
        raise ValueError(message)
    return limits
