"""What every attention back-end owes, alone and beside another one on the same pool. A new one joins `SETUPS`."""

import pytest
import torch

from protos.wire.enums import ForwardMode
from tests.support.attention_cases import LAYER, PLANS, Heads, Step, planned
from tests.support.attention_setups import KEEPS_BITS, names_of
from worker_svc.batch.forward_batch import PaddedShape
from worker_svc.batch.sink_batch import sink_batch

HEADS = {
    "grouped": Heads(),
    "one KV head": Heads(queries=4, keys=1),
    "as many KV heads": Heads(queries=3, keys=3, dim=64),
    "SmolLM2": Heads(queries=9, keys=3, dim=64),
    "wide": Heads(queries=4, keys=1, dim=256),
}
every_setup = pytest.mark.parametrize("setup", names_of(), indirect=True)
every_plan = pytest.mark.parametrize("plan", PLANS)


def computed(setup, step, *, fill=0.0):
    pool = setup.pool(fill, heads=step.heads, page_size=step.page_size)
    step.store(pool)
    return step.run(setup.backend(pool, step.heads), pool)


@every_plan
@every_setup
def test_it_equals_dense_attention_whatever_the_rows(setup, plan):
    step = planned(plan, dtype=setup.dtype)
    found = computed(setup, step, fill=7.0)
    assert found.dtype == setup.dtype
    known = step.dense(kv_dtype=setup.kv_dtype)
    torch.testing.assert_close(found.double(), known, atol=setup.tolerance, rtol=setup.tolerance)


@pytest.mark.parametrize("plan", ["mixed", "decode"])
@pytest.mark.parametrize("heads", HEADS)
@every_setup
def test_any_grouping_of_heads_is_computed(setup, heads, plan):
    step = planned(plan, heads=HEADS[heads], dtype=setup.dtype)
    known = step.dense(kv_dtype=setup.kv_dtype)
    torch.testing.assert_close(computed(setup, step).double(), known, atol=setup.tolerance, rtol=setup.tolerance)


@pytest.mark.parametrize("page_size", [1, 8, 32])
@pytest.mark.parametrize("setup", names_of(without=("native",)), indirect=True)
def test_pages_of_any_size_are_read(setup, page_size):
    step = planned("mixed", page_size=page_size, dtype=setup.dtype)
    found = computed(setup, step, fill=float("nan"))
    known = step.dense(kv_dtype=setup.kv_dtype)
    torch.testing.assert_close(found.double(), known, atol=setup.tolerance, rtol=setup.tolerance)


@pytest.mark.parametrize("window", [1, 10, 64, 70])
@every_plan
@every_setup
def test_a_window_hides_what_lies_before_it_whether_pages_of_that_are_kept_or_not(setup, plan, window):
    step = planned(plan, dtype=setup.dtype)
    known = step.dense(window=window, kv_dtype=setup.kv_dtype)
    found = []
    for keeps_all in (False, True):
        pool = setup.pool(float("nan"), window_tokens=window, keeps_all=keeps_all)
        step.store(pool)
        found.append(step.run(setup.backend(pool), pool))
    torch.testing.assert_close(found[0].double(), known, atol=setup.tolerance, rtol=setup.tolerance)
    assert torch.equal(*found)


@every_plan
@every_setup
def test_pages_wholly_before_the_window_may_be_gone(setup, plan):
    """They are not listed, and whoever has them now may have written NaN."""
    window = 20
    step = planned(plan, dtype=setup.dtype)
    pool = setup.pool(float("nan"), window_tokens=window)
    step.store(pool)
    step.forget_before(window)
    for page in step.forgotten:
        pool.keys(LAYER)[:, page] = pool.values(LAYER)[:, page] = float("nan")
    found = step.run(setup.backend(pool), pool)
    known = step.dense(window=window, kv_dtype=setup.kv_dtype)
    torch.testing.assert_close(found.double(), known, atol=setup.tolerance, rtol=setup.tolerance)


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), -1e4])
@every_plan
@every_setup
def test_unused_slots_and_the_sink_never_reach_an_output(setup, plan, fill):
    known = computed(setup, planned(plan, dtype=setup.dtype))
    assert torch.equal(computed(setup, planned(plan, dtype=setup.dtype), fill=fill), known)


