"""Sizes and costs of plans as changes of the plan before: prints figures, asserts the sizes that are promised."""

from dataclasses import replace

import numpy as np
import pytest

from protos.wire.codec import decode_plan, encode_plan
from protos.wire.delta import Base, complete
from protos.wire.delta_making import changes_of
from protos.wire.digest import plan_digest
from protos.wire.plan import SamplingColumns, TokenColumns
from tests.bench.test_bench_wire import median_us
from tests.support import plans

ROWS, CONTEXT, PAGE = 256, 4096, 16
STEPS = PAGE
MOST_BYTES_A_ROW = 64
MOST_FULL_BYTES = 300 * 1024


def step_plan(info, seq, length):
    """Every row decodes the token that the plan before sampled; rows stand at different places in their pages."""
    rows = []
    for row in range(ROWS):
        cached = length + row % PAGE
        count = -(-(cached + 1) // PAGE)
        rows.append(plans.decode(cached, handle=row + 1, pages=range(1 + 260 * row, 1 + 260 * row + count), ids=[0]))
    sampling = SamplingColumns(
        temperatures=np.full(ROWS, 0.7, np.float32),
        top_ps=np.full(ROWS, 0.9, np.float32),
        seeds=np.arange(ROWS, dtype=np.uint64),
    )
    plan = plans.make_plan(rows, info=info, seq=seq, sampling=sampling)
    references = TokenColumns(
        ids=np.zeros(ROWS, np.int32),
        sources=np.ones(ROWS, np.uint8),
        ref_seqs=np.full(ROWS, seq - 1, np.uint64),
        ref_rows=np.arange(ROWS, dtype=np.uint32),
    )
    return replace(plan, tokens=references)


@pytest.mark.bench
def test_a_steady_decode_of_256_rows_of_4k_context(capsys):
    info = plans.make_info(
        sub_pools=[plans.full_sub_pool(num_pages=260 * ROWS + 1)], limits=plans.make_limits(context_tokens=8192)
    )
    steps = [step_plan(info, seq, CONTEXT - 2 * PAGE + seq) for seq in range(2, 2 + STEPS + 1)]
    digests = [plan_digest(plan) for plan in steps]
    sizes = []
    for index in range(1, len(steps)):
        delta = changes_of(
            steps[index], steps[index - 1], digest=digests[index], base_digest=digests[index - 1], page_sizes=[PAGE]
        )
        body = encode_plan(delta)
        got = complete(decode_plan(body), Base(steps[index - 1], digests[index - 1]), page_sizes=[PAGE])
        assert plan_digest(got) == digests[index]
        sizes.append(len(body))
    full = len(encode_plan(steps[-1]))
    plan, base = steps[1], Base(steps[0], digests[0])

    def make():
        return changes_of(plan, base.plan, digest=digests[1], base_digest=base.digest, page_sizes=[PAGE])

    sent = decode_plan(encode_plan(make()))
    figures = {
        "full encode": median_us(lambda: encode_plan(plan)),
        "digest": median_us(lambda: plan_digest(plan)),
        "delta": median_us(make),
        "delta encode": median_us(lambda: encode_plan(sent)),
        "complete": median_us(lambda: complete(sent, base, page_sizes=[PAGE])),
    }
    with capsys.disabled():
        text = ", ".join(f"{name} {value:.0f} us" for name, value in figures.items())
        a_row = [size / ROWS for size in (min(sizes), max(sizes))]
        print(f"\nfull {full / 1024:.0f} KiB; delta {a_row[0]:.1f} to {a_row[1]:.1f} bytes a row; {text}")
    assert max(sizes) <= MOST_BYTES_A_ROW * ROWS
    assert full <= MOST_FULL_BYTES
