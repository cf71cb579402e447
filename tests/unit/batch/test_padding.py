"""Padding a batch and trimming it again: what is added reads and writes the sink only, and nothing real changes."""

import json
from pathlib import Path

import pytest
import torch

from protos.wire.enums import ForwardMode
from tests.support import plans
from tests.support.batch_content import content, storages
from worker_svc.batch.builder import BatchBuilder
from worker_svc.batch.forward_batch import PaddedShape
from worker_svc.batch.padding_counts import AttentionRanks, local_tokens
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.token_to_kv_pool import KVGeometry

VECTORS = json.loads((Path(__file__).parents[2] / "golden" / "execution_vectors.json").read_text())


class Pages:
    geometry = KVGeometry(num_pages=1024, page_size=16, num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)


def build(plan):
    builder = BatchBuilder(translator=IndexTranslator((Pages(),)), page_sizes=(16,), device=torch.device("cpu"))
    (batch,) = builder.build(plan)
    return batch


def shape(batch, *, rows=0, tokens=0, logits=0):
    return PaddedShape(
        num_reqs=batch.num_reqs + rows, num_tokens=batch.num_tokens + tokens, num_logits=batch.num_logits + logits
    )


def test_padding_rows_of_a_decode_batch_are_one_token_sequences_in_the_sink():
    padded = build(plans.make_decode_plan(3)).pad(PaddedShape(num_reqs=8, num_tokens=8, num_logits=8))
    padded.check()
    (pages,) = padded.page_groups
    assert padded.seq_lens.tolist() == [33, 33, 33, 1, 1, 1, 1, 1]
    assert padded.positions.tolist() == [32, 32, 32, 0, 0, 0, 0, 0]
    assert padded.last_token_rows.tolist() == list(range(8))
    assert padded.logits_rows.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert pages.out_cache_loc[3:].tolist() == [0] * 5
    assert pages.kv_indices[pages.kv_indptr[3] :].tolist() == [0] * 5
    assert pages.kv_last_page_len[3:].tolist() == [1] * 5


def test_padding_of_an_extend_batch_is_tokens_and_empty_rows_behind_the_real_ones():
    padded = build(plans.make_extend_plan([5, 7])).pad(PaddedShape(num_reqs=4, num_tokens=16, num_logits=2))
    padded.check()
    (pages,) = padded.page_groups
    assert padded.extend.extend_lens.tolist() == [5, 7, 0, 0]
    assert padded.extend.extend_start_loc.tolist() == [0, 5, 12, 12]
    assert padded.seq_lens.tolist() == [5, 7, 0, 0]
    assert padded.input_ids[12:].tolist() == padded.positions[12:].tolist() == [0] * 4
    assert pages.out_cache_loc[12:].tolist() == [0] * 4
    assert pages.kv_indptr.tolist() == [0, 1, 2, 2, 2]


def test_a_padded_batch_counts_what_is_real_on_host_and_device():
    padded = build(plans.make_extend_plan([5])).pad(PaddedShape(num_reqs=2, num_tokens=8, num_logits=1))
    counts = padded.padding
    assert (padded.real_reqs, padded.real_tokens, padded.real_logits) == (1, 5, 1)
    assert counts.global_tokens.device.tolist() == [counts.global_tokens.host] == [5]
    assert counts.local_tokens.device.tolist() == [counts.local_tokens.host] == [5]


def test_padding_shares_no_storage_and_leaves_the_batch_alone():
    batch = build(plans.make_mixed_plan())
    before = content(batch)
    padded = batch.pad(shape(batch, rows=2, tokens=5))
    trimmed = padded.trim()
    lent = set(storages(batch.sampling))
    assert set(storages(padded)) & set(storages(batch)) == lent
    assert (set(storages(trimmed)) - lent).isdisjoint(storages(padded) + storages(batch))
    padded.input_ids.fill_(9)
    assert content(batch) == before


def test_a_relabelled_batch_keeps_its_logical_mode_through_padding():
    rows = [plans.decode(20), plans.decode(33)]
    extend, decode = ForwardMode["EXTEND"], ForwardMode["DECODE"]
    forward = plans.whole_forward(rows, mode=extend, logical_mode=decode)
    batch = build(plans.make_plan(rows, forwards=[forward]))
    for form in (batch, batch.pad(shape(batch, rows=2, tokens=2)), batch.pad(shape(batch, rows=2, tokens=2)).trim()):
        assert (form.forward_mode, form.logical_mode) == (extend, decode)


@pytest.mark.parametrize("case", [case for case in VECTORS["trim"] if case["mode"] in ("EXTEND", "DECODE")])
def test_trimming_keeps_the_known_rows_and_one_sampled_id_a_request(case):
    lengths = case["extend_lens"]
    batch = build(plans.make_extend_plan(lengths) if lengths else plans.make_decode_plan(case["num_reqs"]))
    padded = batch.pad(shape(batch, rows=4, tokens=4, logits=3))
    assert padded.num_tokens == case["token_rows_kept"] + 4
    trimmed = padded.trim()
    assert trimmed.num_tokens == case["token_rows_kept"]
    assert trimmed.num_logits == len(trimmed.sampling.rows) == case["sampled_ids"]
    assert content(trimmed) == content(batch)


@pytest.mark.parametrize("case", VECTORS["local"])
def test_local_counts_of_the_known_cases(case):
    for is_sharded, known in ((True, case["sharded"]), (False, case["replicated"])):
        size = case["attn_tp_size"]
        found = [
            local_tokens(
                case["global_tokens"],
                padded_tokens=case["padded_width"],
                ranks=AttentionRanks(size=size, rank=rank, is_sharded=is_sharded),
            )
            for rank in range(size)
        ]
        assert found == known


def test_five_tokens_in_a_width_of_eight_on_four_ranks_are_two_two_one_and_none():
    batch = build(plans.make_extend_plan([5]))
    padded = [
        batch.pad(shape(batch, tokens=3), ranks=AttentionRanks(size=4, rank=rank, is_sharded=True)) for rank in range(4)
    ]
    assert [batch.padding.local_tokens.device.item() for batch in padded] == [2, 2, 1, 0]
    assert [batch.padding.global_tokens.device.item() for batch in padded] == [5] * 4


def test_what_does_not_fit_and_a_padded_batch_are_not_padded():
    batch = build(plans.make_decode_plan(3))
    with pytest.raises(AssertionError):
        batch.pad(PaddedShape(num_reqs=2, num_tokens=2, num_logits=3))
    with pytest.raises(AssertionError):
        batch.pad(PaddedShape(num_reqs=4, num_tokens=5, num_logits=3))
    padded = batch.pad(shape(batch, rows=1, tokens=1))
    with pytest.raises(AssertionError):
        padded.pad(shape(padded, rows=1, tokens=1))


def test_a_batch_that_was_not_padded_trims_to_itself():
    batch = build(plans.make_decode_plan(2))
    assert batch.trim() is batch