@every_setup
def test_slots_past_the_length_on_the_rows_last_page_never_reach_an_output(setup):
    """What a longer sequence left there before, the worst case of a page that is used again."""
    step = planned("mixed", dtype=setup.dtype)
    known = computed(setup, step)
    pool = setup.pool(0.0)
    for row, total in zip(step.rows, step.totals, strict=True):
        for view in (pool.keys(LAYER), pool.values(LAYER)):
            view[:, row.pages[-1], (total - 1) % 16 + 1 :] = float("nan")
    step.store(pool)
    assert torch.equal(step.run(setup.backend(pool), pool), known)


@every_setup
def test_keys_and_values_are_stored_in_the_rows_pages_only(setup):
    step = planned("mixed", dtype=setup.dtype)
    pool = setup.pool(7.0)
    step.store(pool)
    step.run(setup.backend(pool), pool)
    heads = step.heads
    for row, keys, values in zip(step.rows, step.keys, step.values, strict=True):
        for view, known in ((pool.keys(LAYER), keys), (pool.values(LAYER), values)):
            stored = view[:, row.pages].cpu().reshape(heads.keys, -1, heads.dim)
            assert torch.equal(stored[:, : len(known)].transpose(0, 1), known.to(setup.kv_dtype))
            assert (stored[:, len(known) :] == 7.0).all()
    assert (pool.keys(LAYER)[:, 0] == 7.0).all()
    assert (pool.pages(0) == 7.0).all()


@every_setup
def test_tokens_that_write_to_the_sink_disturb_nobody(setup):
    step = planned("decode", dtype=setup.dtype)
    pool = setup.pool(0.0)
    step.store(pool)
    known = step.run(setup.backend(pool), pool)
    nothing = torch.full((3, step.heads.keys, step.heads.dim), float("nan"), device=setup.device)
    pool.write(LAYER, slots=nothing.new_zeros(3, dtype=torch.int64), keys=nothing, values=nothing)
    assert torch.equal(step.run(setup.backend(pool), pool), known)


@every_setup
def test_a_poisoned_row_stays_alone(setup):
    step = planned("mixed", dtype=setup.dtype)
    known = computed(setup, step)
    step.values[1][0] = float("nan")
    found = computed(setup, step)
    assert found[1:41].isnan().any()
    assert torch.equal(found[:1], known[:1])
    assert torch.equal(found[41:], known[41:])


@pytest.mark.parametrize(
    ("plan", "rows", "tokens"), [("mixed", 8, 64), ("decode", 8, 8), ("chunks", 3, 96), ("empty rows", 4, 20)]
)
@every_setup
def test_padding_rows_and_tokens_change_no_real_output(setup, plan, rows, tokens):
    step = planned(plan, dtype=setup.dtype)
    known = computed(setup, step)
    pool = setup.pool(float("nan"), heads=step.heads)
    step.store(pool)
    found = step.run(
        setup.backend(pool, step.heads), pool, padded=PaddedShape(num_reqs=rows, num_tokens=tokens, num_logits=rows)
    )
    torch.testing.assert_close(found, known, atol=setup.tolerance, rtol=setup.tolerance)


