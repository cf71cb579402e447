import numpy as np
import pytest

from protos.wire.codec import decode_plan, encode_plan
from protos.wire.columns import ROWS
from protos.wire.digest import plan_digest
from protos.wire.enums import GraphPhase, GraphRefusal
from protos.wire.plan import GraphChoice, Mask, MaskColumns, SamplingColumns, WriteWindow
from tests.support import plans
from tests.support.plans import u32, with_element, with_value

RICH = plans.make_rich_plan()


def test_sixteen_bytes_that_survive_the_wire():
    assert len(plan_digest(RICH)) == 16
    assert plan_digest(decode_plan(encode_plan(RICH))) == plan_digest(RICH)


def test_time_budget_and_trace_context_do_not_count():
    other = with_value(with_value(RICH, "identity.budget_ms", 1), "identity.traceparent", "")
    assert plan_digest(other) == plan_digest(RICH)


def test_an_empty_column_counts_as_absent():
    empty = with_value(RICH, "tokens.ref_offsets", np.array([], np.uint32))
    assert plan_digest(empty) == plan_digest(RICH)


def test_strided_arrays_count_by_their_elements():
    wide = np.repeat(RICH.rows.handles, 2)
    assert plan_digest(with_value(RICH, "rows.handles", wide[::2])) == plan_digest(RICH)


ELEMENTS = [
    *(f"rows.{column.name}" for column in ROWS if getattr(RICH.rows, column.name) is not None),
    "tokens.ids",
    "tokens.ref_rows",
    "page_tables.0.indices",
    "page_tables.1.start_positions",
    "page_operations.targets",
    "sampling.seeds",
    "penalties.output_counts",
    "masks.row_masks",
    "masks.masks.0.allowed_bits",
    "logprobs.target_ids",
]


@pytest.mark.parametrize("path", ELEMENTS)
def test_every_element_counts(path):
    changed = with_element(RICH, path, 0, 77)
    assert plan_digest(changed) != plan_digest(RICH)


VALUES = {
    "identity.epoch": 2**64 - 1,
    "identity.term": 4,
    "identity.seq": 10,
    "identity.incarnation": bytes(16),
    "identity.required_features": (1,),
    "forwards.0.row_end": 3,
    "forwards.0.layers": (0, 1),
    "forwards.0.graph": GraphRefusal.MODE,
    "forwards.0.write_window": WriteWindow(run=(0, 1)),
    "page_tables.0.sub_pool": 1,
    "sampling": None,
    "masks": None,
    "delta": plans.make_delta(RICH, digest=bytes(16)),
    "reserved": ("adapters",),
}


@pytest.mark.parametrize("path", VALUES)
def test_every_value_counts(path):
    assert plan_digest(with_value(RICH, path, VALUES[path])) != plan_digest(RICH)


def test_kinds_are_told_apart():
    plan = plans.make_decode_plan(1)
    digests = {
        plan_digest(with_value(plan, path, value))
        for path, value in (
            ("sampling", SamplingColumns()),
            ("masks", MaskColumns(masks=(Mask(allowed_ids=u32()),), row_masks=u32(0))),
            ("masks", MaskColumns(masks=(Mask(denied_ids=u32()),), row_masks=u32(0))),
            ("forwards.0.write_window", WriteWindow(run=(0, 1))),
            ("forwards.0.write_window", WriteWindow(columns=(0, 1))),
            ("forwards.0.write_window", WriteWindow(flat_index=u32(0, 1))),
            ("forwards.0.graph", GraphChoice(phase=GraphPhase.DECODE, bucket=1)),
        )
    }
    assert len(digests) == 7
