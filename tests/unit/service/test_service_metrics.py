import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from protos.service import metrics
from protos.service.metrics import MetricsServer, naming_problems

PREFIX = "forwardplane_scheduler_"


def registered(make):
    registry = CollectorRegistry()
    make(registry)
    return naming_problems(registry, PREFIX)


GOOD = {
    "counter": lambda r: Counter(PREFIX + "output_tokens_total", "Tokens.", registry=r),
    "counter with unit": lambda r: Counter(PREFIX + "forward_seconds_total", "Time.", ["mode"], registry=r),
    "gauge": lambda r: Gauge(PREFIX + "kv_pages", "Pages.", registry=r),
    "histogram": lambda r: Histogram(PREFIX + "plan_bytes", "Size.", registry=r),
    "info": lambda r: Info(PREFIX + "model", "Model.", registry=r),
}
BAD = {
    "prefix": (lambda r: Gauge("vllm_pages", "Pages.", registry=r), "does not start with"),
    "colon": (lambda r: Gauge(PREFIX + "a:b", "x", registry=r), "snake_case"),
    "capital": (lambda r: Gauge(PREFIX + "aB", "x", registry=r), "snake_case"),
    "help": (lambda r: Gauge(PREFIX + "pages", " ", registry=r), "no help"),
    "unit": (lambda r: Gauge(PREFIX + "step_ms", "x", registry=r), "no base unit"),
    "place": (lambda r: Gauge(PREFIX + "seconds_of_step", "x", registry=r), "middle"),
    "histogram": (lambda r: Histogram(PREFIX + "latency", "x", registry=r), "without a unit"),
    "gauge total": (lambda r: Gauge(PREFIX + "pages_total", "x", registry=r), "suffix"),
    "label": (lambda r: Gauge(PREFIX + "pages", "x", ["request_id"], registry=r).labels("1"), "label"),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_names_pass(name):
    assert registered(GOOD[name]) == []


@pytest.mark.parametrize("name", BAD)
def test_bad_names_are_found(name):
    make, expected = BAD[name]

    (problem,) = registered(make)

    assert expected in problem


def test_the_standard_metrics_pass():
    assert naming_problems(MetricsServer().registry, PREFIX) == []


@pytest.mark.parametrize("name", [name for name in vars(metrics) if name.endswith("_BUCKETS")])
def test_buckets_rise(name):
    buckets = getattr(metrics, name)

    assert list(buckets) == sorted(set(buckets))
    assert all(bound > 0 for bound in buckets)
