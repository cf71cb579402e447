"""A rollout rehearsed with processes as pods would do it: no request is lost, and each gets the model's tokens."""

import asyncio

import pytest

from tests.support.manifest_policy import SCHEDULER
from tests.support.pod_traffic import Traffic
from tests.support.pods import cluster

pytestmark = pytest.mark.timeout(180)


async def test_a_rolling_update_of_workers_and_scheduler_loses_no_request():
    async with cluster(workers=2) as pods:
        (scheduler,) = (pod for pod in pods.pods if pod.name == SCHEDULER)
        traffic = Traffic(pods.target)
        async with traffic.going_on():
            for worker in list(pods.ready):  # no surge: one goes before the next comes
                assert await pods.delete(worker) == 0
                await pods.worker()
            assert traffic.refused == 0, "callers do not notice that workers are replaced"
            assert await pods.delete(scheduler) == 0
            await pods.is_ready(await pods.scheduler())
        assert pods.api.annotation("forwardplane-epoch") == "2"


async def test_a_kill_and_a_drain_at_once_lose_no_request():
    async with cluster(workers=3) as pods:
        (scheduler,) = (pod for pod in pods.pods if pod.name == SCHEDULER)
        first, second, third = pods.ready
        traffic = Traffic(pods.target)
        async with traffic.going_on():
            code, _ = await asyncio.gather(pods.delete(first), pods.kill(second))
            assert code == 0
            assert traffic.refused == 0
            await pods.worker()
            code, _ = await asyncio.gather(pods.delete(scheduler), pods.kill(third))
            assert code == 0
            await pods.is_ready(await pods.scheduler())
