"""A standby that waits for the Lease, rehearsed with processes as pods would run: it serves when the leader is gone."""

import asyncio

import pytest

from tests.support.manifest_policy import LEASE, SCHEDULER
from tests.support.pod_traffic import Traffic
from tests.support.pods import LEASE_S, cluster

pytestmark = pytest.mark.timeout(180)


async def test_a_standby_takes_over_from_a_killed_leader_and_gives_way_when_it_is_back():
    async with cluster(workers=2, lease=True) as pods:
        (leader,) = (pod for pod in pods.pods if pod.name == SCHEDULER)
        await pods.is_ready(standby := await pods.standby())
        first_holder = pods.api.holder(LEASE)
        traffic = Traffic(pods.cell, only_serving=True)
        async with traffic.going_on():
            pods.api.status = 503  # longer than the Lease holds
            await asyncio.sleep(2 * LEASE_S)
            assert leader.process.returncode is None
            assert traffic.refused == 0, "callers do not notice that the API server is gone"
            pods.api.status = None
            await asyncio.sleep(LEASE_S)
            assert pods.api.holder(LEASE) == first_holder

            await pods.kill(leader)
            await traffic.more()
            assert pods.api.holder(LEASE) not in ("", first_holder)
            assert pods.api.annotation("forwardplane-epoch") == "2"

            back = await pods.scheduler()
            assert await standby.ended(30) not in (0, None), "it gives way, and is started again"
            await pods.is_ready(back)
            await pods.is_ready(await pods.standby())
            await traffic.more()
        assert pods.api.annotation("forwardplane-epoch") == "3"
