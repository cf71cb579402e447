import time

import numpy as np
import pytest

from protos.forwardplane.v1 import plan_pb2
from protos.wire.codec import checksum, decode_identity, decode_plan, encode_plan, open_message
from protos.wire.enums import ForwardMode, GraphPhase
from protos.wire.errors import DataFault, InvalidPlan, UnsupportedFeature
from protos.wire.plan import GraphChoice, LogprobColumns, Mask, MaskColumns, SamplingColumns, WriteWindow
from tests.support import plans
from tests.support.frozen import flatten
from tests.support.plans import u32

PLANS = {
    "decode": plans.make_decode_plan(3),
    "extend": plans.make_extend_plan([1, 16, 17]),
    "mixed": plans.make_mixed_plan(),
    "idle": plans.make_idle_plan(),
    "rich": plans.make_rich_plan(),
    "delta": plans.make_decode_plan(2, seq=2, delta=plans.make_delta(plans.make_decode_plan(2), digest=bytes(16))),
}


@pytest.mark.parametrize("name", PLANS)
def test_decoding_gives_every_field_back(name):
    plan = PLANS[name]
    decoded = decode_plan(encode_plan(plan))
    assert flatten(decoded) == flatten(plan)


@pytest.mark.parametrize("name", PLANS)
def test_encoding_a_decoded_plan_gives_the_same_bytes(name):
    body = encode_plan(PLANS[name])
    assert encode_plan(decode_plan(body)) == body


def test_decoded_arrays_cannot_be_written():
    plan = decode_plan(encode_plan(PLANS["rich"]))
    for array in (plan.rows.handles, plan.tokens.ids, plan.page_tables[0].indices, plan.penalties.prompt_ids):
        assert not array.flags.writeable


def test_absent_and_empty_columns():
    plan = decode_plan(encode_plan(PLANS["idle"]))
    assert plan.rows.sample_indices is None
    assert plan.rows.handles.dtype == np.uint64
    assert len(plan.rows.handles) == 0
    assert plan.sampling is None


def test_content_of_an_empty_csr_table_is_an_empty_array_not_absent():
    sampling = SamplingColumns(bias_indptr=u32(0, 0), bias_ids=u32(), bias_values=plans.f32())
    logprobs = LogprobColumns(prompt_starts=plans.i32(33), target_indptr=u32(0, 0), target_ids=plans.i32())
    plan = decode_plan(encode_plan(plans.make_decode_plan(1, sampling=sampling, logprobs=logprobs)))
    assert plan.sampling.bias_ids.tolist() == []
    assert plan.logprobs.target_ids.tolist() == []
    assert plan.sampling.seeds is None


def test_a_group_without_columns_stays_present():
    plan = decode_plan(encode_plan(plans.make_decode_plan(1, sampling=SamplingColumns())))
    assert plan.sampling is not None


@pytest.mark.parametrize(
    "window",
    [
        WriteWindow(columns=(0, 0)),
        WriteWindow(run=(1, 5)),
        WriteWindow(flat_index=u32(3, 4)),
        WriteWindow(flat_index=u32()),
    ],
)
def test_write_windows_and_layers_come_back(window):
    row = plans.decode(20)
    graph = GraphChoice(phase=GraphPhase.DECODE, bucket=4)
    forward = plans.whole_forward([row], write_window=window, layers=(2, 5), graph=graph)
    plan = plans.make_plan([row], forwards=[forward])
    assert flatten(decode_plan(encode_plan(plan))) == flatten(plan)


def test_an_empty_mask_keeps_its_kind():
    masks = MaskColumns(masks=(Mask(allowed_ids=u32()), Mask(denied_ids=u32())), row_masks=u32(1))
    plan = decode_plan(encode_plan(plans.make_decode_plan(1, masks=masks)))
    assert [mask.allowed_ids is None for mask in plan.masks.masks] == [False, True]


def test_a_column_of_another_element_type_is_a_programmer_error():
    plan = plans.with_value(PLANS["decode"], "rows.seq_lens", np.array([33, 33, 33], np.int64))
    with pytest.raises(AssertionError, match="seq_lens is int64"):
        encode_plan(plan)


def message(name="rich"):
    return plan_pb2.ForwardPlan.FromString(encode_plan(PLANS[name]))


