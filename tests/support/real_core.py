"""The real core in this process: loop, bridge and scheduling, with an exact fake worker instead of a link."""

import asyncio
import time
from pathlib import Path

from prometheus_client import CollectorRegistry

from protos.forwardplane.v1.bridge_pb2 import CoreModel
from protos.wire.enums import WorkerState
from protos.wire.plan import ForwardPlan
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.bridge.server import BridgeServer
from scheduler_svc.core.events import NeedMask, ResultReceived, StreamKey, WorkerAttached
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.links.statistics import LinkCounts
from scheduler_svc.loop import CoreLoop
from scheduler_svc.metrics import create_metrics
from tests.support.core_harness import mask_answer
from tests.support.fake_worker import FakeWorker

WORKER = "w0"


class RealCore:
    """What `running_edge` needs of a core. It is its own worker link and its own maker of masks."""

    worker = WORKER
    state = WorkerState.SERVING
    num_in_flight = 0

    def __init__(self, path: Path, info: WorkerInfo, *, step_s: float = 0.0) -> None:
        self.path = path
        self._step_s = step_s
        self.info = info
        self.counts = LinkCounts()
        self.model = CoreModel(
            context_tokens=info.limits.context_tokens,
            logits_width=info.logits_width,
            max_logprobs=info.limits.max_logprobs,
            serving=True,
        )
        self._executor = FakeWorker(info)
        self._loop = CoreLoop(CoreSettings(), metrics=create_metrics(CollectorRegistry()), clock=time.monotonic)
        self._bridge = BridgeServer(path, listener=self._loop, clock=time.monotonic)
        self._running: asyncio.Task[None] | None = None

    @property
    def books(self) -> SchedulerState:
        """The core's state, for reading."""
        return self._loop._state

    async def start(self) -> None:
        self._loop.connect(links={WORKER: self}, edges=self._bridge, masks=self)
        await self._bridge.start()
        self._running = asyncio.create_task(self._loop.run())
        self._loop.worker_event(WorkerAttached(WORKER, self.info, 1, 1))

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        await self._bridge.close()

    def send(self, plan: ForwardPlan) -> None:
        result = self._executor.execute(plan)
        asyncio.get_running_loop().call_later(self._step_s, self._loop.worker_event, ResultReceived(WORKER, result))

    def ask(self, wanted: NeedMask) -> None:
        asyncio.get_running_loop().call_soon(self._loop.masks_ready, [mask_answer(wanted)])

    def forget(self, stream: StreamKey) -> None:
        pass
