"""Cost of a plan on the worker's host side before the forward: parse, validate, build, and the canary. Asserts none."""

import time

import pytest
import torch

from protos.wire.codec import decode_plan, encode_plan
from protos.wire.enums import Feature
from protos.wire.validate import validate_plan
from tests.support import plans
from worker_svc.batch.builder import BatchBuilder
from worker_svc.batch.canary_guard import KVCanary
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.token_to_kv_pool import KVGeometry

ROUNDS = 100
CPU = torch.device("cpu")


class Pages:
    geometry = KVGeometry(
        num_pages=256 * 257, page_size=16, num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32
    )


def median_us(work):
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)[ROUNDS // 2] * 1e6


@pytest.mark.bench
@pytest.mark.parametrize("context", [512, 4095])
def test_a_decode_plan_of_256_rows(context, capsys):
    torch.set_num_threads(1)
    info = plans.make_info(
        sub_pools=[plans.full_sub_pool(num_pages=256 * 257)],
        limits=plans.make_limits(context_tokens=8192),
        features=plans.PLAIN_FEATURES | {Feature.CANARY},
    )
    body = encode_plan(plans.make_plan([plans.decode(context) for _ in range(256)], info=info))
    plan = decode_plan(body)
    translator = IndexTranslator((Pages(),))
    builder = BatchBuilder(translator=translator, page_sizes=(16,), device=CPU)
    canary = KVCanary(translator, is_refusing=False, device=CPU)
    whole = slice(0, 256)
    (batch,) = builder.build(plan)
    _, verdict = canary.guard(batch, canary.expected(plan.rows, whole))
    assert verdict.is_bad.all(), "nothing was written before"
    prefill_all(canary, builder, plan)
    assert not canary.check(batch, canary.expected(plan.rows, whole)).is_bad.any()
    figures = {
        "parse": median_us(lambda: decode_plan(body)),
        "validate": median_us(lambda: validate_plan(plan, info)),
        "build": median_us(lambda: builder.build(plan)),
        "canary": median_us(lambda: canary.guard(batch, canary.expected(plan.rows, whole))),
    }
    with capsys.disabled():
        print(f"\n256 decode rows of context {context}: " + ", ".join(f"{k} {v:.0f} us" for k, v in figures.items()))


def prefill_all(canary, builder, decode):
    """Write every position before the decode's own, row by row, on the same pages."""
    table = decode.page_tables[0]
    for row in range(decode.rows.num_rows):
        pages = table.indices[table.indptr[row] : table.indptr[row + 1]].tolist()
        length = int(decode.rows.first_positions[row])
        plan = plans.make_plan([plans.extend(0, length, pages=pages[: -(-length // 16)])])
        (batch,) = builder.build(plan)
        canary.guard(batch, canary.expected(plan.rows, slice(0, 1)))
