import numpy as np
import pytest

from worker_svc.sampling.candidates import ranked_ids, scaled_row, surviving_ids

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "floor": -np.inf}


def scaled(*probabilities):
    row = np.log(np.array(probabilities, np.float32))
    return scaled_row(row, best=row.max(), temperature=np.float32(1))


def survivors(row, **options):
    return sorted(surviving_ids(row, **(OFF | options)).tolist())


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64, 100])
def test_ranked_ids_are_a_prefix_of_the_full_sort_with_lowest_id_first(count):
    values = np.random.default_rng(1).integers(0, 9, size=64).astype(np.float32)
    full = sorted(range(64), key=lambda i: (-values[i], i))
    assert ranked_ids(values, count).tolist() == full[:count]


def test_no_filter_keeps_all():
    assert survivors(scaled(0.5, 0.3, 0.2)) == [0, 1, 2]


def test_top_k_cuts_a_tie_at_the_lowest_ids():
    assert survivors(scaled(0.2, 0.4, 0.2, 0.2), top_k=2) == [0, 1]


def test_top_p_keeps_the_token_that_crosses():
    row = scaled(0.5, 0.25, 0.125, 0.125)
    assert survivors(row, top_p=0.5) == [0]
    assert survivors(row, top_p=0.51) == [0, 1]
    assert survivors(row, top_p=1e-9) == [0]


def test_top_p_works_on_what_top_k_left():
    row = scaled(0.4, 0.3, 0.2, 0.1)
    assert survivors(row, top_p=0.55) == [0, 1]
    assert survivors(row, top_p=0.55, top_k=2) == [0]


def test_min_p_is_relative_to_the_best():
    row = scaled(0.5, 0.26, 0.24)
    assert survivors(row, min_p=0.5) == [0, 1]
    assert survivors(row, min_p=1.0) == [0]


def test_floor_prunes():
    assert survivors(scaled(0.5, 0.25, 0.01), floor=float(np.log(0.1))) == [0, 1]


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99, 0.9999])
def test_nucleus_of_a_flat_row_equals_the_full_sort(top_p):
    """Flat enough that the first ranked prefix is too short."""
    row = np.random.default_rng(4).normal(size=20000).astype(np.float32)
    row = scaled_row(row, best=row.max(), temperature=np.float32(1))
    order = np.argsort(-row, kind="stable")
    mass = np.cumsum(np.exp(row[order]), dtype=np.float64)
    expected = order[np.concatenate(([0.0], mass[:-1])) < top_p * np.exp(row).sum(dtype=np.float64)]
    assert survivors(row, top_p=top_p) == sorted(expected.tolist())


def test_scaling_leaves_the_logits_alone():
    row = np.array([3, 1], np.float32)
    assert scaled_row(row, best=row.max(), temperature=np.float32(2)).tolist() == [0, -1]
    assert row.tolist() == [3, 1]