@pytest.mark.parametrize("window", [0, 20])
@every_setup
def test_a_plan_at_fixed_addresses_gives_every_decode_step_what_its_own_plan_gives(setup, window):
    pool = setup.pool(float("nan"), window_tokens=window)
    backend, shape = setup.backend(pool), PaddedShape(num_reqs=8, num_tokens=8, num_logits=8)
    if (why := backend.why_not_fixed(ForwardMode.DECODE, max_reqs=8)) is not None:
        assert "addresses" in why
        return
    example = sink_batch(ForwardMode.DECODE, num_sub_pools=1, device=torch.device(setup.device)).pad(shape)
    plan = backend.fixed_plan(example)
    metadata = plan.metadata
    for prefixes in ([0, 15, 16, 63, 64, 200], [250], [3, 31, 130, 7, 47, 48, 80, 95]):
        step = Step(prefixes=prefixes, lens=[1] * len(prefixes), dtype=setup.dtype, seed=len(prefixes))
        step.store(pool)
        if window:
            step.forget_before(window)
        plan.fill(step.batch(pool).pad(shape))
        assert plan.metadata is metadata
        tensors = step.new_tensors(device=pool.keys(LAYER).device, padding=8 - len(prefixes))
        found = backend.run(*tensors, layer=LAYER, metadata=metadata)[: len(prefixes)].cpu()
        known = step.dense(window=window, kv_dtype=setup.kv_dtype)
        torch.testing.assert_close(found.double(), known, atol=setup.tolerance, rtol=setup.tolerance)


@every_setup
def test_nothing_of_a_step_shares_storage_with_the_pool(setup):
    step = planned("decode", dtype=setup.dtype)
    pool = setup.pool(0.0)
    step.store(pool)
    found = step.run(setup.backend(pool), pool)
    known = found.clone()
    pool.pages(LAYER).fill_(float("nan"))
    assert torch.equal(found, known)


@pytest.mark.parametrize("chunk", [1, 7, 16, 40])
@pytest.mark.parametrize("setup", KEEPS_BITS, indirect=True)
def test_chunks_and_decode_steps_give_the_bits_of_one_prefill(setup, chunk):
    length = 100
    known = computed(setup, Step(prefixes=[0], lens=[length]))
    pool = setup.pool(float("nan"))
    for begin in range(0, length, chunk):
        step = Step(prefixes=[begin], lens=[min(chunk, length - begin)])
        whole = Step(prefixes=[0], lens=[length])
        for part in ("keys", "values", "queries"):
            getattr(step, part)[0] = getattr(whole, part)[0][: begin + step.lens[0]]
        step.rows[0].pages = whole.rows[0].pages
        found = step.run(setup.backend(pool), pool)
        assert torch.equal(found, known[begin : begin + step.lens[0]])


@pytest.mark.parametrize("setup", KEEPS_BITS, indirect=True)
def test_a_row_has_the_same_bits_alone_and_beside_others(setup):
    together = planned("mixed")
    known = computed(setup, together)
    begin = 0
    for index, count in enumerate(together.lens):
        alone = Step(prefixes=[together.prefixes[index]], lens=[count])
        for part in ("keys", "values", "queries"):
            setattr(alone, part, [getattr(together, part)[index]])
        assert torch.equal(computed(setup, alone), known[begin : begin + count])
        begin += count


@every_setup
def test_what_prefill_wrote_decode_reads(setup):
    """A prompt in two chunks, then single tokens: the one back-end writes what the other reads."""
    whole = Step(prefixes=[0], lens=[50], dtype=setup.dtype)
    known = whole.dense(kv_dtype=setup.kv_dtype)
    pool = setup.pool(float("nan"))
    backend = setup.backend(pool)
    begin = 0
    for count in (23, 25, 1, 1):
        step = Step(prefixes=[begin], lens=[count], dtype=setup.dtype)
        for part in ("keys", "values", "queries"):
            setattr(step, part, [getattr(whole, part)[0][: begin + count]])
        step.rows[0].pages = whole.rows[0].pages
        found = step.run(backend, pool)
        wanted = known[begin : begin + count]
        torch.testing.assert_close(found.double(), wanted, atol=setup.tolerance, rtol=setup.tolerance)
        begin += count
