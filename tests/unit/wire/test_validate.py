"""The catalogue of invalid plans: each entry breaks one rule of one valid plan and names what must be reported."""

from dataclasses import replace

import numpy as np
import pytest

from protos.wire.enums import Feature, ForwardMode, GraphPhase, GraphRefusal, HiddenMode, SubPoolKind
from protos.wire.errors import InvalidPlan, UnsupportedFeature
from protos.wire.plan import GraphChoice, LogprobColumns, Mask, MaskColumns, SamplingColumns, WriteWindow
from protos.wire.validate import INVARIANTS, validate_plan
from protos.wire.validate_sampling import check_prompt_logprobs
from tests.support import plans
from tests.support.plans import f32, i32, u8, u32, u64, with_element, with_value

INFO = plans.make_full_info()
RICH = plans.make_rich_plan(INFO)
SMALL = plans.make_info()
MIXED = plans.make_mixed_plan()
"""Rows: decode at 20, decode at 33, a chunk [16, 32) that does not sample, a prompt [0, 9)."""


def graph_plan(bucket=2, phase=GraphPhase.DECODE, num_rows=2):
    plan = plans.make_decode_plan(num_rows, info=INFO)
    return with_value(plan, "forwards.0.graph", GraphChoice(phase=phase, bucket=bucket))


VALID = {
    "decode": (plans.make_decode_plan(3), SMALL),
    "extend": (plans.make_extend_plan([1, 15, 16, 17]), SMALL),
    "mixed": (MIXED, SMALL),
    "idle": (plans.make_idle_plan(), SMALL),
    "rich": (RICH, INFO),
    "named bucket": (graph_plan(), INFO),
    "two forwards": (
        with_value(
            MIXED,
            "forwards",
            (
                replace(MIXED.forwards[0], mode=ForwardMode.DECODE, logical_mode=ForwardMode.DECODE, row_end=2),
                replace(MIXED.forwards[0], mode=ForwardMode.EXTEND, logical_mode=ForwardMode.EXTEND, row_begin=2),
            ),
        ),
        SMALL,
    ),
    "shared prefix": (
        plans.make_plan([plans.decode(32, pages=[1, 2, 3]), plans.decode(32, pages=[1, 2, 4])]),
        SMALL,
    ),
    "whole context": (
        plans.make_decode_plan(1, context=2047, info=SMALL),
        SMALL,
    ),
    "log-probabilities of a whole chunk": (
        with_value(
            RICH,
            "logprobs",
            replace(
                RICH.logprobs,
                prompt_starts=i32(21, 151, 16, 9),
                target_indptr=u32(0, 0, 0, 16, 16),
                target_ids=i32(*range(16)),
            ),
        ),
        INFO,
    ),
    "sources without a reference": (with_value(MIXED, "tokens.sources", np.zeros(27, np.uint8)), SMALL),
    "empty tables": (
        plans.make_decode_plan(
            1,
            info=INFO,
            sampling=SamplingColumns(bias_indptr=u32(0, 0), bias_ids=u32(), bias_values=f32()),
            logprobs=LogprobColumns(prompt_starts=i32(33), target_indptr=u32(0, 0), target_ids=i32()),
        ),
        INFO,
    ),
}


@pytest.mark.parametrize("name", VALID)
def test_valid_plans_pass(name):
    validate_plan(*VALID[name])


def with_forward(plan, **changes):
    return with_value(plan, "forwards", (replace(plan.forwards[0], **changes), *plan.forwards[1:]))


def with_masks(*masks, rows=None):
    return with_value(RICH, "masks", MaskColumns(masks=masks, row_masks=u32(0, 0, 0, 0) if rows is None else rows))


def longer(plan, path):
    array = plans.read_value(plan, path)
    return with_value(plan, path, np.concatenate([array, array[-1:]]))


BITS = (INFO.logits_width + 7) // 8
NAN, INF = float("nan"), float("inf")
DECODE_REFERENCE = plans.make_plan([plans.decode(20, reference=(4, 0))], seq=5)

