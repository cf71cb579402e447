"""Cost of the plan path on the host: encode, decode, digest, validate. Prints figures, asserts none."""

import time

import pytest

from protos.wire.codec import decode_plan, encode_plan
from protos.wire.digest import plan_digest
from protos.wire.validate import validate_plan
from tests.support import plans

ROUNDS = 100


def median_us(work):
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)[ROUNDS // 2] * 1e6


def shared_prefix_rows(num_rows, num_pages):
    """Rows of 4k context whose first quarter is one shared prefix."""
    shared = list(range(1, num_pages // 4 + 1))
    own = num_pages - len(shared)
    first = len(shared) + 1
    return [
        plans.decode(16 * num_pages - 1, pages=shared + list(range(first + own * row, first + own * (row + 1))))
        for row in range(num_rows)
    ]


@pytest.mark.bench
@pytest.mark.parametrize("shared", [False, True], ids=["own pages", "shared prefix"])
@pytest.mark.parametrize("num_rows", [64, 256])
def test_decode_plan_of_4k_context_page_16(num_rows, shared, capsys):
    info = plans.make_info(
        sub_pools=[plans.full_sub_pool(num_pages=256 * 257)], limits=plans.make_limits(context_tokens=8192)
    )
    rows = shared_prefix_rows(num_rows, 256) if shared else [plans.decode(4095) for _ in range(num_rows)]
    plan = plans.make_plan(rows, info=info)
    body = encode_plan(plan)
    figures = {
        "encode": median_us(lambda: encode_plan(plan)),
        "decode": median_us(lambda: decode_plan(body)),
        "digest": median_us(lambda: plan_digest(plan)),
        "validate": median_us(lambda: validate_plan(plan, info)),
    }
    with capsys.disabled():
        text = ", ".join(f"{name} {value:.0f} us" for name, value in figures.items())
        print(f"\n{num_rows} rows, shared={shared}: {len(body) / 1024:.0f} KiB, {text}")
