from dataclasses import replace

import pytest

from protos.forwardplane.v1 import plan_pb2
from protos.wire.codec import decode_result, encode_result
from protos.wire.errors import DataFault
from tests.support.frozen import flatten
from tests.support.plans import i32, u8, u32, u64
from tests.support.results import make_rejected_result, make_result

RESULTS = {
    "full": make_result(),
    "rejected": make_rejected_result(),
    "whole plan rejected": make_rejected_result(rejection=replace(make_rejected_result().rejection, row=None)),
    "plain": make_result(logprobs=None, hidden_states=None),
    "no rows": make_result(
        rows=replace(
            make_result().rows,
            handles=u64(),
            attempts=u32(),
            positions=i32(),
            statuses=u8(),
            token_ids=i32(),
            failures=None,
            token_counts=None,
            finite=None,
        ),
        logprobs=None,
        hidden_states=None,
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_decoding_gives_every_field_back(name):
    result = RESULTS[name]
    body = encode_result(result)
    assert flatten(decode_result(body)) == flatten(result)
    assert encode_result(decode_result(body)) == body


MALFORMED = {
    "identity.incarnation": lambda m: setattr(m.identity, "incarnation", b""),
    "rejection": lambda m: m.rejection.SetInParent(),
    "rows.positions": lambda m: setattr(m.rows, "positions", b"12345"),
    "rows.handles": lambda m: setattr(m.rows, "num_rows", 4),
    "rows.finite": lambda m: setattr(m.rows, "finite", b"\1"),
    "rows.statuses": lambda m: setattr(m.rows, "statuses", b"\1\4\1"),
    "rows.failures": lambda m: setattr(m.rows, "failures", b"\0\0\6"),
    "forwards.mode": lambda m: setattr(m.forwards[1], "mode", 10),
    "forwards.eager": lambda m: m.forwards[1].ClearField("graph_outcome"),
    "forwards.replayed.phase": lambda m: setattr(m.forwards[0].replayed, "phase", 0),
    "logprobs.output": lambda m: setattr(m.logprobs, "output", bytes(8)),
    "logprobs.output_top_indptr": lambda m: setattr(m.logprobs, "output_top_indptr", u32(0, 2, 1, 2).tobytes()),
    "logprobs.output_top_ids": lambda m: setattr(m.logprobs, "output_top_ids", bytes(4)),
    "logprobs.prompt_indptr": lambda m: setattr(m.logprobs, "prompt_indptr", u32(1, 1, 2, 2).tobytes()),
    "logprobs.prompt": lambda m: setattr(m.logprobs, "prompt", b""),
    "logprobs.prompt_top_values": lambda m: setattr(m.logprobs, "prompt_top_values", bytes(12)),
    "logprobs.prompt_top_ids": lambda m: m.logprobs.ClearField("prompt_top_indptr"),
    "hidden_states.dtype": lambda m: setattr(m.hidden_states, "dtype", "float64"),
    "hidden_states.indptr": lambda m: setattr(m.hidden_states, "indptr", b""),
    "hidden_states.states": lambda m: setattr(m.hidden_states, "hidden_size", 3),
}


@pytest.mark.parametrize("field", MALFORMED)
def test_malformed_results_name_their_field(field):
    message = plan_pb2.ForwardResult.FromString(encode_result(make_result()))
    MALFORMED[field](message)
    with pytest.raises(DataFault) as caught:
        decode_result(message.SerializeToString())
    assert caught.value.field == field


def test_bytes_that_are_no_result():
    with pytest.raises(DataFault, match="cannot be read"):
        decode_result(b"\xff\xff\xff")
    with pytest.raises(DataFault, match="the limit is 8388608"):
        decode_result(bytes((8 << 20) + 1))
    with pytest.raises(DataFault, match="cannot be read"):
        decode_result(bytes(8 << 20))
    with pytest.raises(DataFault, match=r"identity\.incarnation"):
        decode_result(b"")


def test_a_result_that_is_neither_rejection_nor_rows():
    message = plan_pb2.ForwardResult.FromString(encode_result(make_result()))
    message.ClearField("rows")
    with pytest.raises(DataFault) as caught:
        decode_result(message.SerializeToString())
    assert caught.value.field == "rejection"
    assert caught.value.plan_seq == 4
