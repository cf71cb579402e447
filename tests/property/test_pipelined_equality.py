"""Window 2 = window 1 = one process, whatever is cancelled, retracted or stopped: no token lost, doubled or moved."""

import time

import pytest

from tests.support.pipelined_runs import RunReport, compare_runs

FEW, MANY = 1000, 20_000
SOME_OF_EACH = ("told: ABORT", "told: STOP", "told: retracted", "late rows", "cache hits")
AT_WINDOW_2 = ("plans as changes", "plans sent again", "plans wanted in full")


def check(report, *, requests):
    assert not report.wrong, report.wrong[:5]
    assert report.requests == requests
    assert report.counts["failed rows (window 2)"] == 0
    for name in (*SOME_OF_EACH, *AT_WINDOW_2):
        assert report.counts[f"{name} (window 2)"] > requests / 200, name
    assert report.counts["retracted for pages (window 2)"] > 0
    for name in ("told: ABORT", "told: retracted", "cache hits"):
        assert report.counts[f"{name} (window 1)"] > requests // 4000, name


@pytest.mark.timeout(120)
def test_pipelined_runs_equal_unpipelined_ones():
    report = RunReport()
    compare_runs(report, seed=1, requests=FEW, unpipelined=60)
    check(report, requests=FEW)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_pipelined_runs_equal_unpipelined_ones_with_very_many_requests():
    report, begun = RunReport(), time.monotonic()
    compare_runs(report, seed=2, requests=MANY, unpipelined=500)
    print(f"\n{report.text(time.monotonic() - begun)}")
    check(report, requests=MANY)
