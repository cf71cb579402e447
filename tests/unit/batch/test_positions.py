import json
from pathlib import Path

import numpy as np
import pytest

from worker_svc.batch.positions import decode_positions, extend_positions, page_places, start_offsets, token_rows

VECTORS = json.loads((Path(__file__).parents[2] / "golden" / "execution_vectors.json").read_text())


def i32(values):
    return np.array(values, np.int32)


@pytest.mark.parametrize("case", VECTORS["extend"])
def test_extend_vectors(case):
    prefix_lens, extend_lens = i32(case["prefix_lens"]), i32(case["extend_lens"])
    assert extend_positions(prefix_lens, extend_lens).tolist() == case["positions"]
    assert start_offsets(extend_lens).tolist() == case["extend_start_loc"]


@pytest.mark.parametrize("case", VECTORS["decode"])
def test_decode_vectors(case):
    assert decode_positions(i32(case["seq_lens"])).tolist() == case["positions"]


def test_prefixes_0_and_5_of_3_and_2_tokens_are_positions_0_1_2_5_6_and_length_0_is_position_0():
    assert extend_positions(i32([0, 5]), i32([3, 2])).tolist() == [0, 1, 2, 5, 6]
    assert start_offsets(i32([3, 2])).tolist() == [0, 3]
    assert decode_positions(i32([0])).tolist() == [0]


@pytest.mark.parametrize("cuts", [[17], [1] * 17, [5, 12], [16, 1], [3, 3, 3, 8]])
def test_any_chunking_gives_the_same_positions(cuts):
    begins = np.cumsum([0, *cuts[:-1]])
    chunks = [extend_positions(i32([begin]), i32([length])) for begin, length in zip(begins, cuts, strict=True)]
    assert np.concatenate(chunks).tolist() == list(range(17))


def test_no_rows():
    empty = i32([])
    assert extend_positions(empty, empty).tolist() == []
    assert decode_positions(empty).tolist() == []
    assert start_offsets(empty).tolist() == []


def test_page_places():
    rows = token_rows(i32([2, 1]))
    assert rows.tolist() == [0, 0, 1]
    pages, offsets = page_places(
        np.array([3, 4, 9]),
        rows,
        kv_indptr=i32([0, 2, 3]),
        kv_indices=i32([8, 6, 5]),
        start_positions=i32([0, 8]),
        page_size=4,
    )
    assert pages.tolist() == [8, 6, 5]
    assert offsets.tolist() == [3, 0, 1]
