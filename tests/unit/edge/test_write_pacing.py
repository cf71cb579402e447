import pytest

from scheduler_svc.edge.write_pacing import WritePacing


@pytest.mark.parametrize(("num_streams", "pause_s"), [(0, 0), (1, 0.001), (20, 0.02), (1000, 0.05)])
def test_the_pause_grows_with_the_streams_up_to_its_limit(num_streams: int, pause_s: float) -> None:
    assert WritePacing(lambda: num_streams, writes_per_s=1000).pause_s() == pytest.approx(pause_s)
