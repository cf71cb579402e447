"""The runner of prefill and mixed steps: buckets of tokens and a fixed number of request slots.

The layers are in the graph; the logits, of the few tokens that want them, are computed after it.
"""

from worker_svc.batch.forward_batch import ForwardBatch, PaddedShape
from worker_svc.forward_context import ForwardContext
from worker_svc.graph_backends.base import Outputs
from worker_svc.model_runner import RunnerOutput
from worker_svc.runners.graph_runner import GraphRunner
from worker_svc.runners.shape_key import ShapeKey


class PrefillGraphRunner(GraphRunner):
    """A `GraphRunner` of prefill steps. Unused slots are empty rows behind the real tokens."""

    def _padded(self, batch: ForwardBatch, key: ShapeKey) -> PaddedShape:
        return PaddedShape(num_reqs=self.shapes.slots, num_tokens=key.num_tokens, num_logits=batch.num_logits)

    def _work(self, key: ShapeKey, context: ForwardContext) -> Outputs:
        tokens = slice(0, key.num_tokens)
        hidden = self._model_runner.hidden_states(
            self._buffers.input_ids[tokens], self._buffers.positions[tokens], context
        )
        return (hidden,)

    def _output(self, batch: ForwardBatch, outputs: Outputs) -> RunnerOutput:
        hidden = outputs[0][: batch.num_tokens]
        return self._model_runner.output(hidden.clone() if batch.wants_all_hidden else hidden, batch)
