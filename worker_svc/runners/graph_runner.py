"""Runs a forward by replaying a captured graph: pad, fill the static buffers, plan attention, replay, slice.

One class per phase over one base, any graph back-end. A runner knows buckets, slots and padding; the back-end knows
none of them, and the model runner knows no graphs. Guards: padded rows read and write the sink only; what is returned
covers real rows only and is owned by the caller.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from protos.wire.enums import GraphRefusal
from protos.wire.plan import GraphChoice
from worker_svc.attention.base import FixedPlan
from worker_svc.batch.forward_batch import ForwardBatch, PaddedShape
from worker_svc.device.break_points import parts_of
from worker_svc.forward_context import ForwardContext
from worker_svc.graph_backends.base import GraphBackend, Outputs, Pause, Preparation, Work, no_pause
from worker_svc.model_runner import ModelRunner, RunnerOutput
from worker_svc.runners.eligibility import GraphShapes, why_not_replayed
from worker_svc.runners.shape_key import ShapeKey
from worker_svc.runners.static_buffers import StaticBuffers


class GraphRunner(ABC):
    """A `ForwardRunner` of one phase."""

    replays_graphs = True

    def __init__(
        self,
        model_runner: ModelRunner,
        context: ForwardContext,
        *,
        backend: GraphBackend,
        shapes: GraphShapes,
        buffers: StaticBuffers,
    ) -> None:
        self.backend_name = backend.name
        self._model_runner = model_runner
        self._context = context
        self._backend = backend
        self._buffers = buffers
        self._fixed: dict[ShapeKey, tuple[FixedPlan, ...]] = {}
        self.shapes = shapes

    def refusal(self, batch: ForwardBatch) -> GraphRefusal | None:
        """See `ForwardRunner.refusal`."""
        return why_not_replayed(batch, self.shapes)

    def padded_tokens(self, batch: ForwardBatch) -> int:
        """See `ForwardRunner.padded_tokens`."""
        return self._key(batch).num_tokens - batch.num_tokens

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> RunnerOutput:
        """Replay the bucket that the plan names."""
        key = self._key(batch)
        padded = batch.pad(self._padded(batch, key))
        self._buffers.fill(batch, num_tokens=key.num_tokens)
        if key in self._fixed:
            for plan in self._fixed[key]:
                plan.fill(padded)
            return self._output(batch, self._backend.replay(key))
        with self._context.bind(padded):
            outputs = self._backend.replay(key)
        return self._output(batch, outputs)

    @torch.inference_mode()
    def capture(self, bucket: int, *, example: ForwardBatch, pause: Pause = no_pause) -> None:
        """Capture one bucket. The captured run reads and writes the sink only.

        Args:
            bucket: of this runner's shapes.
            example: a batch of this phase whose rows lie in the sink.
            pause: called between two pieces.

        Raises:
            CaptureError: it cannot be captured.
        """
        key = self._key_of(bucket)
        padded, work = example.pad(self._padded(example, key)), self._captured(key, self._context)
        self._buffers.fill(example, num_tokens=key.num_tokens)
        if not self._backend.holds_marked:
            with self._context.bind(padded):
                self._backend.capture(key, work, pause=pause)
            return
        plans = self._context.fixed_plans(padded)
        with self._context.bind_fixed(plans):
            self._backend.capture(key, work, pause=pause)
        self._fixed[key] = plans

    def preparation(self, bucket: int, *, example: ForwardBatch) -> Preparation | None:
        """What has to be done before `capture` of this bucket, on another thread; None: nothing."""
        key, context = self._key_of(bucket), self._context.twin()
        prepare = self._backend.preparation(self._captured(key, context), breaks=context.breaks)
        if prepare is None:
            return None
        padded = example.pad(self._padded(example, key))

        def run() -> None:
            with torch.inference_mode(), context.bind(padded):
                prepare()

        return run

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See `ForwardRunner.logits`."""
        return self._model_runner.logits(hidden)

    def _captured(self, key: ShapeKey, context: ForwardContext) -> Work:
        if not self.shapes.is_debugged:
            return lambda: self._work(key, context)
        return lambda: parts_of(context.breaks.call(self._work, key=key, context=context))

    def _key(self, batch: ForwardBatch) -> ShapeKey:
        assert isinstance(batch.graph, GraphChoice), "a batch that names no graph was not refused"
        return self._key_of(batch.graph.bucket)

    def _key_of(self, bucket: int) -> ShapeKey:
        return ShapeKey(phase=self.shapes.phase, bucket=bucket, width=self.shapes.width)

    @abstractmethod
    def _padded(self, batch: ForwardBatch, key: ShapeKey) -> PaddedShape: ...

    @abstractmethod
    def _work(self, key: ShapeKey, context: ForwardContext) -> Outputs: ...

    @abstractmethod
    def _output(self, batch: ForwardBatch, outputs: Outputs) -> RunnerOutput: ...
