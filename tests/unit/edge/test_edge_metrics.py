from prometheus_client import CollectorRegistry

from protos.service.metrics import naming_problems
from scheduler_svc.edge.metrics import PREFIX, CallMetrics, create_edge_metrics

SERVICE = "forwardplane.v1.GenerationService"


def test_names_follow_the_rules() -> None:
    registry = CollectorRegistry()
    create_edge_metrics(registry)
    assert naming_problems(registry, PREFIX) == []


def test_calls_are_counted_by_method_and_code() -> None:
    registry = CollectorRegistry()
    calls = CallMetrics(create_edge_metrics(registry), SERVICE)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(PREFIX + name, labels)

    calls.call_started(f"/{SERVICE}/Generate")
    calls.call_started("/grpc.health.v1.Health/Watch")
    assert value("grpc_open_calls") == 1
    calls.call_finished(f"/{SERVICE}/Generate", "OK", seconds=0.25)
    calls.call_finished("/grpc.health.v1.Health/Watch", "CANCELLED", seconds=9)
    calls.call_started(f"/{SERVICE}/GetLoad")
    calls.call_finished(f"/{SERVICE}/GetLoad", "UNAVAILABLE", seconds=9)
    assert value("grpc_open_calls") == 0
    assert value("requests_total", method="Generate", code="OK") == 1
    assert value("requests_total", method="GetLoad", code="UNAVAILABLE") == 1
    assert value("request_duration_seconds_sum") == 0.25


def test_tokens_are_counted_by_class_and_kind() -> None:
    registry = CollectorRegistry()
    metrics = create_edge_metrics(registry)
    metrics.tenant_used("gold", prompt_tokens=5, output_tokens=7)
    metrics.tenant_used("gold", prompt_tokens=0, output_tokens=3)

    def value(**labels: str) -> float | None:
        return registry.get_sample_value(PREFIX + "tenant_tokens_total", labels)

    assert value(tenant_class="gold", kind="prompt") == 5
    assert value(tenant_class="gold", kind="output") == 10
