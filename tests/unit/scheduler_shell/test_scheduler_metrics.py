from prometheus_client import CollectorRegistry

from protos.service.metrics import naming_problems
from protos.wire.enums import FinishReason, WorkerState
from scheduler_svc.core.counters import CoreCounters, CoreGauges, WorkerGauges
from scheduler_svc.core.events import StreamKey
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.metrics import PREFIX, LinkMetrics, create_metrics
from scheduler_svc.observation import Exporter, IntegrityWatch, QueueTimes, WaitingCount
from tests.support.core_harness import CoreHarness, make_spec, small_info

NAMES = {
    *(
        "requests_finished",
        "requests_running",
        "requests_waiting",
        "requests_waiting_by_reason",
        "kv_pages",
        "kv_pages_used",
        "kv_pages_cached",
        "kv_usage_ratio",
    ),
    *("queue_seconds", "prompt_tokens", "output_tokens", "retractions", "step_build_seconds", "plan_encode_seconds"),
    *("plan_bytes", "plan_rtt_seconds", "plan_overhead_seconds", "plans_in_flight", "plan_nacks", "late_results"),
    *("grammar_compile_seconds", "grammar_mask_seconds", "step_prediction_ratio"),
    *("scheduled_tokens", "batch_rows", "worker_up", "worker_state", "epoch", "loop_lag_seconds", "build", "model"),
}
LABEL_FREE = {"requests_running", "requests_waiting", "kv_usage_ratio", "kv_pages", "kv_pages_used"}


def gauges_of(worker: str, **changes: object) -> WorkerGauges:
    return WorkerGauges(worker=worker, plans_in_flight=0, budget_tokens=256, prediction_error=0.1, **changes)


def test_the_promised_metrics_exist_and_are_named_by_the_rules():
    registry = CollectorRegistry()
    create_metrics(registry).describe(model="m", architecture="llama", weights="abc")
    families = {family.name: family for family in registry.collect()}
    assert {PREFIX + name for name in NAMES} <= set(families)
    assert naming_problems(registry, PREFIX) == []
    for name in LABEL_FREE:
        assert [sample.labels for sample in families[PREFIX + name].samples] == [{}]


def test_two_processes_in_one_interpreter_do_not_meet():
    first, second = CollectorRegistry(), CollectorRegistry()
    create_metrics(first).requests.running.set(3)
    create_metrics(second)
    assert second.get_sample_value(PREFIX + "requests_running") == 0


def test_a_workers_state_is_one_of_all():
    registry = CollectorRegistry()
    metrics = create_metrics(registry)
    link = LinkMetrics(metrics.plans, metrics.workers, "w")

    def states():
        labels = [state.name.lower() for state in WorkerState]
        return {
            label
            for label in labels
            if registry.get_sample_value(PREFIX + "worker_state", {"worker": "w", "state": label})
        }

    link.set_state(WorkerState.CAPTURING)
    assert states() == {"capturing"}
    link.set_state(None)
    assert states() == set()
    assert registry.get_sample_value(PREFIX + "worker_up", {"worker": "w"}) == 0


def test_counters_rise_by_what_was_added_only():
    registry = CollectorRegistry()
    metrics = create_metrics(registry)
    exporter = Exporter(
        metrics,
        IntegrityWatch(metrics.step.invariant_checks, clock=lambda: 0.0),
        WaitingCount(metrics.requests.waiting_by_reason, clock=lambda: 0.0),
    )
    counters = CoreCounters(output_tokens=5, retractions=1, finished={FinishReason.STOP: 2}, refused={"QUEUE_FULL": 1})
    workers = (
        WorkerGauges(
            worker="a",
            requests=1,
            plans_in_flight=0,
            pages=(10, 4),
            pages_used=(3, 1),
            pages_cached=(2, 0),
            evicted_pages=5,
            budget_tokens=256,
            prediction_error=0.1,
        ),
        WorkerGauges(
            worker="b",
            requests=0,
            plans_in_flight=0,
            pages=(6,),
            pages_used=(0,),
            pages_cached=(6,),
            evicted_pages=1,
            budget_tokens=256,
            prediction_error=0.1,
        ),
    )
    gauges = CoreGauges(running=1, waiting=2, waiting_tokens=0, new_token_ratio=0.5, workers=workers)
    exporter.export(gauges, counters)
    counters.output_tokens = 8
    exporter.export(gauges, counters)

    def value(name, **labels):
        return registry.get_sample_value(PREFIX + name, labels)

    assert value("output_tokens_total") == 8
    assert value("retractions_total") == 1
    assert value("requests_finished_total", reason="stop") == 2
    assert value("requests_finished_total", reason="abort") == 0
    assert value("request_rejections_total", reason="QUEUE_FULL") == 1
    assert (value("kv_pages"), value("kv_pages_used"), value("kv_usage_ratio")) == (20, 4, 0.25)
    assert (value("requests_running"), value("requests_waiting")) == (1, 2)


def test_queue_times_are_measured_once_a_request():
    times = QueueTimes()
    times.submitted(StreamKey(0, 1), 11, now=1.0)
    times.submitted(StreamKey(0, 2), 12, now=2.0)
    assert times.planned([12, 99], now=5.0) == [3.0]
    assert times.planned([12], now=6.0) == []
    times.ended(StreamKey(0, 1))
    times.ended(StreamKey(0, 7))
    assert times.planned([11], now=7.0) == []
    assert len(times) == 0


def test_books_are_checked_after_a_change_and_not_too_often():
    registry = CollectorRegistry()
    now = [100.0]
    watch = IntegrityWatch(create_metrics(registry).step.invariant_checks, clock=lambda: now[0])
    state = SchedulerState.create(CoreSettings())

    def checks(outcome):
        watch.check_if_due(state, state.gauges())
        return registry.get_sample_value(PREFIX + "invariant_checks_total", {"outcome": outcome})

    assert (checks("ok"), watch.wake_at(state)) == (0, None)
    watch.changed()
    assert (checks("ok"), watch.wake_at(state)) == (1, None)
    watch.changed()
    assert (checks("ok"), watch.wake_at(state)) == (1, 110.0)
    now[0] = 110.0
    assert checks("ok") == 2
    state.waiting.tokens = 5
    watch.changed()
    now[0] = 120.0
    assert (checks("broken"), checks("ok")) == (1, 2)


def test_who_waits_is_counted_by_reason_and_a_long_queue_not_at_every_turn():
    registry = CollectorRegistry()
    now = [100.0]
    count = WaitingCount(create_metrics(registry).requests.waiting_by_reason, clock=lambda: now[0])
    harness = CoreHarness()
    harness.attach(info=small_info(max_rows=1))

    def rows():
        count.turned(harness.state)
        return registry.get_sample_value(PREFIX + "requests_waiting_by_reason", {"reason": "rows"})

    assert (rows(), count.wake_at()) == (0, None)
    harness.submit(*[make_spec(stream) for stream in range(65)])
    assert (rows(), count.wake_at()) == (64, None)
    harness.submit(make_spec(65), make_spec(66))
    assert (rows(), count.wake_at()) == (64, 101.0)
    now[0] = 101.0
    assert (rows(), count.wake_at()) == (66, None)
    harness.submit(make_spec(67))
    assert (rows(), count.wake_at()) == (66, 102.0)
    harness.run()
    assert (rows(), count.wake_at()) == (0, None)
