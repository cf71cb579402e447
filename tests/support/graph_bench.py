"""A real or tiny model with graph runners of both phases beside the eager one, driven by hand-made batches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from protos.service.model_files import ModelFolder
from protos.wire.enums import GraphPhase
from protos.wire.plan import GraphChoice
from tests.support.forwards import ForwardDriver, Row, make_batch, moved
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.batch.sink_batch import sink_batch
from worker_svc.device.device_graph import GraphDevice
from worker_svc.device.tape import TapeDevice
from worker_svc.graph_backends.base import GraphBackend
from worker_svc.graph_backends.breakable import BreakableBackend
from worker_svc.graph_backends.compiled import CompiledBackend
from worker_svc.graph_backends.full import FullBackend
from worker_svc.graph_backends.kept_tensors import KeptTensors
from worker_svc.model_runner import RunnerOutput
from worker_svc.runners.decode_graph import DecodeGraphRunner
from worker_svc.runners.eligibility import GraphShapes, GraphState
from worker_svc.runners.graph_runner import GraphRunner
from worker_svc.runners.prefill_graph import PrefillGraphRunner
from worker_svc.runners.static_buffers import StaticBuffers


class GraphBench:
    """Graph runners over the parts of a `ForwardDriver`."""

    def __init__(
        self,
        folder: ModelFolder | None = None,
        *,
        backends: tuple[str, str] = ("full", "breakable"),
        decode: Sequence[int] = (1, 2, 4),
        prefill: Sequence[int] = (16, 32),
        slots: int = 4,
        numerics: str = "reproducible",
        num_pages: int = 256,
        width: int = 1,
        graphs: GraphDevice | None = None,
        driver: ForwardDriver | None = None,
        **options: Any,
    ) -> None:
        """`width`: tokens of every row of a decode graph. `driver`: one that is there; `options`: of a new one."""
        if driver is None:
            assert folder is not None
            driver = ForwardDriver(folder, numerics=numerics, num_pages=num_pages, **options)
        self.driver = driver
        self.device = graphs or TapeDevice()
        self.kept = KeptTensors(self.device)
        self.buffers = StaticBuffers(max_tokens=max(width * max(decode), *prefill), device=self.driver.device)
        self.decode = self._runner(DecodeGraphRunner, GraphPhase.DECODE, sizes=decode, backend=backends[0], width=width)
        self.prefill = self._runner(
            PrefillGraphRunner, GraphPhase.PREFILL, sizes=prefill, slots=slots, backend=backends[1]
        )

    def capture(self) -> None:
        """All buckets, the largest first."""
        for runner in (self.prefill, self.decode):
            for size in reversed(runner.shapes.sizes):
                self.capture_one(runner, size)

    def capture_one(self, runner: GraphRunner, size: int) -> None:
        example = sink_batch(runner.shapes.mode, num_sub_pools=len(self.driver.pools), device=self.driver.device)
        runner.capture(size, example=example)
        runner.shapes.states[size] = GraphState.LIVE

    def batch(self, rows: Sequence[Row], lens: Sequence[int], *, bucket: int) -> ForwardBatch:
        """The next ids of each row, with the bucket of its phase named."""
        self.driver.hold_pages(rows, lens)
        batch = moved(make_batch(rows, lens, translator=self.driver.translator), self.driver.device)
        phase = GraphPhase.DECODE if batch.extend is None else GraphPhase.PREFILL
        return replace(batch, graph=GraphChoice(phase=phase, bucket=bucket))

    def replay(self, batch: ForwardBatch) -> RunnerOutput:
        assert isinstance(batch.graph, GraphChoice)
        runner = self.decode if batch.graph.phase is GraphPhase.DECODE else self.prefill
        assert runner.refusal(batch) is None
        return runner.forward(batch)

    def eager(self, batch: ForwardBatch) -> RunnerOutput:
        return self.driver.runner.forward(batch, self.driver.context)

    def _backend(self, name: str) -> GraphBackend:
        breaks = self.driver.context.breaks
        if name == "compiled":
            return CompiledBackend(kept=self.kept, breaks=breaks)
        kind = {"full": FullBackend, "breakable": BreakableBackend}[name]
        return kind(self.device, kept=self.kept, breaks=breaks)

    def _runner(
        self,
        kind: type[GraphRunner],
        phase: GraphPhase,
        *,
        sizes: Sequence[int],
        backend: str,
        slots: int = 0,
        width: int = 1,
    ) -> GraphRunner:
        return kind(
            self.driver.runner,
            self.driver.context,
            backend=self._backend(backend),
            shapes=GraphShapes(phase=phase, sizes=tuple(sizes), slots=slots, width=width),
            buffers=self.buffers,
        )


def same(left: RunnerOutput, right: RunnerOutput) -> bool:
    return all(torch.equal(getattr(left, name), getattr(right, name)) for name in ("last_hidden", "logits", "finite"))
