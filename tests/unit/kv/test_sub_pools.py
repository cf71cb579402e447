import pytest

from protos.wire.errors import UnsupportedFeature
from worker_svc.kv.sub_pools import (
    LayerPlace,
    bytes_per_page_of_all,
    layer_places,
    sub_pool_windows,
    window_pages,
)


def test_layers_are_numbered_within_their_sub_pool():
    assert layer_places((8, 8, 0, 8, 0)) == (
        LayerPlace(1, 0),
        LayerPlace(1, 1),
        LayerPlace(0, 0),
        LayerPlace(1, 2),
        LayerPlace(0, 1),
    )
    assert sub_pool_windows((8, 0, 8)) == (0, 8)


def test_a_model_without_windows_has_one_sub_pool():
    assert sub_pool_windows((0, 0)) == (0,)
    assert layer_places((0, 0)) == (LayerPlace(0, 0), LayerPlace(0, 1))


@pytest.mark.parametrize("windows", [(8, 8), (0, 8, 16)])
def test_what_two_sub_pools_cannot_hold_is_refused(windows):
    with pytest.raises(UnsupportedFeature, match="full attention"):
        layer_places(windows)


@pytest.mark.parametrize("full", [10, 11, 99, 5000])
def test_both_pools_need_no_more_than_the_planned_cost(full):
    full_bytes, window_bytes = 1000, 5005
    needed = full * full_bytes + window_pages(full) * window_bytes
    assert needed <= full * (bytes_per_page_of_all([full_bytes, window_bytes]) + 1)
    assert window_pages(full) >= 0.7 * full


def test_the_smallest_window_pool_has_its_sink_and_a_page():
    assert window_pages(2) == 2
