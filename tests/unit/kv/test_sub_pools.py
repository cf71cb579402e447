import pytest

from protos.wire.errors import UnsupportedFeature
from worker_svc.kv.sub_pools import LayerPlace, layer_places, sub_pool_windows


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


def test_layers_with_the_same_window_share_one_sub_pool_that_keeps_everything():
    assert sub_pool_windows((8, 8)) == (0,)
    assert layer_places((8, 8)) == (LayerPlace(0, 0), LayerPlace(0, 1))


@pytest.mark.parametrize("windows", [(4, 8), (0, 8, 16)])
def test_what_two_sub_pools_cannot_hold_is_refused(windows):
    with pytest.raises(UnsupportedFeature, match="full attention"):
        layer_places(windows)
