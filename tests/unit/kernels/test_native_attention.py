"""Paged attention: conformance with the reference, and bits that no neighbour, chunking or thread changes."""

import numpy as np
import pytest
import torch

from kernels.errors import KernelError
from kernels.native_model import StepPages
from kernels.native_ops import PagedRowTable, paged_attention
from kernels.reference.paged_attention import paged_attention as reference

PAGE = 16


def table_of(rows, *, starts=None, num_pages):
    """Rows of (tokens computed now, tokens in all) on scattered pages."""
    order = np.random.default_rng(7).permutation(num_pages - 1) + 1
    firsts = [0] * len(rows) if starts is None else [start // PAGE for start in starts]
    sizes = [-(-length // PAGE) - first for (_, length), first in zip(rows, firsts, strict=True)]
    indptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return PagedRowTable(
        qo_indptr=np.concatenate([[0], np.cumsum([tokens for tokens, _ in rows])]).astype(np.int32),
        seq_lens=np.array([length for _, length in rows], np.int32),
        pages=StepPages(
            kv_indptr=indptr,
            kv_indices=order[: indptr[-1]].astype(np.int32),
            out_cache_loc=np.empty(0, np.int64),
            start_positions=None if starts is None else np.array(starts, np.int32),
        ),
    )


def case(rows, *, heads=(6, 2), dim=64, dtype=np.float16, starts=None):
    rng = np.random.default_rng(3)
    num_pages = 2 + sum(-(-length // PAGE) for _, length in rows)
    table = table_of(rows, starts=starts, num_pages=num_pages)
    queries = rng.normal(size=(table.qo_indptr[-1], heads[0], dim)).astype(np.float32)
    kv = rng.normal(size=(num_pages, heads[1], 2, PAGE * dim)).astype(dtype)
    return queries, kv, table


def poison(kv, table):
    """NaN in the sink and in every slot that no row owns."""
    used = np.zeros((kv.shape[0], PAGE), bool)
    starts = table.pages.start_positions
    for row, length in enumerate(table.seq_lens):
        first = 0 if starts is None else starts[row]
        pages = table.pages.kv_indices[table.pages.kv_indptr[row] : table.pages.kv_indptr[row + 1]]
        for position in range(first, length):
            used[pages[(position - first) // PAGE], position % PAGE] = True
    bad = kv.copy()
    dim = kv.shape[-1] // PAGE
    bad[:, :, 0] = np.where(used[:, None, None, :], bad[:, :, 0].reshape(*kv.shape[:2], dim, PAGE), np.nan).reshape(
        *kv.shape[:2], -1
    )
    bad[:, :, 1] = np.where(used[:, None, :, None], bad[:, :, 1].reshape(*kv.shape[:2], PAGE, dim), np.nan).reshape(
        *kv.shape[:2], -1
    )
    assert np.isnan(bad).any()
    return bad


MIXED = [(1, 1), (5, 5), (1, 200), (19, 83), (1, 64), (9, 16)]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(
    ("heads", "dim"), [((6, 2), 64), ((4, 1), 256), ((2, 2), 128), ((4, 2), 64), ((7, 1), 32), ((9, 3), 64)]
)
def test_it_agrees_with_the_reference(pool, heads, dim, dtype):
    queries, kv, table = case(MIXED, heads=heads, dim=dim, dtype=dtype)

    got = paged_attention(pool, queries, kv, table=table, scale=dim**-0.5)

    expected = reference(torch.from_numpy(queries), torch.from_numpy(kv), table=table, scale=dim**-0.5)
    np.testing.assert_allclose(got, expected.numpy(), atol=3e-6)


@pytest.mark.parametrize(("window", "starts"), [(1, None), (20, None), (64, None), (70, [0, 0, 128, 0, 0, 0])])
def test_a_sliding_window_agrees_with_the_reference(pool, window, starts):
    queries, kv, table = case(MIXED, starts=starts)

    got = paged_attention(pool, queries, kv, table=table, scale=0.125, window=window)

    expected = reference(torch.from_numpy(queries), torch.from_numpy(kv), table=table, scale=0.125, window=window)
    np.testing.assert_allclose(got, expected.numpy(), atol=3e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_nan_where_no_row_owns_a_slot_changes_no_bit(pool, dtype):
    queries, kv, table = case(MIXED, dtype=dtype)
    clean = paged_attention(pool, queries, kv, table=table, scale=0.125)

    assert np.array_equal(paged_attention(pool, queries, poison(kv, table), table=table, scale=0.125), clean)


def test_nan_before_the_window_changes_no_bit(pool):
    queries, kv, table = case([(3, 100)])
    clean = paged_attention(pool, queries, kv, table=table, scale=0.125, window=20)
    kv[table.pages.kv_indices[:4]] = np.nan

    assert np.array_equal(paged_attention(pool, queries, kv, table=table, scale=0.125, window=20), clean)


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("chunk", [1, 3, 8, 11, 64])
def test_chunks_and_decode_give_the_bits_of_one_prefill(pool, chunk, window):
    length = 150
    queries, kv, whole = case([(length, length)])
    expected = paged_attention(pool, queries, kv, table=whole, scale=0.125, window=window)

    for begin in range(0, length, chunk):
        end = min(length, begin + chunk)
        table = PagedRowTable(
            qo_indptr=np.array([0, end - begin], np.int32), seq_lens=np.array([end], np.int32), pages=whole.pages
        )
        got = paged_attention(pool, queries[begin:end], kv, table=table, scale=0.125, window=window)
        assert np.array_equal(got, expected[begin:end]), begin


def test_pages_before_the_window_may_be_missing(pool):
    queries, kv, table = case([(2, 200)])
    expected = paged_attention(pool, queries, kv, table=table, scale=0.125, window=40)
    cut = StepPages(
        kv_indptr=np.array([0, 4], np.int32),
        kv_indices=table.pages.kv_indices[9:],
        out_cache_loc=np.empty(0, np.int64),
        start_positions=np.array([144], np.int32),
    )
    trimmed = PagedRowTable(qo_indptr=table.qo_indptr, seq_lens=table.seq_lens, pages=cut)

    assert np.array_equal(paged_attention(pool, queries, kv, table=trimmed, scale=0.125, window=40), expected)


def test_threads_that_share_one_row_give_the_bits_of_one_thread(pool, lone_pool):
    queries, kv, table = case([(1, 1000)])

    alone = paged_attention(lone_pool, queries, kv, table=table, scale=0.125)

    assert np.array_equal(paged_attention(pool, queries, kv, table=table, scale=0.125), alone)


def test_large_scores_do_not_overflow(pool):
    queries, kv, table = case([(2, 90)])

    got = paged_attention(pool, queries * 1000, kv, table=table, scale=1.0)

    expected = reference(torch.from_numpy(queries * 1000), torch.from_numpy(kv), table=table, scale=1.0)
    np.testing.assert_allclose(got, expected.numpy(), atol=1e-3)


def broken(table, **changes):
    pages = {
        name: getattr(table.pages, name) for name in ("kv_indptr", "kv_indices", "out_cache_loc", "start_positions")
    }
    rows = {"qo_indptr": table.qo_indptr, "seq_lens": table.seq_lens}
    return PagedRowTable(
        **{name: changes.get(name, value) for name, value in rows.items()},
        pages=StepPages(**{name: changes.get(name, value) for name, value in pages.items()}),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_indices": np.array([1, 2, 99], np.int32)}, r"kv_indices\[2\] is 99, must be 0 to 4"),
        ({"kv_indices": np.array([1, 2, -1], np.int32)}, r"kv_indices\[2\] is -1"),
        ({"seq_lens": np.array([49], np.int32)}, r"kv_indptr\[1\] is 3, must be 4"),
        ({"seq_lens": np.array([1], np.int32)}, r"seq_lens\[0\] is 1, must be 2"),
        ({"qo_indptr": np.array([0, 3], np.int32)}, r"qo_indptr\[1\] is 3, must be 1 to 2"),
        ({"start_positions": np.array([8], np.int32)}, r"start_positions\[0\] is 8, must be 0 to 0"),
    ],
)
def test_an_index_out_of_range_is_refused(pool, changes, message):
    queries, kv, table = case([(2, 40)])

    with pytest.raises(KernelError, match=message):
        paged_attention(pool, queries, kv, table=broken(table, **changes), scale=0.125)
