"""Plans choose from the buckets that the worker last said are live."""

from dataclasses import replace

from protos.wire.enums import Feature, GraphPhase, GraphRefusal
from protos.wire.plan import GraphChoice
from protos.wire.worker_info import Buckets
from scheduler_svc.core.events import BucketsChanged
from tests.support.core_harness import CoreHarness, make_spec, small_info
from tests.support.plans import CORE_FEATURES

PENDING = Buckets(phase=GraphPhase.DECODE, sizes=(1, 2, 4), live=())


def graphs(harness):
    return [plan.forwards[0].graph for _, plan in harness.plans]


def harness_of(*buckets):
    harness = CoreHarness()
    harness.attach(info=small_info(buckets=buckets, features=CORE_FEATURES | {Feature.GRAPHS}))
    return harness


def test_a_bucket_is_named_from_the_plan_after_the_report_on():
    harness = harness_of(PENDING)
    harness.submit(make_spec(1, prompt=3, max_tokens=6))
    harness.deliver()
    harness.deliver()
    assert graphs(harness)[1:] == [GraphRefusal.NOT_CAPTURED_YET] * 2
    harness.step(BucketsChanged("w0", (replace(PENDING, live=(1,), dead=(2,)),)))
    harness.run()
    assert graphs(harness)[-1] == GraphChoice(phase=GraphPhase.DECODE, bucket=1)
    assert int(Feature.GRAPHS) in harness.plans[-1][1].identity.required_features
    assert graphs(harness)[0] is GraphRefusal.DISABLED, "no prefill graphs"


def test_a_dead_bucket_is_planned_as_failed():
    harness = harness_of(replace(PENDING, live=(1,), dead=(2,)))
    harness.submit(make_spec(1, prompt=3), make_spec(2, prompt=3))
    harness.run()
    assert GraphRefusal.CAPTURE_FAILED in graphs(harness)


def test_the_report_of_a_worker_that_was_lost_changes_nothing():
    harness = harness_of(PENDING)
    harness.lose()
    harness.step(BucketsChanged("w0", (PENDING,)))
    assert not harness.state.workers
