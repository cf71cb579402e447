import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from protos.service import histogram_buckets
from protos.service.histogram_buckets import SCHEDULER_HISTOGRAMS, WORKER_HISTOGRAMS, chosen_buckets
from protos.service.metrics import MetricsServer, naming_problems
from scheduler_svc.edge.metrics import create_edge_metrics
from scheduler_svc.metrics import create_metrics as create_core_metrics
from worker_svc.metrics import create_metrics as create_worker_metrics

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


@pytest.mark.parametrize("name", [name for name in vars(histogram_buckets) if name.endswith("_BUCKETS")])
def test_buckets_rise(name):
    buckets = getattr(histogram_buckets, name)

    assert list(buckets) == sorted(set(buckets))
    assert all(bound > 0 for bound in buckets)


@pytest.mark.parametrize(
    ("table", "creates"),
    [
        (SCHEDULER_HISTOGRAMS, (create_core_metrics, create_edge_metrics)),
        (WORKER_HISTOGRAMS, (create_worker_metrics,)),
    ],
    ids=["scheduler", "worker"],
)
def test_every_histogram_takes_the_buckets_that_settings_choose(table, creates):
    text = ";".join(f"{name}=1,{index + 2}" for index, name in enumerate(table))
    found = {}
    for create in creates:
        registry = CollectorRegistry()
        create(registry, chosen_buckets(text, table))
        histograms = {made for made in registry._collector_to_names if isinstance(made, Histogram)}
        found |= {made._name.split("_", 2)[2]: made._upper_bounds[:-1] for made in histograms if not made._labelnames}
        found |= {made._name.split("_", 2)[2]: made._kwargs["buckets"] for made in histograms if made._labelnames}
    assert {name: tuple(limits) for name, limits in found.items()} == {
        name: (1, index + 2) for index, name in enumerate(table)
    }


def test_histograms_that_are_not_named_keep_their_buckets():
    chosen = chosen_buckets(" forward_seconds = 0.5, 1 ;", WORKER_HISTOGRAMS)

    assert chosen == {**WORKER_HISTOGRAMS, "forward_seconds": (0.5, 1.0)}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("forward_second=1", "no histogram; there are forward_seconds"),
        ("forward_seconds", "no histogram"),
        ("forward_seconds=", "no numbers"),
        ("forward_seconds=1,x", "no numbers"),
        ("forward_seconds=2,1", "each above the one before"),
        ("forward_seconds=1,1", "each above the one before"),
        ("forward_seconds=1,inf", "each above the one before"),
        ("forward_seconds=nan", "each above the one before"),
        ("forward_seconds=" + ",".join(map(str, range(201))), "at most 200"),
    ],
)
def test_buckets_that_cannot_be_are_refused(text, problem):
    with pytest.raises(ValueError, match=problem):
        chosen_buckets(text, WORKER_HISTOGRAMS)