INVALID = {
    # identity and counts
    "short incarnation": (with_value(MIXED, "identity.incarnation", b"x"), "identity.incarnation", None),
    "seq 0": (with_value(MIXED, "identity.seq", 0), "identity.seq", None),
    "no forward": (with_value(MIXED, "forwards", ()), "forwards", None),
    "too many forwards": (with_value(MIXED, "forwards", MIXED.forwards * 17), "forwards", None),
    "too many rows": (plans.make_decode_plan(257, context=3), "rows", None),
    "too many tokens": (plans.make_extend_plan([2000, 49]), "tokens.ids", None),
    "too many masks": (with_masks(*[Mask(denied_ids=u32(1))] * 1025), "masks.masks", None),
    "too many features": (
        with_value(MIXED, "identity.required_features", (1,) * 65),
        "identity.required_features",
        None,
    ),
    # rows
    "attempts too long": (longer(MIXED, "rows.attempts"), "rows.attempts", None),
    "canary hashes without seeds": (with_value(RICH, "rows.canary_seeds", None), "rows.canary_hashes", None),
    "canary hashes too long": (longer(RICH, "rows.canary_hashes"), "rows.canary_hashes", None),
    "handle twice": (with_element(MIXED, "rows.handles", 3, 101), "rows.handles", 3),
    "sample flag 2": (with_element(MIXED, "rows.samples", 1, 2), "rows.samples", 1),
    "sample index 16": (with_value(MIXED, "rows.sample_indices", u32(0, 0, 16, 0)), "rows.sample_indices", 2),
    "hidden mode 0": (with_element(RICH, "rows.hidden_modes", 1, 0), "rows.hidden_modes", 1),
    "too many hidden states": (with_element(RICH, "rows.hidden_modes", 3, 3), "rows.hidden_modes", 3),
    "hidden mode 4": (with_element(RICH, "rows.hidden_modes", 1, 4), "rows.hidden_modes", 1),
    # lengths
    "extend length 0": (with_element(MIXED, "rows.extend_lens", 0, 0), "rows.extend_lens", 0),
    "negative extend length": (with_element(MIXED, "rows.extend_lens", 2, -16), "rows.extend_lens", 2),
    "negative position": (with_element(MIXED, "rows.first_positions", 1, -1), "rows.first_positions", 1),
    "lengths disagree": (with_element(MIXED, "rows.seq_lens", 1, 35), "rows.seq_lens", 1),
    "lengths that wrap": (
        with_element(with_element(MIXED, "rows.first_positions", 2, 2**31 - 1), "rows.seq_lens", 2, 15),
        "rows.seq_lens",
        2,
    ),
    "beyond the context": (plans.make_decode_plan(1, context=2048), "rows.seq_lens", 0),
    "sum of lengths": (with_value(MIXED, "tokens.ids", MIXED.tokens.ids[:-1]), "tokens.ids", None),
    "sum of lengths that wraps": (
        with_value(plans.make_extend_plan([1, 1, 1]), "rows.extend_lens", i32(2**31 - 1, 2**31 - 1, 5)),
        "rows.seq_lens",
        0,
    ),
    # forwards
    "hole between forwards": (with_forward(MIXED, row_begin=1), "forwards.row_begin", None),
    "end beyond rows": (with_forward(MIXED, row_end=5), "forwards.row_end", None),
    "end before begin": (with_forward(MIXED, row_end=-1), "forwards.row_end", None),
    "end beyond rows and back": (
        with_value(
            MIXED,
            "forwards",
            (replace(MIXED.forwards[0], row_end=5), replace(MIXED.forwards[0], row_begin=5, row_end=4)),
        ),
        "forwards.row_end",
        None,
    ),
    "rows left over": (with_forward(MIXED, row_end=3), "forwards.row_end", None),
    "long row in a decode": (with_forward(MIXED, mode=ForwardMode.DECODE), "rows.extend_lens", 2),
    "logical mode that does not fit": (
        with_forward(MIXED, logical_mode=ForwardMode.DECODE),
        "rows.extend_lens",
        2,
    ),
    "idle with rows": (with_forward(MIXED, mode=ForwardMode.IDLE), "forwards.row_end", 0),
    "decode without rows": (
        with_forward(plans.make_idle_plan(), mode=ForwardMode.DECODE),
        "forwards.row_end",
        None,
    ),
    # graphs
    "bucket not advertised": (graph_plan(bucket=3), "forwards.graph.bucket", None),
    "bucket of the other phase": (graph_plan(bucket=16, phase=GraphPhase.PREFILL), "forwards.graph.phase", None),
    "bucket too small": (graph_plan(bucket=1), "forwards.graph.bucket", None),
    # tokens
    "id beyond the width": (with_element(MIXED, "tokens.ids", 5, 49152), "tokens.ids", 2),
    "negative id": (with_element(MIXED, "tokens.ids", 0, -1), "tokens.ids", 0),
    "source 2": (with_element(RICH, "tokens.sources", 2, 2), "tokens.sources", 2),
    "sources too short": (with_value(RICH, "tokens.sources", RICH.tokens.sources[:-1]), "tokens.sources", None),
    "references without sources": (with_value(RICH, "tokens.sources", None), "tokens.ref_seqs", None),
    "too many references": (longer(RICH, "tokens.ref_seqs"), "tokens.ref_seqs", None),
    "no reference rows": (with_value(RICH, "tokens.ref_rows", None), "tokens.ref_rows", None),
    "reference to this plan": (with_element(DECODE_REFERENCE, "tokens.ref_seqs", 0, 5), "tokens.ref_seqs", 0),
    "reference to seq 0": (with_element(DECODE_REFERENCE, "tokens.ref_seqs", 0, 0), "tokens.ref_seqs", 0),
    "reference to row 256": (with_element(DECODE_REFERENCE, "tokens.ref_rows", 0, 256), "tokens.ref_rows", 0),
    "reference with an id": (with_element(DECODE_REFERENCE, "tokens.ids", 0, 3), "tokens.ids", 0),
    # page tables
    "no page table": (with_value(MIXED, "page_tables", ()), "page_tables", None),
    "page table twice": (with_value(RICH, "page_tables", RICH.page_tables[:1] * 2), "page_tables.sub_pool", None),
    "indptr too short": (with_value(MIXED, "page_tables.0.indptr", i32(0, 2)), "page_tables.indptr", None),
    "indptr from 1": (with_element(MIXED, "page_tables.0.indptr", 0, 1), "page_tables.indptr", None),
    "indptr falls": (with_element(MIXED, "page_tables.0.indptr", 1, 9), "page_tables.indptr", 1),
    "a page too many": (
        with_value(MIXED, "page_tables.0.indptr", MIXED.page_tables[0].indptr + i32(0, 1, 1, 1, 1)),
        "page_tables.indptr",
        0,
    ),
    "indices too long": (longer(MIXED, "page_tables.0.indices"), "page_tables.indices", None),
    "sink page": (with_element(MIXED, "page_tables.0.indices", 2, 0), "page_tables.indices", 1),
    "negative page": (with_element(MIXED, "page_tables.0.indices", 2, -5), "page_tables.indices", 1),
    "page beyond the pool": (with_element(MIXED, "page_tables.0.indices", 0, 1024), "page_tables.indices", 0),
    "page twice in a row": (
        plans.make_plan([plans.decode(32, pages=[1, 1, 3])]),
        "page_tables.indices",
        0,
    ),
    "last page length": (with_element(MIXED, "page_tables.0.last_page_lens", 3, 8), "page_tables.last_page_lens", 3),
    "last page lengths too short": (
        with_value(MIXED, "page_tables.0.last_page_lens", i32(5)),
        "page_tables.last_page_lens",
        None,
    ),
    "starts too short": (
        with_value(RICH, "page_tables.1.start_positions", i32(0)),
        "page_tables.start_positions",
        None,
    ),
    "starts in a full sub-pool": (
        with_value(RICH, "page_tables.0.start_positions", i32(16, 0, 0, 0)),
        "page_tables.start_positions",
        0,
    ),
    "start inside a page": (
        with_element(RICH, "page_tables.1.start_positions", 1, 8),
        "page_tables.start_positions",
        1,
    ),
    "start within the window": (
        with_element(RICH, "page_tables.1.start_positions", 1, 96),
        "page_tables.start_positions",
        1,
    ),
    "negative start": (with_element(RICH, "page_tables.1.start_positions", 1, -16), "page_tables.start_positions", 1),
    "start before the listed pages": (
        with_element(RICH, "page_tables.1.start_positions", 1, 64),
        "page_tables.indptr",
        1,
    ),
    "written page left out": (
        with_value(MIXED, "page_tables.0.written_pages", MIXED.page_tables[0].written_pages[1:]),
        "page_tables.written_pages",
        None,
    ),
    "another page written": (
        with_element(MIXED, "page_tables.0.written_pages", 1, 1),
        "page_tables.written_pages",
        1,
    ),
    "page written by two rows": (
        plans.make_plan([plans.decode(4, pages=[7]), plans.decode(5, pages=[7])]),
        "page_tables.written_pages",
        0,
    ),
    "page written by one row and read by another": (
        plans.make_plan(
            [plans.decode(32, pages=[1, 2, 3]), plans.decode(20, pages=[5, 1]), plans.decode(4, pages=[5])]
        ),
        "page_tables.written_pages",
        1,
    ),
    # page operations
    "operation columns": (longer(RICH, "page_operations.orders"), "page_operations.orders", None),
    "operation kind": (with_element(RICH, "page_operations.kinds", 0, 3), "page_operations.kinds", 0),
    "operation order": (with_element(RICH, "page_operations.orders", 1, 0), "page_operations.orders", 1),
    "operation sub-pool": (with_element(RICH, "page_operations.sub_pools", 1, 2), "page_operations.sub_pools", 1),
    "copy from the sink": (with_element(RICH, "page_operations.sources", 0, 0), "page_operations.sources", None),
    "clear with a source": (with_element(RICH, "page_operations.sources", 1, 4), "page_operations.sources", None),
    "clear the sink": (with_element(RICH, "page_operations.targets", 1, 0), "page_operations.targets", None),
    "copy beyond the pool": (with_element(RICH, "page_operations.targets", 0, 1024), "page_operations.targets", None),
    "copy onto itself": (with_element(RICH, "page_operations.targets", 0, 900), "page_operations.targets", None),
    # sampling
    "temperatures too short": (with_value(RICH, "sampling.temperatures", f32(0)), "sampling.temperatures", None),
    "NaN temperature": (with_element(RICH, "sampling.temperatures", 1, NAN), "sampling.temperatures", 1),
    "negative temperature": (with_element(RICH, "sampling.temperatures", 1, -0.5), "sampling.temperatures", 1),
    "infinite temperature": (with_element(RICH, "sampling.temperatures", 1, INF), "sampling.temperatures", 1),
    "top k beyond the width": (with_element(RICH, "sampling.top_ks", 1, 49153), "sampling.top_ks", 1),
    "top p 0": (with_element(RICH, "sampling.top_ps", 1, 0), "sampling.top_ps", 1),
    "top p above 1": (with_element(RICH, "sampling.top_ps", 1, 1.01), "sampling.top_ps", 1),
    "min p above 1": (with_element(RICH, "sampling.min_ps", 3, 1.5), "sampling.min_ps", 3),
    "NaN min p": (with_element(RICH, "sampling.min_ps", 3, NAN), "sampling.min_ps", 3),
    "seeds too long": (longer(RICH, "sampling.seeds"), "sampling.seeds", None),
    "drawing without seeds": (
        with_value(with_element(RICH, "sampling.temperatures", 0, 0), "sampling.seeds", None),
        "sampling.seeds",
        3,
    ),
    "bias ids without indptr": (with_value(RICH, "sampling.bias_indptr", None), "sampling.bias_ids", None),
    "bias values without indptr": (
        with_value(with_value(RICH, "sampling.bias_indptr", None), "sampling.bias_ids", None),
        "sampling.bias_values",
        None,
    ),
    "bias values absent": (with_value(RICH, "sampling.bias_values", None), "sampling.bias_values", None),
    "bias values too short": (with_value(RICH, "sampling.bias_values", f32(1)), "sampling.bias_values", None),
    "bias indptr falls": (with_value(RICH, "sampling.bias_indptr", u32(0, 2, 1, 2, 3)), "sampling.bias_indptr", 1),
    "bias id beyond the width": (with_element(RICH, "sampling.bias_ids", 2, 49152), "sampling.bias_ids", 3),
    "bias id twice": (with_element(RICH, "sampling.bias_ids", 1, 1), "sampling.bias_ids", 0),
    "infinite bias": (with_element(RICH, "sampling.bias_values", 2, -INF), "sampling.bias_values", 3),
    # penalties
    "repetition 0": (with_element(RICH, "penalties.repetition", 0, 0), "penalties.repetition", 0),
    "repetition 11": (with_element(RICH, "penalties.repetition", 0, 11), "penalties.repetition", 0),
    "frequency NaN": (with_element(RICH, "penalties.frequency", 0, NAN), "penalties.frequency", 0),
    "presence 3": (with_element(RICH, "penalties.presence", 2, 3), "penalties.presence", 2),
    "presence too short": (with_value(RICH, "penalties.presence", f32(0)), "penalties.presence", None),
    "prompt indptr": (with_element(RICH, "penalties.prompt_indptr", 4, 4), "penalties.prompt_ids", None),
    "prompt id twice": (with_element(RICH, "penalties.prompt_ids", 2, 5), "penalties.prompt_ids", 1),
    "output id beyond the width": (with_element(RICH, "penalties.output_ids", 1, 2**32 - 1), "penalties.output_ids", 1),
    "output id twice": (with_element(RICH, "penalties.output_ids", 1, 5), "penalties.output_ids", 1),
    "output count 0": (with_element(RICH, "penalties.output_counts", 0, 0), "penalties.output_counts", 1),
    "output counts too long": (longer(RICH, "penalties.output_counts"), "penalties.output_counts", None),
    # masks
    "row masks too short": (with_value(RICH, "masks.row_masks", u32(0)), "masks.row_masks", None),
    "mask that is not there": (with_element(RICH, "masks.row_masks", 2, 4), "masks.row_masks", 2),
    "mask of another width": (with_masks(Mask(allowed_bits=u8(1))), "masks.masks.allowed_bits", None),
    "mask with two forms": (with_masks(Mask(allowed_ids=u32(1), denied_ids=u32(1))), "masks.masks", None),
    "mask without a bit": (with_masks(Mask(allowed_bits=np.zeros(BITS, np.uint8))), "masks.masks", None),
    "mask without an id": (with_masks(Mask(allowed_ids=u32())), "masks.masks", None),
    "mask that denies all": (
        with_masks(Mask(denied_ids=np.arange(INFO.logits_width, dtype=np.uint32))),
        "masks.masks",
        None,
    ),
    "mask id beyond the width": (with_masks(Mask(denied_ids=u32(3, 49152))), "masks.masks", None),
    # log-probabilities
    "wanted flags too long": (longer(RICH, "logprobs.output_wanted"), "logprobs.output_wanted", None),
    "counts of best too long": (longer(RICH, "logprobs.output_top_counts"), "logprobs.output_top_counts", None),
    "prompt starts too long": (longer(RICH, "logprobs.prompt_starts"), "logprobs.prompt_starts", None),
    "counts at inputs too long": (longer(RICH, "logprobs.prompt_top_counts"), "logprobs.prompt_top_counts", None),
    "target indptr from 1": (
        with_value(RICH, "logprobs.target_indptr", RICH.logprobs.target_indptr + u32(1)),
        "logprobs.target_indptr",
        None,
    ),
    "wanted flag 2": (with_element(RICH, "logprobs.output_wanted", 3, 2), "logprobs.output_wanted", 3),
    "too many best": (with_element(RICH, "logprobs.output_top_counts", 1, 21), "logprobs.output_top_counts", 1),
    "too many best at inputs": (
        with_element(RICH, "logprobs.prompt_top_counts", 1, 21),
        "logprobs.prompt_top_counts",
        1,
    ),
    "start before this plan": (with_element(RICH, "logprobs.prompt_starts", 2, 15), "logprobs.prompt_starts", 2),
    "start beyond the sequence": (with_element(RICH, "logprobs.prompt_starts", 2, 33), "logprobs.prompt_starts", 2),
    "targets without starts": (with_value(RICH, "logprobs.prompt_starts", None), "logprobs.prompt_top_counts", None),
    "targets absent": (with_value(RICH, "logprobs.target_ids", None), "logprobs.target_ids", None),
    "a target too few": (
        with_value(RICH, "logprobs.target_indptr", u32(0, 0, 0, 11, 11)),
        "logprobs.target_indptr",
        2,
    ),
    "target ids too short": (with_value(RICH, "logprobs.target_ids", i32(1)), "logprobs.target_ids", None),
    "target beyond the width": (with_element(RICH, "logprobs.target_ids", 3, 49152), "logprobs.target_ids", 2),
    "negative target": (with_element(RICH, "logprobs.target_ids", 3, -1), "logprobs.target_ids", 2),
    # delta
    "delta against itself": (
        with_value(RICH, "delta", plans.make_delta(RICH, digest=bytes(16))),
        "delta.base_seq",
        None,
    ),
    "short digest": (
        with_value(RICH, "delta", replace(plans.make_delta(RICH, digest=bytes(15)), base_seq=8)),
        "delta.base_digest",
        None,
    ),
    "base row beyond any plan": (
        with_value(
            RICH,
            "delta",
            replace(plans.make_delta(RICH, digest=bytes(16)), base_seq=8, base_rows=u32(1, 2, 4097, 4)),
        ),
        "delta.base_rows",
        2,
    ),
    "base rows": (
        with_value(RICH, "delta", replace(plans.make_delta(RICH, digest=bytes(16)), base_seq=8, base_rows=u32(1))),
        "delta.base_rows",
        None,
    ),
}


