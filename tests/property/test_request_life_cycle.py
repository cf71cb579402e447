"""Everything that may happen to a request, at every place where it may stand: the books hold and no token is lost.

Prints and checks how often each pair was reached.
"""

from collections import Counter

import pytest

from protos.wire.enums import FinishReason
from scheduler_svc.core import batching, placement
from scheduler_svc.core.events import RequestFinished, RequestRefused
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import SchedulerState
from tests.support.core_harness import oracle
from tests.support.request_lives import ALL_PAIRS, Happening, LifeCycle, Place, place_of

TURNS = 200
LEAST_STEPS, MOST_LIVES = 20_000, 600
"""Lives go on until there were enough steps and every pair was reached, or were too many."""


@pytest.fixture
def seen(monkeypatch) -> Counter[tuple[Place, Happening]]:
    """Counts of pairs; retractions are noted where the core decides on them."""
    counts: Counter[tuple[Place, Happening]] = Counter()
    real = batching.requeue

    def noting(state: SchedulerState, request: Request) -> None:
        counts[place_of(state, request), Happening.RETRACT] += 1
        real(state, request)

    monkeypatch.setattr(batching, "requeue", noting)
    monkeypatch.setattr(placement, "requeue", noting)
    return counts


def check_streams(life: LifeCycle) -> None:
    """Each stream has one end, and the tokens of an undisturbed run up to it."""
    life.harness.assert_balanced()
    for stream, spec in life.harness.specs.items():
        end, got = life.harness.ends[stream], life.harness.outputs.get(stream, [])
        whole = oracle(life.info, spec)
        assert got == whole[: len(got)]
        if isinstance(end, RequestRefused):
            assert end.error.reason in ("INTERNAL_FAULT", "INVALID_REQUEST", "NEVER_FITS", "QUEUE_FULL")
            continue
        assert isinstance(end, RequestFinished)
        assert end.usage.output_tokens == len(got)
        if end.reason is FinishReason.LENGTH or end.stop_token_id is not None:
            assert got == whole


def missing(seen: Counter[tuple[Place, Happening]]) -> list[tuple[Place, Happening]]:
    return [pair for pair in ALL_PAIRS if not seen[pair]]


def test_s14_everything_happens_everywhere_and_no_token_is_lost(seen):
    steps = seed = 0
    while seed < MOST_LIVES and (steps < LEAST_STEPS or missing(seen)):
        lacks_retractions_only = all(what is Happening.RETRACT for _, what in missing(seen))
        life = LifeCycle(seed, seen, is_tight=seed % 4 == 0 or lacks_retractions_only)
        try:
            for _ in range(TURNS):
                life.turn()
            life.settle()
            check_streams(life)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        steps += life.harness.steps
        seed += 1
    print(f"\n{steps} steps, {seed} lives")
    for place in Place:
        counts = " ".join(f"{what}={seen[place, what]}" for what in Happening if (place, what) in ALL_PAIRS)
        print(f"{place:26} {counts}")
    assert steps >= LEAST_STEPS
    assert not missing(seen)
    assert not [pair for pair in seen if pair not in ALL_PAIRS], "a pair that was thought impossible"
