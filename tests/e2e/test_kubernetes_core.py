"""The core process as a pod would run it: settings from a ConfigMap, workers and epoch from a (fake) API server."""

import asyncio
import os
import subprocess
import sys
from contextlib import asynccontextmanager

from protos.service.config import EX_CONFIG
from protos.service.lifecycle import ExitCode
from scheduler_svc.bridge.parent_watch import STOP_ORDER
from tests.support.certificates import Authority
from tests.support.core_harness import small_info
from tests.support.core_process import LIMIT_S, ROOT, CoreProcess, write_model_folder
from tests.support.fake_api_server import FakeApiServer, endpoint_slice
from tests.support.fake_worker_server import FakeWorkerServer


@asynccontextmanager
async def core_in_cluster(tmp_path, api, worker, *more):
    model = tmp_path / "model"
    if not model.exists():
        write_model_folder(model, worker.info)
    folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    flags = (
        *("--cluster-url", api.url, "--cluster-namespace", "forwardplane", "--worker-service", "workers"),
        *("--epoch-source", "kubernetes", "--epoch-object", "epoch", "--discovery-interval-s", "0.05"),
        *("--reattach-min-s", "0.05", "--reattach-max-s", "0.1", "--insecure", "true"),
        *more,
    )
    async with CoreProcess(folder, model=model, workers="127.0.0.1:1", flags=flags) as core:
        yield core


async def until(holds):
    async with asyncio.timeout(LIMIT_S):
        while not await holds():
            await asyncio.sleep(0.02)


async def metric_of(core, name, **labels):
    try:
        return await core.metric(name, **labels)
    except OSError:
        return None


async def test_workers_come_and_go_with_their_endpoints_and_each_core_has_its_epoch(tmp_path):
    worker = FakeWorkerServer(small_info(num_pages=257))
    address = await worker.start()
    host, _, port = address.partition(":")
    try:
        async with FakeApiServer() as api:
            api.add_config_map("epoch", {"forwardplane.dev/epoch": "6"})
            async with core_in_cluster(tmp_path, api, worker) as core:
                # A scrape is answered before there is any worker.
                await until(lambda: _is(core, "requests_running", 0))
                assert await core.metric("worker_up", worker=address) is None
                api.slices = [endpoint_slice("workers", (host, False), port=int(port))]  # attached before it is ready
                await until(lambda: _is(core, "worker_up", 1, worker=address))
                assert await core.metric("epoch") == 7
                api.slices = []
                await asyncio.sleep(0.3)
                assert await core.metric("worker_up", worker=address) == 1, "attached: it stays"
                api.status = 503
                await asyncio.sleep(0.2)
                assert await core.metric("worker_up", worker=address) == 1, "the API server's trouble is not ours"
                api.status = None
                await worker.stop()
                await until(lambda: _is(core, "worker_up", None, worker=address))
            await worker.start(int(port))
            api.slices = [endpoint_slice("workers", host, port=int(port))]
            async with core_in_cluster(tmp_path, api, worker) as core:
                await until(lambda: _is(core, "worker_up", 1, worker=address))
                assert await core.metric("epoch") == 8
                assert api.annotation("epoch") == "8"
    finally:
        await worker.stop()


async def _is(core, name, value, **labels):
    found = await metric_of(core, name, **labels)
    return found == value and core.process.returncode is None


async def test_a_missing_epoch_object_ends_the_core_with_its_name(tmp_path):
    worker = FakeWorkerServer(small_info(num_pages=257))
    async with FakeApiServer() as api, core_in_cluster(tmp_path, api, worker) as core:
        assert await core.ended() == ExitCode.BAD_INPUT
        assert b"epoch_object" in core.log
        assert b"no such object: ConfigMap epoch" in core.log