def info_of(plan):
    return INFO if len(plan.page_tables) == 2 else SMALL


@pytest.mark.parametrize("name", INVALID)
def test_invalid_plans_are_refused_by_column_and_row(name):
    plan, field, row = INVALID[name]
    with pytest.raises(InvalidPlan) as caught:
        validate_plan(plan, info_of(plan))
    assert caught.value.field == field
    assert caught.value.rows == (() if row is None else (row,))
    assert caught.value.plan_seq == plan.identity.seq
    assert caught.value.message == str(caught.value)


def test_the_message_names_row_value_and_limit():
    plan, _, _ = INVALID["id beyond the width"]
    with pytest.raises(InvalidPlan, match=r"^tokens\.ids of row 2 is 49152, expected 0 to 49151$"):
        validate_plan(plan, SMALL)


def without(feature):
    return replace(INFO, features=INFO.features - {feature})


BARE = plans.make_decode_plan(1, info=INFO)
UNSUPPORTED = {
    "unknown required feature": (
        with_value(BARE, "identity.required_features", (999,)),
        INFO,
        "identity.required_features",
    ),
    "required feature it lacks": (RICH, without(Feature.MASKS), "identity.required_features"),
    "reserved group": (with_value(BARE, "reserved", ("adapters",)), INFO, "adapters"),
    "sources": (DECODE_REFERENCE, replace(SMALL, features=frozenset()), "tokens.sources"),
    "reference offsets": (with_value(RICH, "tokens.ref_offsets", u32(0)), INFO, "tokens.ref_offsets"),
    "dp ranks": (with_value(BARE, "rows.dp_ranks", u32(0)), INFO, "rows.dp_ranks"),
    "length source": (with_value(BARE, "rows.length_source_seqs", u64(1)), INFO, "rows.length_source_seqs"),
    "length source rows": (with_value(BARE, "rows.length_source_rows", u32(1)), INFO, "rows.length_source_rows"),
    "page operations": (RICH, without(Feature.PAGE_OPERATIONS), "page_operations"),
    "penalties": (RICH, without(Feature.PENALTIES), "penalties"),
    "masks": (
        with_value(BARE, "masks", MaskColumns(masks=(), row_masks=u32(0))),
        without(Feature.MASKS),
        "masks",
    ),
    "bias": (RICH, without(Feature.LOGIT_BIAS), "sampling.bias_indptr"),
    "output log-probabilities": (RICH, without(Feature.OUTPUT_LOGPROBS), "logprobs.output_wanted"),
    "best outputs": (
        with_value(BARE, "logprobs", LogprobColumns(output_top_counts=u8(1))),
        without(Feature.OUTPUT_LOGPROBS),
        "logprobs.output_top_counts",
    ),
    "prompt log-probabilities": (RICH, without(Feature.PROMPT_LOGPROBS), "logprobs.prompt_starts"),
    "hidden states": (RICH, without(Feature.HIDDEN_STATES), "rows.hidden_modes"),
    "canary": (RICH, without(Feature.CANARY), "rows.canary_seeds"),
    "delta": (
        with_value(BARE, "delta", plans.make_delta(BARE, digest=bytes(16))),
        without(Feature.DELTAS),
        "delta",
    ),
    "window": (RICH, without(Feature.WINDOW_SUB_POOL), "page_tables.start_positions"),
    "hidden mode": (RICH, replace(INFO, max_hidden_mode=HiddenMode.LAST), "rows.hidden_modes"),
    "mode": (with_forward(BARE, mode=ForwardMode.TARGET_VERIFY), INFO, "forwards.mode"),
    "logical mode": (with_forward(BARE, logical_mode=ForwardMode.PREBUILT), INFO, "forwards.logical_mode"),
    "mode of a later release": (
        with_forward(BARE, mode=ForwardMode.DLLM_EXTEND),
        replace(INFO, modes=frozenset(ForwardMode)),
        "forwards.mode",
    ),
    "layers": (with_forward(BARE, layers=(0, 1)), INFO, "forwards.layers"),
    "write window": (with_forward(BARE, write_window=WriteWindow(run=(0, 1))), INFO, "forwards.write_window"),
    "graph": (graph_plan(), without(Feature.GRAPHS), "forwards.graph"),
    "recurrent sub-pool": (
        BARE,
        replace(INFO, sub_pools=(INFO.sub_pools[0], replace(INFO.sub_pools[1], kind=SubPoolKind.RECURRENT))),
        "page_tables.sub_pool",
    ),
}


