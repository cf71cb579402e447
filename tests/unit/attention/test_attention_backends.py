"""Every back-end against a dense computation: prefill, chunks, decode, mixed; whatever unused slots hold."""

import numpy as np
import pytest
import torch

from protos.wire.errors import InternalFault, UnsupportedFeature
from tests.support.forwards import Row, make_batch
from worker_svc.attention.base import verify_bound
from worker_svc.attention.paged_rows import group_by_length
from worker_svc.attention.registry import BACKENDS, attention_backend
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.token_to_kv_pool import KVGeometry, TokenToKVPool

HEADS, SHARE, DIM, LAYER = 2, 3, 16, 1
PLANS = {
    "prefill": ([0, 0, 0], [1, 64, 30]),
    "decode": ([0, 15, 16, 63, 64, 200], [1, 1, 1, 1, 1, 1]),
    "chunks": ([16, 7, 100], [16, 60, 9]),
    "mixed": ([130, 0, 5, 64, 0], [1, 40, 1, 8, 1]),
}


def make_pool(fill: float, dtype=torch.float32) -> TokenToKVPool:
    geometry = KVGeometry(num_pages=80, page_size=16, num_layers=2, num_kv_heads=HEADS, head_dim=DIM, dtype=dtype)
    pool = TokenToKVPool(geometry, device=torch.device("cpu"))
    for layer in range(2):
        pool.keys(layer).fill_(fill)
        pool.values(layer).fill_(fill)
    return pool