async def test_an_unreachable_api_server_is_waited_for_and_scrapes_are_answered(tmp_path):
    worker = FakeWorkerServer(small_info(num_pages=257))
    async with FakeApiServer() as api:
        api.status = 503
        async with core_in_cluster(tmp_path, api, worker) as core:
            await until(lambda: _is(core, "requests_running", 0))
            api.add_config_map("epoch")
            await until(lambda: _holds(bool(api.requests)))
            api.status = None
            await until(lambda: _holds(api.config_maps["epoch"]["metadata"]["annotations"] is not None))
            assert api.annotation("epoch") == "1"


async def test_an_expired_certificate_ends_the_start_with_its_name(tmp_path):
    folder = Authority.new().role(tmp_path, "scheduler", valid_s=-1.0, begins_s=-9.0)
    worker = FakeWorkerServer(small_info(num_pages=257))
    async with FakeApiServer() as api:
        api.add_config_map("epoch")
        async with core_in_cluster(tmp_path, api, worker, "--tls-dir", str(folder)) as core:
            assert await core.ended() == ExitCode.BAD_INPUT
            assert b"tls.crt is not valid now" in core.log
        assert api.config_maps["epoch"]["metadata"]["annotations"] is None, "no epoch is spent on it"


async def _holds(value):
    return value


WITH_LEASE = ("--lease-object", "lease", "--lease-duration-s", "1")


async def test_a_missing_lease_ends_the_core_with_its_name(tmp_path):
    worker = FakeWorkerServer(small_info(num_pages=257))
    async with FakeApiServer() as api, core_in_cluster(tmp_path, api, worker, *WITH_LEASE) as core:
        api.add_config_map("epoch")
        assert await core.ended() == ExitCode.BAD_INPUT
        assert b"lease_object" in core.log
        assert b"no such object: Lease lease" in core.log


async def test_a_core_serves_only_with_the_lease_and_ends_when_another_has_it(tmp_path):
    worker = FakeWorkerServer(small_info(num_pages=257))
    host, _, port = (await worker.start()).partition(":")
    try:
        async with FakeApiServer() as api:
            api.add_config_map("epoch")
            api.add_lease("lease", holderIdentity="another", leaseDurationSeconds=3600)
            api.slices = [endpoint_slice("workers", host, port=int(port))]
            async with core_in_cluster(tmp_path, api, worker, *WITH_LEASE) as core:
                await until(lambda: _is(core, "leader", 0))
                await asyncio.sleep(0.5)
                assert await core.metric("worker_up", worker=f"{host}:{port}") is None
                assert api.config_maps["epoch"]["metadata"]["annotations"] is None, "it takes no epoch either"
                api.add_lease("lease")
                await until(lambda: _is(core, "leader", 1))
                await until(lambda: _is(core, "worker_up", 1, worker=f"{host}:{port}"))
                assert api.annotation("epoch") == "1"
                api.add_lease("lease", holderIdentity="another")
                assert await core.ended() == ExitCode.FAULT
                assert b"another holds the Lease" in core.log
                assert api.holder("lease") == "another"
    finally:
        await worker.stop()


async def test_a_core_that_is_stopped_gives_the_lease_back(tmp_path):
    worker = FakeWorkerServer(small_info(num_pages=257))
    async with FakeApiServer() as api:
        api.add_config_map("epoch")
        api.add_lease("lease")
        async with core_in_cluster(tmp_path, api, worker, *WITH_LEASE) as core:
            await until(lambda: _is(core, "leader", 1))
            assert api.holder("lease") != ""
            core.process.send_signal(STOP_ORDER)
            assert await core.ended() == ExitCode.OK
            assert api.holder("lease") == ""


def test_wrong_settings_of_a_config_map_end_the_start_with_all_problems_at_once():
    wrong = {
        "FORWARDPLANE_PORT": "70000",
        "FORWARDPLANE_EDGES": "none",
        "FORWARDPLANE_EPOCH_SOURCE": "kubernetes",
        "FORWARDPLANE_DRAIN_TIMEOUT_S": "-1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "scheduler_svc"],
        env={**os.environ, **wrong},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )

    assert done.returncode == EX_CONFIG
    for named in ("port = 70000", "edges = none", "epoch_source kubernetes needs epoch_object", "drain_timeout_s = -1"):
        assert named in done.stderr
