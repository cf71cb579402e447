from collections import Counter

import pytest

from protos.wire.enums import ForwardMode, GraphPhase, GraphRefusal
from protos.wire.errors import InvalidModelFile
from protos.wire.plan import GraphChoice
from protos.wire.result import ForwardOutcome, PlanTimings
from scheduler_svc.links.fingerprints import ExpectedModel, check_model
from scheduler_svc.links.statistics import InFlight, LinkCounts, PhaseCounts, worker_seconds
from tests.support.plans import make_info
from tests.support.results import make_result


def outcome(graph, padded, *, mode=ForwardMode.DECODE):
    return ForwardOutcome(mode=mode, graph=graph, real_tokens=3, padded_tokens=padded, forward_ns=1)


def test_counts_add_up_over_plans_and_results():
    counts = LinkCounts()
    counts.sent(rows=3, size=100)
    counts.sent(rows=2, size=50)
    replay = outcome(GraphChoice(phase=GraphPhase.DECODE, bucket=4), padded=1)
    counts.answered(make_result(forwards=(replay, outcome(GraphRefusal.DISABLED, padded=0))))
    idle = outcome(GraphRefusal.MODE, padded=0, mode=ForwardMode.IDLE)
    mixed = outcome(GraphRefusal.OVER_MAX_TOKENS, padded=0, mode=ForwardMode.MIXED)
    counts.answered(make_result(forwards=(idle, mixed)))
    assert counts == LinkCounts(
        plans=2,
        plan_rows=5,
        plan_bytes=150,
        graphs={
            GraphPhase.DECODE: PhaseCounts(
                replays=1, real_tokens=3, padded_tokens=1, misses=Counter({GraphRefusal.DISABLED: 1})
            ),
            GraphPhase.PREFILL: PhaseCounts(misses=Counter({GraphRefusal.OVER_MAX_TOKENS: 1})),
        },
    )


def test_plans_in_flight_leave_with_their_round_trip():
    in_flight = InFlight()
    in_flight.add(1, 10.0)
    in_flight.add(2, 11.0)
    assert (len(in_flight), in_flight.oldest()) == (2, 1)
    assert in_flight.pop(1, 12.5) == 2.5
    assert (len(in_flight), in_flight.oldest()) == (1, 2)
    in_flight.pop(2, 12.5)
    assert in_flight.oldest() is None


def test_a_workers_time_is_the_sum_of_its_parts():
    names = [name for name in PlanTimings.__dataclass_fields__ if name != "bubble_ns"]
    timings = PlanTimings(bubble_ns=10**9, **{name: 10**index for index, name in enumerate(names)})
    assert worker_seconds(timings) == pytest.approx(int("1" * len(names)) / 1e9)


def test_a_worker_with_the_same_tokenizer_passes():
    info = make_info()
    check_model(info, ExpectedModel(name="m", tokenizer_fingerprint=info.fingerprints.tokenizer))


@pytest.mark.parametrize("fingerprint", ["", "0" * 64])
def test_a_worker_with_another_tokenizer_is_refused(fingerprint):
    with pytest.raises(InvalidModelFile, match="tokenizer") as caught:
        check_model(make_info(), ExpectedModel(name="m", tokenizer_fingerprint=fingerprint))
    assert caught.value.field == "fingerprints.tokenizer"
