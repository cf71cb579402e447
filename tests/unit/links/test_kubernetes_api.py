"""What the scheduler asks of the API server, against a fake one over HTTP."""

import asyncio
from dataclasses import replace

import pytest

from protos.wire.errors import InvalidRequest, UnavailableError
from scheduler_svc.links.kubernetes_api import ClusterSettings, KubernetesApi
from scheduler_svc.links.kubernetes_epoch import RaisedEpoch
from tests.support.fake_api_server import FakeApiServer, endpoint_slice

EPOCH = "forwardplane.dev/epoch"


@pytest.fixture
async def server():
    async with FakeApiServer() as made:
        yield made


@pytest.fixture
async def api(server):
    made = KubernetesApi(ClusterSettings(url=server.url, namespace="forwardplane", timeout_s=2.0))
    yield made
    await made.close()


async def test_endpoints_are_found_ready_or_not(api, server):
    server.slices = [
        endpoint_slice("workers", "10.0.0.1", ("10.0.0.2", False), ("10.0.0.3", None)),
        endpoint_slice("workers", "fd00::1", port=50101, address_type="IPv6"),
        endpoint_slice("others", "10.0.0.9"),
    ]

    assert await api.worker_addresses("workers") == {
        *("10.0.0.1:50100", "10.0.0.2:50100", "10.0.0.3:50100"),
        "[fd00::1]:50101",
    }


async def test_a_service_without_endpoints_or_without_the_port_has_no_workers(api, server):
    assert await api.worker_addresses("workers") == set()
    server.slices = [endpoint_slice("workers"), endpoint_slice("workers", "10.0.0.1", port_name="http")]
    assert await api.worker_addresses("workers") == set()


@pytest.mark.parametrize("status", [401, 403])
async def test_missing_rights_are_an_operators_business(api, server, status):
    server.status = status
    with pytest.raises(InvalidRequest, match="EndpointSlices") as raised:
        await api.worker_addresses("workers")
    assert raised.value.field == "worker_service"


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_an_api_server_in_trouble_passes(api, server, status):
    server.status = status
    with pytest.raises(UnavailableError, match=str(status)):
        await api.worker_addresses("workers")


async def test_an_unreachable_api_server_passes(free_port):
    api = KubernetesApi(ClusterSettings(url=f"http://127.0.0.1:{free_port()}", namespace="x", timeout_s=1.0))
    try:
        with pytest.raises(UnavailableError, match="cannot be reached"):
            await api.worker_addresses("workers")
        with pytest.raises(UnavailableError, match="cannot be reached"):
            await api.raise_epoch("epoch")
    finally:
        await api.close()


def test_outside_of_a_pod_settings_must_say_where(clean_environment, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    async def make(**given):
        KubernetesApi(ClusterSettings(timeout_s=1.0, **given))

    with pytest.raises(InvalidRequest) as raised:
        asyncio.run(make(url="http://127.0.0.1:1", namespace=None))
    assert raised.value.field == "cluster_namespace"
    with pytest.raises(InvalidRequest) as raised:
        asyncio.run(make(url=None, namespace="x"))
    assert raised.value.field == "cluster_url"


async def test_each_start_raises_the_epoch_and_keeps_the_rest(api, server):
    server.add_config_map("epoch", {"other": "kept"})

    epochs = []
    for _ in range(3):
        source = RaisedEpoch(lambda: api.raise_epoch("epoch"))
        await source.raise_once()
        epochs.append(source.current())

    assert epochs == [1, 2, 3]
    assert server.annotation("epoch") == "3"
    assert server.annotation("epoch", "other") == "kept"


async def test_two_that_race_get_different_epochs(api, server):
    server.add_config_map("epoch")
    server.before_replace = lambda: server.add_config_map("epoch", {EPOCH: "1"})

    assert await api.raise_epoch("epoch") is None
    source = RaisedEpoch(lambda: api.raise_epoch("epoch"))
    await source.raise_once()

    assert source.current() == 2
    assert not source.overtake(2)
    assert not source.overtake(7)


async def test_many_that_race_all_get_one_of_their_own(api, server):
    server.add_config_map("epoch", {EPOCH: "41"})
    sources = [RaisedEpoch(lambda: api.raise_epoch("epoch")) for _ in range(5)]

    await asyncio.gather(*(source.raise_once() for source in sources))

    assert sorted(source.current() for source in sources) == [42, 43, 44, 45, 46]


async def test_a_missing_object_is_an_operators_business(api):
    with pytest.raises(InvalidRequest, match="no such object: ConfigMap epoch") as raised:
        await RaisedEpoch(lambda: api.raise_epoch("epoch")).raise_once()
    assert raised.value.field == "epoch_object"


async def test_a_lease_is_taken_by_one_and_keeps_what_others_wrote_to_it(api, server):
    server.add_lease("lease")
    server.leases["lease"]["metadata"]["annotations"] = {"other": "kept"}
    first, second = api.lease("lease"), api.lease("lease")
    free, also_free = await first.read(), await second.read()
    assert (free.holder, free.wanted_by) == ("", "")

    assert await first.write(replace(free, holder="a", duration_s=10), renews=True)
    assert not await second.write(replace(also_free, holder="b", duration_s=10), renews=True)
    held = await second.read()
    assert (held.holder, held.duration_s) == ("a", 10)
    assert held.renewals
    assert await second.write(replace(held, wanted_by="b"), renews=False)
    wanted = await first.read()
    assert (wanted.wanted_by, wanted.renewals) == ("b", held.renewals)
    assert await first.write(replace(wanted, wanted_by="", holder=""), renews=False)
    assert server.holder("lease") == ""
    assert server.leases["lease"]["metadata"]["annotations"] == {"other": "kept"}
    assert server.leases["lease"]["spec"]["leaseTransitions"] == 1


async def test_a_renewed_lease_looks_different(api, server):
    server.add_lease("lease", holderIdentity="a", leaseDurationSeconds=3, renewTime="2026-01-01T00:00:00.000001Z")
    lease = api.lease("lease")
    before = await lease.read()
    assert await lease.write(before, renews=True)

    after = await lease.read()
    assert after.renewals != before.renewals
    assert (after.holder, after.duration_s) == (before.holder, before.duration_s)


async def test_a_missing_lease_or_missing_rights_are_an_operators_business(api, server):
    lease = api.lease("lease")
    with pytest.raises(InvalidRequest, match="no such object: Lease lease") as raised:
        await lease.read()
    assert raised.value.field == "lease_object"
    server.add_lease("lease")
    found = await lease.read()
    server.status = 403
    with pytest.raises(InvalidRequest, match="does not allow"):
        await lease.write(found, renews=True)
    server.status = 503
    with pytest.raises(UnavailableError, match="503"):
        await lease.read()


@pytest.mark.parametrize("text", ["", "one", "-1", "1.5", "\u0661"])
async def test_an_annotation_that_is_no_number_is_refused_and_kept(api, server, text):
    server.add_config_map("epoch", {EPOCH: text})
    with pytest.raises(InvalidRequest, match="no decimal number"):
        await api.raise_epoch("epoch")
    assert server.annotation("epoch") == text


async def test_without_the_api_server_the_epoch_is_waited_for(api, server):
    server.add_config_map("epoch")
    server.status = 503
    source = RaisedEpoch(lambda: api.raise_epoch("epoch"))
    raising = asyncio.create_task(source.raise_once())
    while len(server.requests) < 2:
        await asyncio.sleep(0.01)

    server.status = None
    await raising

    assert source.current() == 1
