"""Frozen form of what a worker answers to one plan.

Made by the worker's executor or by `codec.decode_result`, read by the scheduling core. Knows nothing of protobuf.
"""

from dataclasses import dataclass

import numpy as np

from protos.wire.enums import ForwardMode, GraphRefusal
from protos.wire.plan import GraphChoice, PlanIdentity

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRejection:
    """The whole plan was refused before the device was touched. Consumes the seq."""

    reason: str
    field: str
    row: int | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResultColumns:
    """What the rows gave, all [R]."""

    handles: Array
    """u64"""
    attempts: Array
    """u32"""
    positions: Array
    """i32: position of the row's last input token; its sampled token has position + 1."""
    statuses: Array
    """u8, values of `RowStatus`"""
    token_ids: Array
    """i32: 0 unless the status is TOKEN"""
    failures: Array | None = None
    """u8, values of `RowFailure`, 0 where the row did not fail"""
    token_counts: Array | None = None
    """u32"""
    finite: Array | None = None
    """u8"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResultLogprobs:
    """Log-probabilities of the raw distribution."""

    output: Array | None = None
    """f32 [R]: of the sampled token where wanted"""
    output_top_indptr: Array | None = None
    """u32 [R + 1]"""
    output_top_ids: Array | None = None
    """i32, best first"""
    output_top_values: Array | None = None
    """f32"""
    prompt_indptr: Array | None = None
    """u32 [R + 1]"""
    prompt: Array | None = None
    """f32"""
    prompt_top_indptr: Array | None = None
    """u32"""
    prompt_top_ids: Array | None = None
    """i32"""
    prompt_top_values: Array | None = None
    """f32"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResultHiddenStates:
    """Hidden states asked for, row after row."""

    dtype: str
    hidden_size: int
    indptr: Array
    """u32 [R + 1], in states"""
    states: Array
    """u8: the raw bytes"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutcome:
    """How one forward of the plan ran."""

    mode: ForwardMode
    graph: GraphChoice | GraphRefusal
    real_tokens: int
    padded_tokens: int
    forward_ns: int
    canary_hits: int = 0
    """Rows whose KV did not hold their own tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTimings:
    """Durations on the worker's monotonic clock."""

    receive_ns: int = 0
    parse_ns: int = 0
    wait_ns: int = 0
    host_to_device_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    device_to_host_ns: int = 0
    bubble_ns: int = 0
    """The device stood idle before this plan although it carries on a request of the plan before it. No part of the
    plan's own time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardResult:
    """Answer to one plan: either `rejection`, or rows."""

    identity: PlanIdentity
    rejection: PlanRejection | None = None
    rows: ResultColumns | None = None
    forwards: tuple[ForwardOutcome, ...] = ()
    timings: PlanTimings = PlanTimings()
    logprobs: ResultLogprobs | None = None
    hidden_states: ResultHiddenStates | None = None
    plan_digest: bytes = b""
