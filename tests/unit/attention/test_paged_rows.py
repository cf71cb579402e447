import numpy as np

from worker_svc.attention.paged_rows import group_by_length


def test_rows_of_similar_length_are_gathered_together():
    lens = np.array([1, 5000, 17, 300, 16, 290], np.int32)
    groups = group_by_length(np.arange(6), lens, unit=16)
    assert [(rows.tolist(), width) for rows, width in groups] == [([0, 4], 16), ([2], 32), ([3, 5], 304), ([1], 5008)]


def test_a_gather_of_long_rows_is_cut():
    groups = group_by_length(np.arange(5), np.full(5, 16_000, np.int32), unit=16)
    assert [(rows.tolist(), width) for rows, width in groups] == [([0, 1], 16_000), ([2, 3], 16_000), ([4], 16_000)]