class Step:
    """Rows with known keys and values; their prefixes are in the pool, the rest is computed by the step."""

    def __init__(self, name: str, pool: TokenToKVPool) -> None:
        rng = torch.Generator().manual_seed(0)
        self.prefixes, self.lens = PLANS[name]
        self.totals = [a + b for a, b in zip(self.prefixes, self.lens, strict=True)]
        dtype = pool.geometry.dtype
        self.keys = [torch.randn(total, HEADS, DIM, generator=rng).to(dtype) for total in self.totals]
        self.values = [torch.randn(total, HEADS, DIM, generator=rng).to(dtype) for total in self.totals]
        self.queries = [torch.randn(n, HEADS * SHARE, DIM, generator=rng).to(dtype) for n in self.lens]
        pages = iter(np.random.default_rng(0).permutation(79) + 1)
        self.rows = [
            Row(ids=range(total), pages=[next(pages) for _ in range(-(-total // 16))]) for total in self.totals
        ]
        for index, row in enumerate(self.rows):
            slots = torch.tensor([row.pages[p // 16] * 16 + p % 16 for p in range(self.prefixes[index])]).long()
            prefix = slice(0, self.prefixes[index])
            pool.write(LAYER, slots=slots, keys=self.keys[index][prefix], values=self.values[index][prefix])
            row.kv_len = self.prefixes[index]

    def run(self, backend, pool: TokenToKVPool) -> torch.Tensor:
        batch = make_batch(self.rows, self.lens, translator=IndexTranslator((pool,)))
        new = [slice(prefix, None) for prefix in self.prefixes]
        return backend.run(
            torch.cat(self.queries),
            torch.cat([keys[part] for keys, part in zip(self.keys, new, strict=True)]),
            torch.cat([values[part] for values, part in zip(self.values, new, strict=True)]),
            layer=LAYER,
            metadata=backend.plan(batch),
        )

    def dense(self) -> torch.Tensor:
        outputs = []
        for query, key, value, prefix in zip(self.queries, self.keys, self.values, self.prefixes, strict=True):
            key, value = (part.double().repeat_interleave(SHARE, 1) for part in (key, value))
            scores = torch.einsum("qhd,khd->hqk", query.double(), key) / DIM**0.5
            hidden = torch.arange(len(key)) > prefix + torch.arange(len(query))[:, None]
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, value).reshape(len(query), -1))
        return torch.cat(outputs)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", BACKENDS)
def test_equals_dense_attention(name, plan):
    pool = make_pool(7.0)
    step = Step(plan, pool)
    torch.testing.assert_close(step.run(attention_backend(name, pool), pool).double(), step.dense(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("plan", PLANS)
def test_the_fast_back_end_also_works_in_bfloat16(plan):
    pool = make_pool(float("nan"), torch.bfloat16)
    step = Step(plan, pool)
    found = step.run(attention_backend("torch", pool), pool)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), step.dense(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), -1e30])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", BACKENDS)
def test_unused_slots_and_the_sink_never_reach_an_output(name, plan, fill):
    clean, dirty = make_pool(0.0), make_pool(fill)
    known = Step(plan, clean).run(attention_backend(name, clean), clean)
    assert torch.equal(Step(plan, dirty).run(attention_backend(name, dirty), dirty), known)


@pytest.mark.parametrize("name", BACKENDS)
def test_keys_and_values_are_stored_in_the_rows_pages_only(name):
    pool = make_pool(7.0)
    step = Step("mixed", pool)
    step.run(attention_backend(name, pool), pool)
    for row, keys, values in zip(step.rows, step.keys, step.values, strict=True):
        stored = pool.keys(LAYER)[:, row.pages].reshape(HEADS, -1, DIM)[:, : len(keys)]
        assert torch.equal(stored.transpose(0, 1), keys)
        stored = pool.values(LAYER)[:, row.pages].reshape(HEADS, -1, DIM)[:, : len(values)]
        assert torch.equal(stored.transpose(0, 1), values)
    assert (pool.keys(LAYER)[:, 0] == 7.0).all()
    assert (pool.keys(0) == 7.0).all()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_poisoned_row_stays_alone(name):
    pool = make_pool(0.0)
    step = Step("mixed", pool)
    known = step.run(attention_backend(name, pool), pool)
    step.values[1][0] = float("nan")
    found = step.run(attention_backend(name, pool), pool)
    assert found[1:41].isnan().any()
    assert torch.equal(found[:1], known[:1])
    assert torch.equal(found[41:], known[41:])


def test_a_tile_has_the_same_bits_wherever_a_chunk_begins():
    whole = make_pool(0.0)
    backend = attention_backend("tiled", whole)
    step = Step("prefill", whole)
    known = step.run(backend, whole)[1:65]
    for prefix in (1, 7, 16, 40, 63):
        step.prefixes, step.lens = [1, prefix, 30], [0, 64 - prefix, 0]
        pool = make_pool(0.0)
        row = step.rows[1]
        slots = torch.tensor([row.pages[p // 16] * 16 + p % 16 for p in range(prefix)])
        pool.write(LAYER, slots=slots, keys=step.keys[1][:prefix], values=step.values[1][:prefix])
        row.kv_len = prefix
        batch = make_batch([row], [64 - prefix], translator=IndexTranslator((pool,)))
        backend = attention_backend("tiled", pool)
        found = backend.run(
            step.queries[1][prefix:],
            step.keys[1][prefix:],
            step.values[1][prefix:],
            layer=LAYER,
            metadata=backend.plan(batch),
        )
        assert torch.equal(found, known[prefix:])


def test_rows_of_similar_length_are_gathered_together():
    lens = np.array([1, 5000, 17, 300, 16, 290], np.int32)
    groups = group_by_length(np.arange(6), lens, unit=16)
    assert [(rows.tolist(), width) for rows, width in groups] == [([0, 4], 16), ([2], 32), ([3, 5], 304), ([1], 5008)]


def test_a_gather_of_long_rows_is_cut():
    groups = group_by_length(np.arange(5), np.full(5, 16_000, np.int32), unit=16)
    assert [(rows.tolist(), width) for rows, width in groups] == [([0, 1], 16_000), ([2, 3], 16_000), ([4], 16_000)]


def test_a_back_end_on_another_pool_is_refused_at_start():
    mine, other = make_pool(0.0), make_pool(0.0)
    verify_bound(attention_backend("torch", mine), IndexTranslator((mine,)))
    with pytest.raises(InternalFault, match="bound to a pool"):
        verify_bound(attention_backend("torch", mine), IndexTranslator((other,)))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnsupportedFeature, match="'flash', known: tiled, torch"):
        attention_backend("flash", make_pool(0.0))
