import pytest

from protos.wire.errors import InvalidRequest
from worker_svc.kv.sizing import PoolRequest, pool_pages

PAGE = 1000


def pages(**choices) -> int:
    return pool_pages(PoolRequest(**{"free_bytes": 100 * PAGE, "useful_pages": 50, **choices}), bytes_per_page=PAGE)


def test_a_size_in_bytes_gives_whole_pages():
    assert pages(kv_bytes=5999) == 5
    assert pages(kv_bytes=2000) == 2
    assert pages(kv_bytes=100 * PAGE) == 100


def test_a_number_of_pages_is_taken_as_it_is():
    assert pages(num_pages=2) == 2
    assert pages(num_pages=100) == 100


def test_without_a_size_a_quarter_of_the_free_memory_as_far_as_it_is_useful():
    assert pages() == 25
    assert pages(useful_pages=7) == 7
    assert pages(useful_pages=0) == 2


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"kv_bytes": 1999}, "kv_bytes is 1999, the smallest that works is 2000"),
        ({"kv_bytes": 0}, "the smallest that works is 2000"),
        ({"num_pages": 1}, "num_pages is 1, the smallest that works is 2"),
        ({"kv_bytes": 101_000}, "kv_bytes is 101000, the free memory allows at most 100000"),
        ({"num_pages": 101}, "num_pages is 101, the free memory allows at most 100"),
        ({"num_pages": 5, "kv_bytes": 5000}, "exclude each other"),
        ({"free_bytes": 7999}, "free memory is 7999 bytes; the KV pool takes a quarter and needs 8000"),
    ],
)
def test_a_refusal_says_what_would_work(choices, message):
    with pytest.raises(InvalidRequest, match=message):
        pages(**choices)
