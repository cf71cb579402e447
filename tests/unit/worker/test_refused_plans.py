"""Bad plans on their whole way into a worker: refused whole, by column and row, before the device is touched."""

from dataclasses import replace

import pytest

from protos.forwardplane.v1.worker_pb2 import PlanMessage
from protos.wire.codec import checksum, encode_plan
from protos.wire.enums import Feature, ForwardMode, HiddenMode
from protos.wire.result import PlanRejection
from tests.support import plans
from tests.support.plans import with_element, with_value
from tests.support.tiny_model import WIDTH, HistoryRunner, tiny_worker
from worker_svc.batch.forward_mode import EXECUTABLE_MODES
from worker_svc.rpc.plan_intake import PlanIntake

INFO = plans.make_info(logits_width=WIDTH, features=frozenset({Feature.OUTPUT_LOGPROBS}))
MIXED = plans.make_mixed_plan(info=INFO, logprobs=None)
MIXED = with_value(MIXED, "tokens.ids", MIXED.tokens.ids % WIDTH)
LAST_ONLY = replace(INFO, features=INFO.features | {Feature.HIDDEN_STATES}, max_hidden_mode=HiddenMode.LAST)
BOTH_WRITE = with_element(
    with_element(MIXED, "page_tables.0.indices", -1, int(MIXED.page_tables[0].indices[1])),
    "page_tables.0.written_pages",
    -1,
    int(MIXED.page_tables[0].indices[1]),
)
INVALID, UNSUPPORTED = "INVALID_PLAN", "UNSUPPORTED"
CASES = {
    "columns that disagree": (
        with_value(MIXED, "rows.seq_lens", MIXED.rows.seq_lens[:-1]),
        (INVALID, "rows.seq_lens", None),
    ),
    "a length that disagrees": (with_element(MIXED, "rows.seq_lens", 2, 33), (INVALID, "rows.seq_lens", 2)),
    "a page outside the sub-pool": (
        with_element(MIXED, "page_tables.0.indices", 4, INFO.sub_pools[0].num_pages),
        (INVALID, "page_tables.indices", 1),
    ),
    "one page written by two rows": (BOTH_WRITE, (INVALID, "page_tables.written_pages", 0)),
    "a hidden mode above the server's": (
        with_value(MIXED, "rows.hidden_modes", plans.u8(1, 2, 3, 1)),
        (UNSUPPORTED, "rows.hidden_modes", 2),
    ),
    "a canary where there is none": (
        with_value(MIXED, "rows.canary_seeds", plans.u64(1, 1, 1, 1)),
        (UNSUPPORTED, "rows.canary_seeds", None),
    ),
}


def refused(plan, info):
    """(reason, field, row) of the refusal; asserts that no runner was called."""
    runner = HistoryRunner(info)
    intake = PlanIntake(info, lambda: 0, tiny_worker(info, [runner]).stage)
    body = encode_plan(plan)
    arrived = intake.read(PlanMessage(body=body, crc32=checksum(body)))
    assert runner.batches == []
    assert isinstance(arrived.content, PlanRejection)
    assert arrived.identity == plan.identity
    return arrived.content.reason, arrived.content.field, arrived.content.row


@pytest.mark.parametrize("name", CASES)
def test_a_bad_plan_is_refused_whole_by_column_and_row(name):
    plan, expected = CASES[name]
    assert refused(plan, LAST_ONLY if "hidden" in name else INFO) == expected


@pytest.mark.parametrize("mode", sorted(set(ForwardMode) - EXECUTABLE_MODES), ids=lambda mode: mode.name)
def test_every_mode_without_an_executor_is_unsupported(mode):
    plan = plans.make_decode_plan(2, info=INFO)
    for changes in ({"mode": mode}, {"logical_mode": mode}):
        forward = replace(plan.forwards[0], **changes)
        expected = f"forwards.{next(iter(changes))}"
        assert refused(replace(plan, forwards=(forward,)), INFO) == (UNSUPPORTED, expected, None)
        everything = replace(INFO, modes=frozenset(ForwardMode))
        assert refused(replace(plan, forwards=(forward,)), everything)[0] == UNSUPPORTED


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("rows.length_source_seqs", plans.u64(0, 0)),
        ("rows.length_source_rows", plans.u32(0, 0)),
        ("rows.dp_ranks", plans.u32(0, 1)),
        ("tokens.ref_offsets", plans.u32(0)),
    ],
)
def test_every_column_of_a_later_round_is_unsupported(path, value):
    plan = with_value(plans.make_decode_plan(2, info=INFO), path, value)
    assert refused(plan, INFO)[:2] == (UNSUPPORTED, path)


def test_the_layers_of_a_split_prefill_are_unsupported():
    plan = plans.make_extend_plan([4], info=INFO)
    assert refused(with_value(plan, "forwards.0.layers", (0, 1)), INFO)[:2] == (UNSUPPORTED, "forwards.layers")
