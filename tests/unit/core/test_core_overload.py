"""The core at up to three times its capacity, in virtual time: what is begun is done in time."""

import pytest

from tests.support.overload_sim import Load, Outcome, Simulation

CAPACITY = 6.4
"""Requests a second, of the default lengths on the default device."""


def run(times: float, **changes: object) -> tuple[Load, Outcome]:
    load = Load(rate=times * CAPACITY, **changes)
    return load, Simulation(load).run()


@pytest.mark.parametrize("shape", [{}, {"max_tokens": 400}], ids=["known length", "ends by itself"])
def test_goodput_holds_at_three_times_the_capacity(shape: dict[str, int]) -> None:
    goodputs = []
    for times in (0.5, 1.0, 3.0):
        load, outcome = run(times, **shape)
        goodputs.append(outcome.goodput(load.seconds / 3, load.seconds))
        assert len(outcome.late) <= 0.02 * len(outcome.finished)
        assert outcome.empty_at - load.seconds <= load.deadline_s
        assert all(hint is not None and 1000 <= hint <= 30_000 for hint in outcome.hints_ms)
    assert goodputs[-1] >= 0.9 * max(goodputs)


def test_almost_all_refusals_come_at_the_door() -> None:
    _, outcome = run(3.0)
    at_once = [waited for _, waited in outcome.refused if waited == 0]
    assert len(at_once) >= 0.98 * len(outcome.refused) > 100


def test_long_and_short_ones_get_in_alike() -> None:
    _, outcome = run(3.0)
    lengths = [tokens for _, tokens in outcome.finished]
    assert sum(lengths) / len(lengths) == pytest.approx(32, rel=0.15)


def test_without_tight_deadlines_nobody_is_refused() -> None:
    _, outcome = run(2.0, deadline_s=600.0, seconds=20.0)
    assert (outcome.late, outcome.refused) == ([], [])


def test_a_device_that_slows_down_is_believed() -> None:
    """Steps take three times as long as the device says: others use the processor."""
    outcome = Simulation(Load(rate=CAPACITY, seconds=60.0), stretch=3.0).run()
    learnt = [at for at in outcome.late if at > 20.0]
    assert len(learnt) <= 0.05 * len(outcome.finished)
    assert len(outcome.finished) > 80
