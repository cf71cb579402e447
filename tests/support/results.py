"""Builders of valid results."""

from dataclasses import replace
from typing import Any

from protos.wire.enums import ForwardMode, GraphPhase, GraphRefusal, RowFailure, RowStatus
from protos.wire.plan import GraphChoice
from protos.wire.result import (
    ForwardOutcome,
    ForwardResult,
    PlanRejection,
    PlanTimings,
    ResultColumns,
    ResultHiddenStates,
    ResultLogprobs,
)
from tests.support.plans import f32, i32, make_identity, u8, u32, u64


def make_result(**changes: Any) -> ForwardResult:
    """Three rows: a token, a chunk without one, a failure. Every optional group is present."""
    result = ForwardResult(
        identity=make_identity(seq=4),
        rows=ResultColumns(
            handles=u64(100, 101, 2**64 - 1),
            attempts=u32(0, 1, 2),
            positions=i32(20, 31, 8),
            statuses=u8(RowStatus.TOKEN, RowStatus.NONE, RowStatus.FAILED),
            token_ids=i32(17, 0, 0),
            failures=u8(0, 0, RowFailure.NAN),
            token_counts=u32(1, 0, 0),
            finite=u8(1, 1, 0),
        ),
        forwards=(
            ForwardOutcome(
                mode=ForwardMode.DECODE,
                graph=GraphChoice(phase=GraphPhase.DECODE, bucket=4),
                real_tokens=1,
                padded_tokens=3,
                forward_ns=5_000_000_000,
            ),
            ForwardOutcome(
                mode=ForwardMode.EXTEND,
                graph=GraphRefusal.DISABLED,
                real_tokens=18,
                padded_tokens=0,
                forward_ns=1,
                canary_hits=2,
            ),
        ),
        timings=PlanTimings(
            receive_ns=1,
            parse_ns=2,
            wait_ns=3,
            host_to_device_ns=4,
            forward_ns=5,
            sample_ns=6,
            device_to_host_ns=7,
            bubble_ns=8,
        ),
        logprobs=ResultLogprobs(
            output=f32(-0.5, 0, 0),
            output_top_indptr=u32(0, 2, 2, 2),
            output_top_ids=i32(17, 3),
            output_top_values=f32(-0.5, -1.5),
            prompt_indptr=u32(0, 0, 2, 2),
            prompt=f32(-1, -2),
            prompt_top_indptr=u32(0, 1, 2),
            prompt_top_ids=i32(5, 6),
            prompt_top_values=f32(-1, -2),
        ),
        hidden_states=ResultHiddenStates(
            dtype="bfloat16", hidden_size=2, indptr=u32(0, 1, 1, 1), states=u8(1, 2, 3, 4)
        ),
        plan_digest=bytes(range(16)),
    )
    return replace(result, **changes)


def make_rejected_result(**changes: Any) -> ForwardResult:
    rejection = PlanRejection(
        reason="INVALID_PLAN", field="tokens.ids", row=0, message="tokens.ids of row 0 is -1, expected 0 to 49151"
    )
    return replace(ForwardResult(identity=make_identity(seq=4), rejection=rejection), **changes)
