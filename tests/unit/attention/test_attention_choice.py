"""Which back-ends are chosen, what is refused and by which name, and that the parts are bound to the right pool."""

import pytest

from protos.wire.errors import InternalFault, UnsupportedFeature
from tests.support.attention_cases import make_pool, planned
from worker_svc.attention.base import reachable, verify_bound
from worker_svc.attention.choice import TRAITS, AttentionRequest, choose_attention
from worker_svc.attention.phased_backend import PhasedAttention
from worker_svc.attention.registry import BACKENDS, attention_backend, attention_pair
from worker_svc.attention.torch_backend import TorchAttention
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.kv_order import KVOrder

HALF, FLOAT, BRAIN = "float16", "float32", "bfloat16"
PLAIN = {"device": "cpu", "dtype": FLOAT, "page_size": 16, "head_dim": 64}


def chosen(absent=None, **options):
    return choose_attention(AttentionRequest(**(PLAIN | options)), absent or {})


@pytest.mark.parametrize(
    ("options", "prefill", "decode", "order", "kv_dtype"),
    [
        ({}, "native", "native", KVOrder.NATIVE, HALF),
        ({"plain": True}, "torch", "torch", KVOrder.HEADS, FLOAT),
        ({"dtype": BRAIN}, "torch", "torch", KVOrder.HEADS, BRAIN),
        ({"page_size": 8}, "torch", "torch", KVOrder.HEADS, FLOAT),
        ({"head_dim": 16}, "torch", "torch", KVOrder.HEADS, FLOAT),
        ({"reproducible": True}, "tiled", "tiled", KVOrder.HEADS, FLOAT),
        ({"reproducible": True, "prefill": "native", "decode": "native"}, "native", "native", KVOrder.NATIVE, FLOAT),
        ({"reproducible": True, "decode": "native"}, "native", "native", KVOrder.NATIVE, FLOAT),
        ({"prefill": "torch"}, "torch", "native", KVOrder.NATIVE, HALF),
        ({"decode": "torch"}, "native", "torch", KVOrder.NATIVE, HALF),
        ({"prefill": "tiled", "decode": "torch"}, "tiled", "torch", KVOrder.HEADS, FLOAT),
        ({"device": "cuda", "dtype": BRAIN}, "flashinfer", "flashinfer", KVOrder.NHD, BRAIN),
        ({"device": "cuda"}, "torch", "torch", KVOrder.HEADS, FLOAT),
        ({"device": "cuda", "dtype": BRAIN, "decode": "torch"}, "flashinfer", "torch", KVOrder.NHD, BRAIN),
    ],
)
def test_the_pair_and_its_pool_follow_from_settings_and_model(options, prefill, decode, order, kv_dtype):
    found = chosen(**options)
    assert (found.prefill, found.decode, found.order, found.kv_dtype) == (prefill, decode, order, kv_dtype)


def test_what_auto_passes_over_is_said():
    found = chosen({"native": "there was no compiler"})
    assert (found.prefill, found.decode) == ("torch", "torch")
    assert found.reasons == (
        "prefill attention is not native: there was no compiler",
        "decode attention is not native: there was no compiler",
    )


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"decode": "flash"}, "decode_attention", "decode_attention is 'flash', known: auto, flashinfer, native, "),
        ({"decode": "native", "page_size": 32}, "page_size", "page_size is 32, decode_attention native works with: 16"),
        ({"prefill": "native", "page_size": 8}, "page_size", "page_size is 8, prefill_attention native"),
        ({"prefill": "native", "head_dim": 80}, "prefill_attention", "no kernel for heads 80 wide"),
        ({"prefill": "flashinfer"}, "prefill_attention", "it runs on cuda, device is cpu"),
        ({"decode": "native", "device": "cuda"}, "decode_attention", "it runs on cpu, device is cuda"),
        ({"decode": "tiled", "dtype": BRAIN}, "decode_attention", "it computes float32, dtype is bfloat16"),
        ({"decode": "torch", "reproducible": True}, "decode_attention", "depend on the batch"),
        (
            {"prefill": "tiled", "decode": "native", "reproducible": True},
            "decode_attention",
            "need one attention back-end, not tiled for prefill and native for decode",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_the_name_of_its_setting(options, field, message):
    with pytest.raises(UnsupportedFeature, match=message) as caught:
        chosen(**options)
    assert caught.value.field == field


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("page_size", [8, 16, 32])
def test_a_page_size_is_legal_for_both_back_ends_or_start_up_fails(side, page_size):
    other = {"prefill": "decode", "decode": "prefill"}[side]
    options = {side: "native", other: "torch", "page_size": page_size}
    if page_size == 16:
        assert getattr(chosen(**options), side) == "native"
        return
    with pytest.raises(UnsupportedFeature, match=f"page_size is {page_size}, {side}_attention native works with: 16"):
        chosen(**options)


def test_who_names_a_back_end_that_is_not_there_hears_why():
    with pytest.raises(UnsupportedFeature, match="decode_attention native: there was no compiler"):
        chosen({"native": "there was no compiler"}, decode="native")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"plain": True}, {"torch"}),
        ({"prefill": "tiled", "decode": "torch"}, {"tiled", "torch"}),
        ({"prefill": "tiled"}, {"tiled", "native", "torch"}),
        ({"prefill": "flashinfer", "decode": "torch"}, {"torch"}),
        ({"device": "cuda", "decode": "native", "dtype": BRAIN}, {"flashinfer", "torch"}),
    ],
)
def test_only_back_ends_that_may_be_used_are_looked_for(options, names):
    assert AttentionRequest(**(PLAIN | options)).possible() == names


def test_every_back_end_has_traits():
    assert set(BACKENDS) == set(TRAITS)


def test_decode_and_idle_steps_go_to_the_decode_back_end_and_others_to_prefill():
    pool = make_pool(0.0)
    backend = attention_pair("tiled", "torch", pool)
    assert isinstance(backend.plan(planned("decode").batch(pool)).backend, TorchAttention)
    for plan in ("prefill", "chunks", "mixed"):
        assert not isinstance(backend.plan(planned(plan).batch(pool)).backend, TorchAttention)


def test_a_pair_of_the_same_name_is_one_back_end():
    assert isinstance(attention_pair("torch", "torch", make_pool(0.0)), TorchAttention)


def test_a_pair_on_two_pools_is_refused():
    with pytest.raises(InternalFault, match="different pools"):
        PhasedAttention(prefill=TorchAttention(make_pool(0.0)), decode=TorchAttention(make_pool(0.0)))


class Wrapper:
    """A back-end around another, with a pool of its own to pretend with."""

    def __init__(self, inner, pool):
        self.pool = pool
        self.parts = (inner,)


def test_a_back_end_on_another_pool_is_refused_at_start_however_deep_it_lies():
    mine, other = make_pool(0.0), make_pool(0.0)
    translator = IndexTranslator((mine,))
    verify_bound(TorchAttention(mine), translator)
    verify_bound(Wrapper(attention_pair("tiled", "torch", mine), mine), translator)
    assert len(list(reachable(Wrapper(attention_pair("tiled", "torch", mine), mine)))) == 4
    for wrong in (
        TorchAttention(other),
        Wrapper(TorchAttention(mine), other),
        Wrapper(TorchAttention(other), mine),
        Wrapper(attention_pair("tiled", "torch", other), mine),
    ):
        with pytest.raises(InternalFault, match="is bound to a pool"):
            verify_bound(wrong, translator)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnsupportedFeature, match="'flash', known: flashinfer, native, tiled, torch"):
        attention_backend("flash", make_pool(0.0))
