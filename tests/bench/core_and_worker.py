"""A core process and simulated workers as processes, pinned, with this process in the edge's place: no callers.

What is measured is the worker's own account of its device (busy, bubble), the core's histograms and its time.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from protos.client.fetch_model import fetch_model
from protos.client.simulated_model import SIMULATED_MODEL, VOCAB_SIZE
from protos.forwardplane.v1.bridge_pb2 import CoreToEdge, ResolvedSampling, SubmitStream
from scheduler_svc.bridge.client import BridgeClient
from scheduler_svc.bridge.next_tokens import next_tokens_from_message
from scheduler_svc.bridge.parent_watch import STOP_ORDER
from tests.bench.peers import ROOT
from tests.support.served import free_ports, scrape, total

WORKER, CORE = "forwardplane_worker_", "forwardplane_scheduler_"
SPARE_PAGES = 300
LIVES_S = 30.0
MOST_WAITING = 64


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What runs where."""

    step_ms: float
    rows: int
    """Of each worker."""
    context: int
    workers: int = 1
    core_cpu: int = 0
    others_cpu: int = 1
    profile: Path | None = None
    """Of the core, by cProfile."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """One look at everything that only grows."""

    at: float
    busy_s: float
    bubble_s: float
    plans: float
    core_cpu_s: float
    worker_cpu_s: float


@dataclass(frozen=True, kw_only=True)
class Window:
    """What lies between two looks."""

    idle_share: float
    """Of the devices: time between plans while rows are running, over that and the time of plans."""
    steps_per_s: float
    core_cpus: float
    core_s_per_step: float
    worker_cpus: float


def window(begin: Counts, end: Counts) -> Window:
    passed, plans = end.at - begin.at, end.plans - begin.plans
    waited, busy = end.bubble_s - begin.bubble_s, end.busy_s - begin.busy_s
    core_s = end.core_cpu_s - begin.core_cpu_s
    return Window(
        idle_share=waited / (waited + busy),
        steps_per_s=plans / passed,
        core_cpus=core_s / passed,
        core_s_per_step=core_s / plans,
        worker_cpus=(end.worker_cpu_s - begin.worker_cpu_s) / passed,
    )


@dataclass
class StandIn:
    """Reads what the core has for its edge."""

    client: BridgeClient
    tokens: int = 0
    begun: set[int] = field(default_factory=set)
    arrivals: list[float] = field(default_factory=list)
    """Of messages, seconds."""
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    errors: list[str] = field(default_factory=list)

    async def read(self) -> None:
        while (message := await self.client.receive()) is not None:
            self._take(message)

    def _take(self, message: CoreToEdge) -> None:
        if message.HasField("model") and message.model.serving:
            self.serving.set()
        for stream_id, _, _ in next_tokens_from_message(message.next_tokens):
            self.tokens += 1
            self.begun.add(stream_id)
        for update in message.updates:
            self.tokens += len(update.token_ids) // 4
            if update.HasField("error"):
                self.errors.append(str(update.error))
            self.begun.add(update.stream_id)
        self.arrivals.append(asyncio.get_running_loop().time())

    def submit(self, stream_id: int, *, context: int, max_tokens: int) -> None:
        prompt = np.random.default_rng(stream_id).integers(0, VOCAB_SIZE - 8, context).astype("<i4")
        self.client.submit(
            SubmitStream(
                stream_id=stream_id,
                request_id=f"bench-{stream_id}",
                prompt_ids=prompt.tobytes(),
                sampling=ResolvedSampling(repetition_penalty=1.0, top_p=1.0),
                max_tokens=max_tokens,
                deadline_ms=3_600_000,
            )
        )


@dataclass
class Running:
    """Processes and ports of a scene."""

    scene: Scene
    edge: StandIn
    core: psutil.Process
    workers: list[psutil.Process]
    core_metrics: int
    worker_metrics: Sequence[int]

    def look(self) -> Counts:
        device = [scrape(port) for port in self.worker_metrics]
        core = scrape(self.core_metrics)
        busy, bubble = (
            sum(total(samples, f"{WORKER}{name}_seconds_total") for samples in device) for name in ("busy", "bubble")
        )
        return Counts(
            at=asyncio.get_running_loop().time(),
            busy_s=busy,
            bubble_s=bubble,
            plans=total(core, f"{CORE}plan_encode_seconds_count"),
            core_cpu_s=sum(self.core.cpu_times()[:2]),
            worker_cpu_s=sum(sum(worker.cpu_times()[:2]) for worker in self.workers),
        )

    async def fill(self, *, max_tokens: int) -> None:
        """Submit every row; return when each has its first token."""
        wanted = self.scene.rows * self.scene.workers
        for stream_id in range(1, wanted + 1):
            self.edge.submit(stream_id, context=self.scene.context, max_tokens=max_tokens)
            await self._begun(stream_id - MOST_WAITING)
        await self._begun(wanted)

    async def _begun(self, count: int) -> None:
        async with asyncio.timeout(LIVES_S):
            while len(self.edge.begun) < count:
                assert not self.edge.errors, self.edge.errors[0]
                await asyncio.sleep(0.02)


def worker_command(scene: Scene, model: Path, ports: tuple[int, int, int]) -> list[str]:
    port, health, metrics = ports
    pages = scene.rows * (scene.context // 16 + SPARE_PAGES) + 2
    flags = {
        "device": "simulated",
        "model": model,
        "port": port,
        "health-port": health,
        "metrics-port": metrics,
        "simulated-step-ms": scene.step_ms,
        "num-pages": pages,
        "max-rows": scene.rows,
        "max-tokens": 16_384,
        "log-level": "error",
    }
    return [sys.executable, "-m", "worker_svc", *_flat(flags)]


def core_command(
    scene: Scene, model: Path, *, folder: Path, workers: Sequence[int], metrics: int, parent: int
) -> list[str]:
    flags = {
        "role": "core",
        "parent-fd": parent,
        "model": model,
        "socket-dir": folder,
        "workers": ",".join(f"127.0.0.1:{port}" for port in workers),
        "metrics-port": metrics,
        "budget-tokens": 15_000,
        "max-waiting-requests": 4096,
        "log-level": "warning",
    }
    profiler = ["-m", "cProfile", "-o", str(scene.profile)] if scene.profile else []
    return [sys.executable, *profiler, "-m", "scheduler_svc", *_flat(flags)]


def _flat(flags: dict[str, object]) -> list[str]:
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


@contextlib.asynccontextmanager
async def running(scene: Scene, folder: Path) -> AsyncIterator[Running]:
    """Everything up and attached; ended in order."""
    model = fetch_model(SIMULATED_MODEL, cache=folder / "models").path
    ports = free_ports(3 * scene.workers + 1)
    of_workers = [tuple(ports[3 * index : 3 * index + 3]) for index in range(scene.workers)]
    read_end, lifeline = os.pipe()
    own = psutil.Process()
    before = own.cpu_affinity()
    processes: list[psutil.Popen] = []
    try:
        own.cpu_affinity([scene.others_cpu])
        for each in of_workers:
            processes.append(psutil.Popen(worker_command(scene, model, each), cwd=ROOT))
        command = core_command(
            scene,
            model,
            folder=folder,
            workers=[each[0] for each in of_workers],
            metrics=ports[-1],
            parent=read_end,
        )
        core = psutil.Popen(command, cwd=ROOT, pass_fds=(read_end,))
        processes.append(core)
        core.cpu_affinity([scene.core_cpu])
        client = BridgeClient(folder / "core.sock", edge_index=0)
        await client.connect(timeout_s=LIVES_S)
        edge = StandIn(client)
        reading = asyncio.create_task(edge.read())
        await asyncio.wait_for(edge.serving.wait(), LIVES_S)
        yield Running(scene, edge, core, processes[:-1], ports[-1], [each[2] for each in of_workers])
        await client.close()
        reading.cancel()
        await asyncio.wait({reading})
    finally:
        own.cpu_affinity(before)
        for process in processes[len(of_workers) :]:
            stop(process, STOP_ORDER)
        for process in processes[: len(of_workers)]:
            stop(process, signal.SIGTERM)
        os.close(lifeline)
        os.close(read_end)


def stop(process: psutil.Popen, order: signal.Signals) -> None:
    """End it in order, or at least end it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(order)
        with contextlib.suppress(psutil.TimeoutExpired, subprocess.TimeoutExpired):
            process.wait(5)
            return
        process.kill()
        process.wait(5)
