"""The runner of decode steps: buckets of rows, everything up to the logits in the graph."""

from worker_svc.batch.forward_batch import ForwardBatch, PaddedShape
from worker_svc.forward_context import ForwardContext
from worker_svc.graph_backends.base import Outputs
from worker_svc.model_runner import RunnerOutput
from worker_svc.runners.graph_runner import GraphRunner
from worker_svc.runners.shape_key import ShapeKey


class DecodeGraphRunner(GraphRunner):
    """A `GraphRunner` of whole decode steps."""

    def _padded(self, batch: ForwardBatch, key: ShapeKey) -> PaddedShape:
        return PaddedShape(num_reqs=key.bucket, num_tokens=key.num_tokens, num_logits=batch.num_logits)

    def _work(self, key: ShapeKey, context: ForwardContext) -> Outputs:
        tokens = slice(0, key.num_tokens)
        hidden = self._model_runner.hidden_states(
            self._buffers.input_ids[tokens], self._buffers.positions[tokens], context
        )
        return hidden, self._model_runner.logits(hidden), hidden.isfinite().all(-1)

    def _output(self, batch: ForwardBatch, outputs: Outputs) -> RunnerOutput:
        hidden, logits, finite = outputs
        return RunnerOutput(
            last_hidden=hidden.index_select(0, batch.last_token_rows),
            logits=logits.index_select(0, batch.logits_rows),
            finite=finite.index_select(0, batch.last_token_rows),
            hidden=hidden[: batch.num_tokens].clone() if batch.wants_all_hidden else None,
        )
