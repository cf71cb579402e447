"""What a step of native attention allocates does not grow with the context: pages are read where they lie."""

import tracemalloc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.support.attention_cases import Heads, Step
from tests.support.attention_setups import SETUPS, Setup

ROWS = 16
SMOLLM2 = Heads(queries=9, keys=3, dim=64)
SHORT, LONG = 16, 1000


def decode_step(context):
    """Sixteen rows that share their pages: what is read does not matter here."""
    step = Step(prefixes=[context - 1], lens=[1], heads=SMOLLM2)
    for name in ("rows", "prefixes", "lens", "totals", "keys", "values", "queries", "first_pages"):
        setattr(step, name, list(getattr(step, name)) * ROWS)
    return step


def measured(setup, context):
    """(bytes that Python and NumPy held at most, bytes that torch allocated) while a step was planned and run."""
    pool = setup.pool(0.5, heads=SMOLLM2)
    backend = setup.backend(pool, SMOLLM2)
    step = decode_step(context)
    batch = step.batch(pool)
    queries, keys, values = (
        torch.cat([part[-1:] for part in parts]) for parts in (step.queries, step.keys, step.values)
    )

    def run():
        backend.run(queries, keys, values, layer=1, metadata=backend.plan(batch))

    run()
    tracemalloc.start()
    run()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    grown = sum(max(0, event.self_cpu_memory_usage) for event in profiled.events())
    return peak, grown


@pytest.mark.parametrize("setup", ["native"], indirect=True)
def test_bytes_allocated_per_step_do_not_grow_with_the_context(setup):
    (short, short_torch), (long, long_torch) = measured(setup, SHORT), measured(setup, LONG)
    assert long_torch == short_torch
    assert long - short < 2_000  # of a few counters' interpreter objects, not of 16 x 1,000 slots


def test_the_gather_back_end_does_grow_which_the_measure_sees(native_threads):
    prefill, decode, order, dtype, kv_dtype = SETUPS["torch on native half pages"]
    setup = Setup(prefill=prefill, decode=decode, order=order, dtype=dtype, kv_dtype=kv_dtype, threads=native_threads)
    (_, short), (_, long) = measured(setup, SHORT), measured(setup, LONG)
    assert long - short > ROWS * (LONG - SHORT) * 2 * SMOLLM2.keys * SMOLLM2.dim * 2
