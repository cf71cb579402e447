import pytest

from protos.wire.codec import worker_info_from_proto, worker_info_to_proto
from protos.wire.enums import Feature, ForwardMode, GraphPhase
from protos.wire.errors import ProtocolMismatch
from tests.support.plans import full_sub_pool, make_full_info, make_info


@pytest.mark.parametrize("info", [make_info(), make_full_info(), make_info(sub_pools=[full_sub_pool(page_size=1)])])
def test_a_worker_info_comes_back_equal(info):
    assert worker_info_from_proto(worker_info_to_proto(info)) == info


def test_what_a_newer_worker_offers_beyond_us_is_left_out():
    reply = worker_info_to_proto(make_full_info())
    reply.features.append(999)
    reply.modes.append(99)
    reply.buckets.add(phase=9, sizes=[1])
    info = worker_info_from_proto(reply)
    assert info == make_full_info()
    assert Feature.GRAPHS in info.features
    assert ForwardMode.DECODE in info.modes
    assert [entry.phase for entry in info.buckets] == [GraphPhase.DECODE, GraphPhase.PREFILL]


UNUSABLE = {
    "sub_pools.kind": lambda reply: setattr(reply.sub_pools[0], "kind", 9),
    "max_hidden_mode": lambda reply: setattr(reply, "max_hidden_mode", 0),
    "incarnation": lambda reply: setattr(reply, "incarnation", b"short"),
    "sub_pools": lambda reply: reply.ClearField("sub_pools"),
    "sub_pools.page_size": lambda reply: setattr(reply.sub_pools[1], "page_size", 0),
}


@pytest.mark.parametrize("field", UNUSABLE)
def test_what_must_be_understood_is_refused(field):
    reply = worker_info_to_proto(make_full_info())
    UNUSABLE[field](reply)
    with pytest.raises(ProtocolMismatch) as caught:
        worker_info_from_proto(reply)
    assert caught.value.field == field
