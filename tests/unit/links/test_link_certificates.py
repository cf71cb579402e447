"""The plan channel over mutual TLS: only a worker is followed, only a scheduler is served, renewals drop nothing."""

import asyncio
import dataclasses

import pytest

from protos.service.tls_files import TlsFolder
from scheduler_svc.core.events import ResultReceived, WorkerAttached, WorkerLost
from tests.support.certificates import Authority
from tests.support.core_harness import small_info
from tests.support.fake_worker_server import FakeWorkerServer
from tests.support.link_rig import SESSION, rig
from tests.support.waiting import until

QUICK = dataclasses.replace(SESSION, certificate_check_s=0.05, report_late_s=0.5, report_lost_s=2.0, plan_timeout_s=2.0)


@pytest.fixture(scope="module")
def authority():
    return Authority.new()


def worker_server(folder):
    return FakeWorkerServer(small_info(window=2), tls=folder)


async def test_a_scheduler_and_a_worker_of_one_authority_work_together(authority, tmp_path):
    server = worker_server(authority.role(tmp_path, "worker"))
    scheduler = TlsFolder(authority.role(tmp_path, "scheduler"), needs_authority=True)
    async with rig(server=server, tls=scheduler) as r:
        await r.listener.until(WorkerAttached)
        r.send()
        await r.listener.until(ResultReceived)


@pytest.mark.parametrize("role", ["worker", "caller/alice", "operator"])
async def test_s2_a_certificate_of_another_role_attaches_to_nothing(authority, tmp_path, role):
    server = worker_server(authority.role(tmp_path, "worker"))
    other = TlsFolder(authority.role(tmp_path, role), needs_authority=True)
    async with rig(server=server, tls=other) as r:
        await asyncio.sleep(0.3)
        assert server.attaches == []
        assert r.metric("attach_refusals_total", worker="w0", reason="PERMISSION_DENIED") > 0


async def test_a_server_that_is_no_worker_is_not_followed(authority, tmp_path):
    impostor = worker_server(authority.role(tmp_path, "scheduler"))
    scheduler = TlsFolder(authority.role(tmp_path, "scheduler"), needs_authority=True)
    async with rig(server=impostor, tls=scheduler):
        await asyncio.sleep(0.3)
        assert impostor.attaches == []


async def test_a_worker_of_another_authority_is_not_followed_and_does_not_serve_us(authority, tmp_path):
    stranger = worker_server(Authority.new().role(tmp_path, "worker"))
    scheduler = TlsFolder(authority.role(tmp_path, "scheduler"), needs_authority=True)
    async with rig(server=stranger, tls=scheduler):
        await asyncio.sleep(0.3)
        assert stranger.attaches == []


async def test_plain_text_gets_nothing_from_a_worker_with_tls(authority, tmp_path):
    server = worker_server(authority.role(tmp_path, "worker"))
    async with rig(server=server):
        await asyncio.sleep(0.3)
        assert server.attaches == []


async def test_renewals_before_the_end_of_short_certificates_drop_no_plan(authority, tmp_path):
    """Both sides' certificates live 1.2 s and are renewed every 0.4 s while plans run for 2 s."""
    short = {"valid_s": 1.2}
    worker = authority.role(tmp_path, "worker", **short)
    scheduler = authority.role(tmp_path, "scheduler", **short)
    server = worker_server(worker)
    async with rig(server=server, tls=TlsFolder(scheduler, needs_authority=True), session=QUICK) as r:
        await r.listener.until(WorkerAttached)
        sent = 0
        for turn in range(20):
            if turn % 4 == 3:
                authority.role(tmp_path, "worker", **short)
                authority.role(tmp_path, "scheduler", **short)
            r.send()
            sent += 1
            await r.listener.until(ResultReceived, sent)
            await asyncio.sleep(0.1)

        results = [event.result.identity.seq for event in r.listener.events if isinstance(event, ResultReceived)]
        assert results == list(range(1, sent + 1))
        assert not any(isinstance(event, WorkerLost) for event in r.listener.events)
        assert len(server.attaches) == 1
        streams = [number for _, _, number in server.openings]
        assert streams == list(range(1, len(streams) + 1))
        assert len(streams) >= 4


async def test_new_certificates_that_connect_nowhere_leave_the_old_connection(authority, tmp_path):
    server = worker_server(authority.role(tmp_path, "worker"))
    folder = authority.role(tmp_path, "scheduler")
    session = dataclasses.replace(QUICK, open_timeout_s=0.3)
    async with rig(server=server, tls=TlsFolder(folder, needs_authority=True), session=session) as r:
        await r.listener.until(WorkerAttached)
        Authority.new("other").role(tmp_path, "scheduler")
        await asyncio.sleep(0.5)
        r.send()
        await r.listener.until(ResultReceived)
        assert [type(event) for event in r.listener.events].count(WorkerLost) == 0
        assert len(server.openings) == 1

        authority.role(tmp_path, "scheduler")
        await until(lambda: len(server.openings) > 1)
        r.send()
        await r.listener.until(ResultReceived, 2)


async def test_a_link_that_ends_while_it_tries_new_certificates_leaves_no_channel_open(authority, tmp_path):
    server = worker_server(authority.role(tmp_path, "worker"))
    folder = authority.role(tmp_path, "scheduler")
    session = dataclasses.replace(QUICK, open_timeout_s=30)
    async with rig(server=server, tls=TlsFolder(folder, needs_authority=True), session=session) as r:
        await r.listener.until(WorkerAttached)
        Authority.new("other").role(tmp_path, "scheduler")
        await until(lambda: len(r.opened) > 1)
