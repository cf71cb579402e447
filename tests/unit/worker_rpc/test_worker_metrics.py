"""Names follow the rules, and every finished plan is counted where it belongs."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from protos.service.metrics import naming_problems
from protos.wire.enums import ForwardMode, GraphPhase, GraphRefusal, RowFailure
from protos.wire.plan import GraphChoice
from protos.wire.result import ForwardOutcome, ForwardResult, PlanTimings
from tests.support.fake_worker import FakeWorker
from tests.support.plans import decode, extend, make_info, make_plan
from worker_svc.metrics import PREFIX, DeviceNanoseconds, MemoryKind, PlanOutcome, StartupStage, create_metrics
from worker_svc.rpc.plan_observer import PlanObserver


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def metrics(registry):
    return create_metrics(registry)


def value(registry, name, **labels):
    return registry.get_sample_value(PREFIX + name, labels)


def outcome(mode, graph, *, real=3, padded=0):
    return ForwardOutcome(mode=mode, graph=graph, real_tokens=real, padded_tokens=padded, forward_ns=2_000_000)


def test_every_name_follows_the_rules(registry, metrics):
    metrics.describe(device="cpu", dtype="float32", numerics="fast", kernels="torch")
    metrics.read_device_time(lambda: DeviceNanoseconds(busy=0, idle=0, bubble=0))
    metrics.process.memory_bytes.labels(MemoryKind.KV).set(1)
    metrics.read_memory(2, lambda: 3)
    metrics.process.startup_seconds.labels(StartupStage.LOAD).set(1)
    observer = PlanObserver(metrics)
    observer.plan_unreadable()
    plan = make_plan([extend(0, 3)])
    observer.plan_executed(plan, FakeWorker(make_info()).execute(plan))
    metrics.graph_replayed(GraphPhase.DECODE, 8, real=3, padded=5)
    assert naming_problems(registry, PREFIX) == []
    kinds = ("kv", "weights", "free")
    assert [value(registry, "memory_bytes", kind=kind) for kind in kinds] == [1, 2, 3]


def test_an_executed_plan_is_counted_by_rows_forwards_and_times(registry, metrics):
    plan = make_plan([decode(20), extend(0, 4)])
    result = FakeWorker(make_info()).execute(plan)
    result = replace(result, timings=PlanTimings(parse_ns=3_000, sample_ns=4_000_000, host_to_device_ns=5_000))
    PlanObserver(metrics).plan_executed(plan, result)
    assert value(registry, "plans_total", outcome=PlanOutcome.EXECUTED) == 1
    assert value(registry, "forwards_total", mode="mixed") == 1
    assert value(registry, "batch_rows_sum") == 2
    assert value(registry, "plan_parse_seconds_sum") == pytest.approx(3e-6)
    assert value(registry, "sample_seconds_sum") == pytest.approx(4e-3)
    assert value(registry, "h2d_seconds_sum") == pytest.approx(5e-6)


def test_an_idle_forward_is_neither_run_nor_missed(registry, metrics):
    plan = make_plan([decode(20)])
    result = ForwardResult(identity=plan.identity, forwards=(outcome(ForwardMode.IDLE, GraphRefusal.MODE),))
    PlanObserver(metrics).plan_executed(plan, result)
    assert value(registry, "graph_misses_total", phase="prefill", reason="mode") is None
    assert value(registry, "forwards_total", mode="idle") is None


@pytest.mark.parametrize(("mode", "phase"), [(ForwardMode.DECODE, "decode"), (ForwardMode.MIXED, "prefill")])
def test_an_eager_forward_is_a_miss_with_its_reason(registry, metrics, mode, phase):
    plan = make_plan([decode(20)])
    result = ForwardResult(identity=plan.identity, forwards=(outcome(mode, GraphRefusal.DISABLED),))
    PlanObserver(metrics).plan_executed(plan, result)
    assert value(registry, "graph_misses_total", phase=phase, reason="disabled") == 1
    assert value(registry, "forward_seconds_sum", mode=mode.name.lower()) == pytest.approx(2e-3)


def test_a_replayed_forward_counts_real_and_padding_units_of_its_bucket(registry, metrics):
    plan = make_plan([decode(20)])
    graph = GraphChoice(phase=GraphPhase.DECODE, bucket=8)
    result = ForwardResult(identity=plan.identity, forwards=(outcome(ForwardMode.DECODE, graph, real=3, padded=5),))
    PlanObserver(metrics).plan_executed(plan, result)
    labels = {"phase": "decode", "bucket": "8"}
    assert value(registry, "graph_replays_total", **labels) == 1
    assert value(registry, "graph_real_tokens_total", **labels) == 3
    assert value(registry, "graph_padded_tokens_total", **labels) == 5


def test_rows_that_are_not_finite_are_counted(registry, metrics):
    plan = make_plan([decode(20), decode(30)])
    worker = FakeWorker(make_info(), fail_row=lambda plan, row: RowFailure.NAN if row else None)
    PlanObserver(metrics).plan_executed(plan, worker.execute(plan))
    assert value(registry, "nan_rows_total") == 1


def test_refusals_and_faults_are_counted(registry, metrics):
    observer = PlanObserver(metrics)
    observer.plan_rejected()
    observer.plan_unreadable()
    observer.device_failed()
    outcomes = (PlanOutcome.REJECTED, PlanOutcome.UNREADABLE, PlanOutcome.FAILED)
    assert [value(registry, "plans_total", outcome=outcome) for outcome in outcomes] == [1, 1, 1]
    assert value(registry, "fatal_errors_total") == 1


def test_device_time_is_read_at_each_scrape(registry, metrics):
    last = [DeviceNanoseconds(busy=0, idle=0, bubble=0)]
    metrics.read_device_time(lambda: last[0])
    for busy, idle, bubble in ((1_000_000_000, 0, 0), (2_500_000_000, 500_000_000, 100_000_000)):
        last[0] = DeviceNanoseconds(busy=busy, idle=idle, bubble=bubble)
        assert value(registry, "busy_seconds_total") == pytest.approx(busy / 1e9)
        assert value(registry, "idle_seconds_total") == pytest.approx(idle / 1e9)
        assert value(registry, "bubble_seconds_total") == pytest.approx(bubble / 1e9)
