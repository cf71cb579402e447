"""One SmolLM2 layer's attention by back-end, alternating in one run: 16 rows that decode at a context of 2,000.

Planning, storing the step's keys and values, gathering and attending are all inside the measure, as a step pays for
them. Prints figures, asserts none. Ratios are of medians; "best" compares the fastest calls, which neighbours disturb
least.
"""

import statistics
import time

import psutil
import pytest
import torch

from kernels.native import Native, ThreadPool, load_native
from tests.support.attention_cases import Heads
from tests.support.attention_setups import SETUPS, Setup
from tests.support.forwards import Row, make_batch
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.token_to_kv_pool import KVGeometry, TokenToKVPool

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1200)]

THREADS = 2
SMOLLM2 = Heads(queries=9, keys=3, dim=64)
CASES = [("decode", 16, 1, 2000), ("decode", 16, 1, 512), ("decode", 1, 1, 2000), ("prefill", 1, 256, 2000)]
BACKENDS = ("torch", "torch on native half pages", "tiled", "native")
ROUNDS, CALLS = 5, 6


@pytest.fixture(scope="module")
def threads():
    loaded = load_native()
    assert isinstance(loaded, Native), loaded
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    with ThreadPool(loaded, threads=THREADS) as pool:
        yield pool
    torch.set_num_threads(before)


def layer_call(name, threads, *, rows, tokens, context):
    """A function that plans and runs one layer of the step."""
    prefill, decode, order, dtype, kv_dtype = SETUPS[name]
    setup = Setup(prefill=prefill, decode=decode, order=order, dtype=dtype, kv_dtype=kv_dtype, threads=threads)
    each = -(-context // 16)
    pages = (torch.randperm(rows * each, generator=torch.Generator().manual_seed(0)) + 1).tolist()
    geometry = KVGeometry(
        num_pages=rows * each + 1, page_size=16, num_layers=1, num_kv_heads=3, head_dim=64, dtype=kv_dtype, order=order
    )
    pool = TokenToKVPool(geometry, device=torch.device("cpu"))
    pool.pages(0).normal_()
    backend = setup.backend(pool, SMOLLM2)
    batch = make_batch(
        [Row(ids=range(context), pages=pages[i * each : (i + 1) * each], kv_len=context - tokens) for i in range(rows)],
        [tokens] * rows,
        translator=IndexTranslator((pool,)),
    )
    queries = torch.randn(rows * tokens, SMOLLM2.queries, SMOLLM2.dim)
    keys, values = torch.randn(2, rows * tokens, SMOLLM2.keys, SMOLLM2.dim)

    def call():
        with torch.inference_mode():
            begin = time.perf_counter()
            backend.run(queries, keys, values, layer=0, metadata=backend.plan(batch))
            return time.perf_counter() - begin

    return call


@pytest.mark.parametrize(("phase", "rows", "tokens", "context"), CASES)
def test_one_layer(threads, capsys, phase, rows, tokens, context):
    calls = {name: layer_call(name, threads, rows=rows, tokens=tokens, context=context) for name in BACKENDS}
    seconds: dict[str, list[float]] = {name: [] for name in BACKENDS}
    for call in calls.values():
        call()
    psutil.cpu_percent()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            seconds[name] += [call() for _ in range(CALLS)]
    native, busy = seconds["native"], psutil.cpu_percent()
    with capsys.disabled():
        print(f"\n{phase}, {rows} rows of {tokens} tokens at context {context}, {THREADS} threads; CPU {busy:.0f} %")
        for name, theirs in seconds.items():
            ratio, best = statistics.median(theirs) / statistics.median(native), min(theirs) / min(native)
            print(f"    {name}: {1e3 * statistics.median(theirs):.2f} ms, {ratio:.2f} x native (best {best:.2f})")