def test_a_hidden_mode_above_what_the_server_allows_names_column_row_and_both_modes():
    with pytest.raises(UnsupportedFeature) as caught:
        validate_plan(RICH, replace(INFO, max_hidden_mode=HiddenMode.LAST))
    assert (caught.value.field, caught.value.rows) == ("rows.hidden_modes", (2,))
    assert "row 2 is 3" in caught.value.message
    assert "highest is 2" in caught.value.message


def test_more_prompt_log_probabilities_than_a_result_holds_are_refused():
    lengths = [2000] * 13
    plan = plans.make_extend_plan(lengths)
    info = replace(INFO, limits=replace(INFO.limits, max_tokens=65536, context_tokens=4096), sub_pools=SMALL.sub_pools)
    tops = LogprobColumns(
        prompt_starts=i32(*[0] * 13),
        prompt_top_counts=u8(*[20] * 13),
        target_indptr=u32(*[1999 * row for row in range(14)]),
        target_ids=i32(*[1] * (1999 * 13)),
    )
    with pytest.raises(InvalidPlan) as caught:
        check_prompt_logprobs(with_value(plan, "logprobs", tops), info)
    assert caught.value.field == "logprobs.prompt_starts"
    check_prompt_logprobs(with_value(plan, "logprobs", replace(tops, prompt_top_counts=u8(*[19] * 13))), info)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_the_worker_lacks_is_unsupported(name):
    plan, info, field = UNSUPPORTED[name]
    with pytest.raises(UnsupportedFeature) as caught:
        validate_plan(plan, info)
    assert caught.value.field == field


def test_every_invariant_is_the_first_to_refuse_something_of_the_catalogue():
    entries = [(plan, info_of(plan)) for plan, _, _ in INVALID.values()]
    entries += [(plan, info) for plan, info, _ in UNSUPPORTED.values()]
    assert {_first_refusal(plan, info) for plan, info in entries} == set(INVARIANTS)


def _first_refusal(plan, info):
    for check in INVARIANTS:
        try:
            check(plan, info)
        except (InvalidPlan, UnsupportedFeature):
            return check
    return None


def test_an_eager_reason_needs_no_feature():
    for reason in GraphRefusal:
        validate_plan(with_forward(MIXED, graph=reason), SMALL)
