"""SmolLM2 compiled: one bucket, because compiling takes most of a minute of a core that nobody else uses."""

import pytest
import torch

from tests.support.graph_bench import GraphBench
from tests.support.model import model_folder
from worker_svc.graph_backends.compiled import why_not_compiled

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_not_compiled() is not None, reason="no C++ compiler"),
]


def test_smollm2_compiled_gives_the_eager_ids():
    torch.set_num_threads(2)
    bench = GraphBench(model_folder(), backends=("compiled", "compiled"), decode=(2,), numerics="fast", num_pages=32)
    bench.capture_one(bench.decode, 2)
    rows = [bench.driver.row([50 + 29 * row + 7 * place for place in range(40)]) for row in range(2)]
    bench.driver.step(rows, [12, 5])
    for count in (2, 1, 2, 2):
        batch = bench.batch(rows[:count], [1] * count, bucket=2)
        known, found = bench.eager(batch), bench.replay(batch)
        assert torch.equal(found.logits.argmax(-1), known.logits.argmax(-1))
        torch.testing.assert_close(found.logits, known.logits, rtol=0, atol=0.05)
        for row in rows[:count]:
            row.kv_len += 1
