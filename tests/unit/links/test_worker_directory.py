import asyncio
import contextlib

import pytest
from prometheus_client import CollectorRegistry

from protos.wire.errors import InvalidRequest, UnavailableError
from scheduler_svc.links.worker_directory import DirectoryParts, WorkerDirectory
from scheduler_svc.metrics import LinkMetrics, create_metrics


class Link:
    def __init__(self, worker):
        self.worker = worker
        self.info = None


class Work:
    def __init__(self, log, link):
        self.log, self.link = log, link

    async def start(self):
        self.log.append(f"start {self.link.worker}")

    async def stop(self):
        self.log.append(f"stop {self.link.worker}")


class Setup:
    def __init__(self):
        self.log = []
        self.directory = WorkerDirectory(
            DirectoryParts(
                make=Link,
                run=lambda link: Work(self.log, link),
                forget=lambda worker: self.log.append(f"forget {worker}"),
            )
        )

    def took(self):
        taken, self.log[:] = list(self.log), []
        return taken


@pytest.fixture
def setup():
    return Setup()


async def test_a_new_worker_gets_a_link_once(setup):
    await setup.directory.set({"b:1", "a:1"})
    await setup.directory.set({"b:1", "a:1"})

    assert setup.took() == ["start a:1", "start b:1"]
    assert list(setup.directory.links) == ["a:1", "b:1"]


async def test_a_worker_that_left_loses_its_link(setup):
    await setup.directory.set({"a:1", "b:1"})
    setup.took()
    await setup.directory.set({"b:1"})

    assert setup.took() == ["stop a:1", "forget a:1"]
    assert list(setup.directory.links) == ["b:1"]


async def test_a_worker_that_left_is_kept_while_it_is_attached(setup):
    await setup.directory.set({"a:1"})
    link = setup.directory.links["a:1"]
    link.info = "attached"
    await setup.directory.set(set())
    assert setup.directory.links == {"a:1": link}

    link.info = None
    await setup.directory.set(set())
    assert setup.directory.links == {}


async def test_while_the_lookup_fails_workers_stay(setup):
    answers = [{"a:1"}, UnavailableError("gone"), InvalidRequest("rights were taken"), {"b:1"}]

    async def lookup():
        if not answers:
            await asyncio.Event().wait()
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            assert list(setup.directory.links) == ["a:1"]
            raise answer
        return answer

    await setup.directory.begin(lookup)
    following = asyncio.create_task(setup.directory.follow(lookup, interval_s=0))
    while list(setup.directory.links) != ["b:1"]:
        await asyncio.sleep(0)
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following

    assert setup.took() == ["start a:1", "start b:1", "stop a:1", "forget a:1"]


async def test_at_the_start_only_what_an_operator_must_change_is_an_error(setup):
    async def unreachable():
        raise UnavailableError("gone")

    async def forbidden():
        raise InvalidRequest("no rights")

    await setup.directory.begin(unreachable)
    with pytest.raises(InvalidRequest):
        await setup.directory.begin(forbidden)


async def test_closing_ends_every_link(setup):
    await setup.directory.set({"a:1", "b:1"})
    setup.directory.links["a:1"].info = "attached"
    await setup.directory.close()

    assert setup.directory.links == {}


def test_a_forgotten_worker_leaves_no_series():
    registry = CollectorRegistry()
    metrics = create_metrics(registry)
    for worker in ("gone:1", "stays:1"):
        link = LinkMetrics(metrics.plans, metrics.workers, worker)
        link.set_state(None)
        link.set_in_flight(1)
        link.plan_answered(rtt_s=1.0, worker_s=0.5)
        link.lost("X")
        link.attach_refused("X")
        for metric in (metrics.step.budget_tokens, metrics.step.prediction_error_ratio):
            metric.labels(worker).set(1)
        metrics.step.prediction_ratio.labels(worker).observe(1)

    metrics.forget_worker("gone:1")

    named = [sample.labels.get("worker") for family in registry.collect() for sample in family.samples]
    assert "gone:1" not in named
    assert "stays:1" in named