MALFORMED = {
    "rows.seq_lens": lambda m: setattr(m.rows, "seq_lens", b"12345"),
    "tokens.ref_seqs": lambda m: setattr(m.tokens, "ref_seqs", b"1234"),
    "page_tables.indices": lambda m: setattr(m.page_tables[1], "indices", b"1"),
    "page_operations.sub_pools": lambda m: setattr(m.page_operations, "sub_pools", b"1"),
    "sampling.temperatures": lambda m: setattr(m.sampling, "temperatures", b"1"),
    "penalties.output_counts": lambda m: setattr(m.penalties, "output_counts", b"1"),
    "masks.row_masks": lambda m: setattr(m.masks, "row_masks", b"1"),
    "masks.masks.allowed_ids": lambda m: setattr(m.masks.masks[1], "allowed_ids", b"1"),
    "masks.masks": lambda m: m.masks.masks.add(),
    "logprobs.target_ids": lambda m: setattr(m.logprobs, "target_ids", b"1"),
    "delta.base_rows": lambda m: setattr(m.delta, "base_rows", b"1"),
    "forwards.write_window.flat_index": lambda m: setattr(m.forwards[0].write_window, "flat_index", b"1"),
    "forwards.write_window": lambda m: m.forwards[0].write_window.SetInParent(),
    "forwards.graph_choice": lambda m: m.forwards[0].ClearField("graph_choice"),
    "forwards.mode": lambda m: m.forwards[0].ClearField("mode"),
    "rows.handles": lambda m: setattr(m.rows, "num_rows", 5),
    "rows": lambda m: m.ClearField("rows"),
    "tokens": lambda m: m.ClearField("tokens"),
    "forwards": lambda m: m.forwards.extend([m.forwards[0]] * 16),
    "page_tables": lambda m: m.page_tables.extend([m.page_tables[0]] * 3),
    "identity.seq": lambda m: m.identity.ClearField("seq"),
    "identity.incarnation": lambda m: setattr(m.identity, "incarnation", bytes(15)),
    "identity.traceparent": lambda m: setattr(m.identity, "traceparent", "0" * 65),
    "identity.required_features": lambda m: m.identity.required_features.extend(range(65)),
}


@pytest.mark.parametrize("field", MALFORMED)
def test_malformed_messages_name_their_field(field):
    changed = message()
    MALFORMED[field](changed)
    with pytest.raises(InvalidPlan) as caught:
        decode_plan(changed.SerializeToString())
    assert caught.value.field == field
    assert caught.value.plan_seq == (None if field == "identity.seq" else 9)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("forwards.mode", lambda m: setattr(m.forwards[0], "mode", 99)),
        ("forwards.logical_mode", lambda m: setattr(m.forwards[0], "logical_mode", 10)),
        ("forwards.eager", lambda m: setattr(m.forwards[0], "eager", 13)),
        ("forwards.graph.phase", lambda m: setattr(m.forwards[0].graph, "phase", 3)),
    ],
)
def test_unknown_enum_values_are_unsupported(field, change):
    changed = message()
    change(changed)
    with pytest.raises(UnsupportedFeature) as caught:
        decode_plan(changed.SerializeToString())
    assert caught.value.field == field


def test_groups_of_later_rounds_are_named():
    changed = message("decode")
    changed.speculation.SetInParent()
    changed.adapters.slots = b"1234"
    plan = decode_plan(changed.SerializeToString())
    assert plan.reserved == ("speculation", "adapters")
    with pytest.raises(AssertionError, match="speculation"):
        encode_plan(plan)


def test_bytes_that_are_no_plan():
    with pytest.raises(InvalidPlan, match="cannot be read"):
        decode_plan(b"\xff\xff\xff")
    with pytest.raises(InvalidPlan, match="the limit is 8388608"):
        decode_plan(bytes((8 << 20) + 1))
    with pytest.raises(InvalidPlan, match="cannot be read"):
        decode_plan(bytes(8 << 20))


def test_lists_may_be_as_long_as_their_caps():
    changed = message()
    changed.forwards.extend([changed.forwards[0]] * 15)
    changed.page_tables.extend([changed.page_tables[0]] * 2)
    changed.identity.traceparent = "0" * 64
    plan = decode_plan(changed.SerializeToString())
    assert (len(plan.forwards), len(plan.page_tables), len(plan.identity.traceparent)) == (16, 4, 64)


def test_the_identity_of_a_malformed_plan_can_be_read():
    changed = message()
    changed.rows.seq_lens = b"1"
    identity = decode_identity(changed.SerializeToString())
    assert (identity.epoch, identity.term, identity.seq) == (7, 3, 9)


@pytest.mark.parametrize("body", [b"\xff\xff\xff", b""])
def test_without_an_identity_it_is_a_data_fault(body):
    with pytest.raises(DataFault):
        decode_identity(body)


def test_a_wrong_checksum_is_a_data_fault():
    body = encode_plan(PLANS["decode"])
    assert open_message(body, checksum(body)) is body
    flipped = bytes([body[0] ^ 1]) + body[1:]
    with pytest.raises(DataFault, match="checksum"):
        open_message(flipped, checksum(body))


def test_a_large_decode_plan_fits_its_size_and_time():
    info = plans.make_info(
        sub_pools=[plans.full_sub_pool(num_pages=70000)], limits=plans.make_limits(context_tokens=8192)
    )
    plan = plans.make_decode_plan(256, context=4095, info=info)
    assert plan.forwards[0].mode is ForwardMode.DECODE
    body = encode_plan(plan)
    assert len(body) <= 300 << 10
    best = min(_seconds(lambda: decode_plan(encode_plan(plan))) for _ in range(10))
    assert best < 0.002


def _seconds(work):
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
