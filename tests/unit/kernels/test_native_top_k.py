"""The best of a row of logits without a sort, against a full sort."""

import numpy as np
import pytest

from kernels.errors import KernelError
from kernels.native_ops import top_k_logits
from kernels.reference.top_k import top_k_logits as reference


def rows():
    rng = np.random.default_rng(1)
    yield rng.normal(size=5000).astype(np.float32)
    yield rng.integers(0, 4, 5000).astype(np.float32)
    yield np.sort(rng.normal(size=5000)).astype(np.float32)
    broken = rng.normal(size=300).astype(np.float32)
    broken[::2] = np.nan
    broken[1:9:2] = [np.inf, -np.inf, -np.inf, np.inf]
    yield broken


@pytest.mark.parametrize("row", list(rows()), ids=["random", "ties", "ascending", "nan"])
@pytest.mark.parametrize("k", [1, 2, 40, 250, 300])
def test_it_agrees_with_a_full_sort(native, row, k):
    ids, values = top_k_logits(native, row, k)

    expected_ids, expected_values = reference(row, k)
    assert np.array_equal(ids, expected_ids)
    assert np.array_equal(values, expected_values, equal_nan=True)


@pytest.mark.parametrize("k", [0, -1, 4])
def test_a_count_out_of_range_is_refused(native, k):
    with pytest.raises(KernelError, match=f"k is {k}, must be 1 to the row's length 3"):
        top_k_logits(native, np.zeros(3, np.float32), k)
