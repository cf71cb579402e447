"""A link to a fake worker on loopback, its listener and its metrics."""

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from prometheus_client import CollectorRegistry

from protos.service.channel import plan_channel
from protos.service.credentials import channel_security
from protos.service.tls_files import TlsFolder
from scheduler_svc.core.events import WorkerAttached
from scheduler_svc.links.epoch import WorkersEpoch
from scheduler_svc.links.fingerprints import ExpectedModel
from scheduler_svc.links.session import SessionSettings
from scheduler_svc.links.worker_link import LinkParts, LinkSettings, WorkerLink
from scheduler_svc.metrics import PREFIX, LinkMetrics, create_metrics
from tests.support.core_harness import small_info
from tests.support.fake_worker_server import FakeWorkerServer
from tests.support.plans import extend, make_identity, make_plan

WORKER = "worker.forwardplane"
LIMIT_S = 30.0
SESSION = SessionSettings(
    open_timeout_s=1.0, plan_timeout_s=0.3, report_interval_ms=20, report_late_s=0.15, report_lost_s=0.3, reopen_s=0.5
)


class Listener:
    def __init__(self):
        self.events: list[object] = []
        self.changed = asyncio.Event()

    def worker_event(self, event):
        self._add(event)

    def worker_fenced(self, worker, error):
        self._add(error)

    def _add(self, event):
        self.events.append(event)
        self.changed.set()

    async def until(self, kind, count=1):
        """The events of `kind`, as soon as there are so many."""
        async with asyncio.timeout(LIMIT_S):
            while len(found := [event for event in self.events if isinstance(event, kind)]) < count:
                self.changed.clear()
                await self.changed.wait()
        return found


@dataclass
class Rig:
    server: FakeWorkerServer
    listener: Listener
    link: WorkerLink
    registry: CollectorRegistry
    opened: list[grpc.aio.Channel]
    """All that the link ever opened; the rig looks whether they are closed at its end."""
    seq: int = 0
    plans: list[object] = field(default_factory=list)
    dropping: bool = False

    def send(self):
        attached = next(event for event in reversed(self.listener.events) if isinstance(event, WorkerAttached))
        self.seq += 1
        identity = make_identity(
            seq=self.seq, budget_ms=0, epoch=attached.epoch, term=attached.term, incarnation=attached.info.incarnation
        )
        plan = make_plan([extend(0, 5)], info=attached.info, identity=identity)
        self.plans.append(plan)
        self.link.send(plan)

    def metric(self, name, **labels):
        return self.registry.get_sample_value(PREFIX + name, labels)


def expected_of(info):
    return ExpectedModel(name="m", tokenizer_fingerprint=info.fingerprints.tokenizer)


@asynccontextmanager
async def rig(*, server=None, epoch=None, session=SESSION, expected=None, absent_on=None, tls: TlsFolder | None = None):
    server = server or FakeWorkerServer(small_info(window=2))
    address = await server.start() if absent_on is None else f"127.0.0.1:{absent_on}"
    registry = CollectorRegistry()
    metrics = create_metrics(registry)
    listener = Listener()
    settings = LinkSettings(
        session=session, attach_timeout_s=1.0, reattach_min_s=0.01, reattach_max_s=0.05, scheduler_name="test"
    )
    opened: list[grpc.aio.Channel] = []

    def open_channel(_worker):
        opened.append(plan_channel(address, tls and channel_security(tls.current(), server_name=WORKER)))
        return opened[-1]

    parts = LinkParts(
        listener=listener,
        metrics=LinkMetrics(metrics.plans, metrics.workers, "w0"),
        epoch=epoch or WorkersEpoch(),
        expected=expected or expected_of(server.info),
        open_channel=open_channel,
        certificates=tls and tls.current,
        clock=time.monotonic,
    )
    link = WorkerLink("w0", settings=settings, parts=parts)
    running = asyncio.create_task(link.run())
    try:
        yield Rig(server, listener, link, registry, opened)
    finally:
        running.cancel()
        await asyncio.wait({running})
        await server.stop()
        if not running.cancelled():
            running.result()
        assert all(channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN for channel in opened)
