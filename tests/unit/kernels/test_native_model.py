"""A small decoder of random weights: against the plain reference, and equal bits on every path."""

from dataclasses import replace

import numpy as np
import pytest

from kernels.errors import KernelError
from kernels.native_spec import LayerSpec, role_of
from kernels.native_types import Activation, Variant
from kernels.reference.decoder import logits as reference_logits
from tests.support.native_cases import (
    Q4_0,
    Q4_1,
    Q5_0,
    Q8_0,
    by_role,
    sequences,
    small_model,
    small_spec,
    small_weights,
    step_input,
)

BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
GEMMA_PARTS = ("attn_q_norm.weight", "attn_k_norm.weight", "post_attention_norm.weight", "post_ffw_norm.weight")
GEMMA = {
    "layers": (LayerSpec(group=1, window=20, rope=1), LayerSpec()),
    "rope_thetas": (1_000_000.0, 10_000.0),
    "rope_interleaved": False,
    "activation": Activation.GELU_TANH,
    "embedding_scale": 9.5,
}
FAMILIES = {
    "llama": ({}, (), Q4_1),
    "qwen2": ({"rope_interleaved": False}, BIASES, Q4_0),
    "qwen3": ({"rope_interleaved": False, "num_q_heads": 2}, GEMMA_PARTS[:2], Q8_0),
    "gemma3": (GEMMA, GEMMA_PARTS, Q5_0),
}
IDS = np.random.default_rng(11).integers(0, 203, 120)


@pytest.fixture(scope="module")
def model(pool):
    spec = small_spec()
    with small_model(pool, spec, small_weights(spec)) as made:
        yield made


def prefill(model, ids, **how):
    (seq,) = sequences(1, 20)
    step = step_input([(seq, ids)], num_groups=model.spec.num_groups, out_tokens=range(len(ids)), **how)
    return model.step(step)


@pytest.mark.parametrize("name", FAMILIES)
def test_float_activations_agree_with_the_reference(pool, name):
    changes, extras, matrix_type = FAMILIES[name]
    spec = small_spec(**changes)
    weights = small_weights(spec, extras=extras, matrix_type=matrix_type)
    expected = reference_logits(spec, by_role(spec, weights, role_of), IDS)

    with small_model(pool, spec, weights, variant=Variant.CHECK) as model:
        output = prefill(model, IDS)

    error = np.abs(output.logits - expected).max() / np.abs(expected).max()
    assert error < 2e-3  # keys and values are kept in fp16
    assert np.array_equal(output.best_ids, output.logits.argmax(-1))


@pytest.mark.parametrize("name", FAMILIES)
def test_rounded_activations_stay_close(pool, name):
    changes, extras, matrix_type = FAMILIES[name]
    spec = small_spec(**changes)
    weights = small_weights(spec, extras=extras, matrix_type=matrix_type)
    expected = reference_logits(spec, by_role(spec, weights, role_of), IDS)

    with small_model(pool, spec, weights) as model:
        output = prefill(model, IDS)

    assert np.sqrt(np.square(output.logits - expected).mean() / np.square(expected).mean()) < 0.05


def test_a_step_by_phase_has_the_bits_of_one_call(model):
    (seq,) = sequences(1, 20)
    step = step_input([(seq, IDS)], out_tokens=range(len(IDS)))
    whole, eager = model.step(step), model.step_by_phase(step)

    for name in ("best_ids", "best_logits", "logits", "last_hidden", "finite"):
        assert np.array_equal(getattr(whole, name), getattr(eager, name)), name
    assert model.num_phases == 2 + 5 * len(model.spec.layers)


@pytest.mark.parametrize("chunk", [1, 7, 13, 20])
def test_chunks_give_the_bits_of_one_prefill(model, chunk):
    whole = prefill(model, IDS).logits
    (seq,) = sequences(1, 20)

    for begin in range(0, len(IDS), chunk):
        ids = IDS[begin : begin + chunk]
        got = model.step(step_input([(seq, ids)], out_tokens=range(len(ids))))
        assert np.array_equal(got.logits, whole[begin : begin + len(ids)]), begin


@pytest.mark.parametrize("size", [2, 3, 5, 8, 16, 64])
def test_a_row_has_the_same_bits_in_any_batch(model, size):
    lengths = [1 + (7 * row) % 31 for row in range(size)]
    prompts = [np.roll(IDS, row)[:length] for row, length in enumerate(lengths)]
    rows = list(zip(sequences(size, 3), prompts, strict=True))
    model.step(step_input(rows[: size // 2]))
    mixed = [(seq, [5]) for seq, _ in rows[: size // 2]] + [(seq, ids[:4]) for seq, ids in rows[size // 2 :]]

    together = model.step(step_input(mixed))

    for row, (prompt, (_, ids)) in enumerate(zip(prompts, mixed, strict=True)):
        (alone,) = sequences(1, 3)
        before = prompt if row < size // 2 else ()
        got = model.step(step_input([(alone, [*before, *ids])]))
        assert np.array_equal(got.logits[0], together.logits[row]), row
        assert np.array_equal(got.last_hidden[0], together.last_hidden[row]), row


def test_threads_and_instruction_sets_change_no_bit(native, lone_pool, model):
    expected = prefill(model, IDS).logits
    for variant in (Variant.AVX2, Variant.AVX512_VNNI):
        if not native.supports(variant):
            continue
        with small_model(lone_pool, model.spec, small_weights(model.spec), variant=variant) as other:
            assert np.array_equal(prefill(other, IDS).logits, expected), variant


def test_nan_in_unused_slots_and_in_the_sink_changes_no_bit(model):
    expected = prefill(model, IDS).logits
    pages = model.kv_pages()
    pages[:] = np.nan
    try:
        assert np.array_equal(prefill(model, IDS).logits, expected)
    finally:
        pages[:] = 0


def test_the_sink_is_not_written(model):
    (seq,) = sequences(1, 3)
    step = step_input([(seq, IDS[:5])])
    step.pages[0].out_cache_loc[:] = np.arange(5)

    model.step(step)

    assert not model.kv_pages()[:, 0].any()


def test_a_row_of_nan_is_flagged_and_leaves_the_others_alone(model):
    (twin,) = sequences(1, 3)
    expected = model.step(step_input([(twin, IDS[:21])])).logits[0]
    good, bad = sequences(2, 3)
    model.step(step_input([(good, IDS[:20]), (bad, IDS[20:40])]))
    model.kv_pages()[0, bad.pages[0]] = np.nan

    output = model.step(step_input([(good, IDS[20:21]), (bad, IDS[40:41])]))

    assert output.finite.tolist() == [True, False]
    assert np.isnan(output.best_logits).tolist() == [False, True]
    assert np.array_equal(output.logits[0], expected)


@pytest.mark.parametrize("broken_id", [0, 5, 202])
def test_one_logit_of_nan_shows_in_the_choice(pool, broken_id):
    spec = small_spec()
    weights = small_weights(spec)
    table = weights["token_embd.weight"].data.reshape(spec.vocab_size, -1)
    table[broken_id, :2] = np.array([np.nan], np.float16).view(np.uint8)
    with small_model(pool, spec, weights) as model:
        output = prefill(model, [1, 2, 3])
    assert np.isnan(output.logits).sum(-1).tolist() == [1, 1, 1]
    assert np.isnan(output.best_logits).all()


def test_trimmed_window_pages_give_the_same_bits(pool):
    spec = small_spec(**GEMMA)
    with small_model(pool, spec, small_weights(spec, extras=GEMMA_PARTS)) as model:
        whole = prefill(model, IDS).logits
        (seq,) = sequences(1, 20)
        model.step(step_input([(seq, IDS[:100])], num_groups=2))
        got = model.step(step_input([(seq, IDS[100:])], num_groups=2, out_tokens=range(20), starts=[80]))

    assert np.array_equal(got.logits, whole[100:])


def test_equal_logits_choose_the_lowest_id(pool):
    spec = small_spec(vocab_size=64)
    weights = small_weights(spec)
    table = weights["token_embd.weight"].data.reshape(64, -1)
    table[:] = table[3]
    with small_model(pool, spec, weights) as model:
        assert prefill(model, [1, 2, 3]).best_ids.tolist() == [0, 0, 0]


def test_only_wanted_logits_are_written(model):
    (seq,) = sequences(1, 3)
    step = step_input([(seq, IDS[:6])], out_tokens=[1, 3, 5])
    step.wants_logits[:] = [False, True, False]

    output = model.step(step)

    assert output.logits.shape == (1, model.spec.vocab_size)
    assert output.logits[0].argmax() == output.best_ids[1]
    assert output.logits[0].max() == output.best_logits[1]


def test_a_step_without_wanted_tokens_is_a_prefill_chunk(model):
    (seq,) = sequences(1, 3)
    output = model.step(step_input([(seq, IDS[:6])], out_tokens=[]))

    assert output.best_ids.size == 0
    assert output.finite.tolist() == [True]


BAD_STEPS = {
    "input_ids": (2, 203, r"input_ids\[2\] is 203, must be 0 to 202"),
    "positions": (1, 7, r"positions\[1\] is 7, must be 1 to 1"),
    "seq_lens": (0, 600, r"seq_lens\[0\] is 600, must be 1 to 512"),
    "out_tokens": (0, 6, r"out_tokens\[0\] is 6, must be 0 to 5"),
    "qo_indptr": (1, 5, r"qo_indptr\[1\] is 5, must be 6 to 6"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_value_out_of_range_is_refused(model, name):
    at, value, message = BAD_STEPS[name]
    step = step_input([(sequences(1, 3)[0], IDS[:6])])
    getattr(step, name)[at] = value

    with pytest.raises(KernelError, match=message):
        model.step(step)


@pytest.mark.parametrize(
    ("name", "value"), [("kv_indices", 200), ("kv_indices", -1), ("out_cache_loc", 3200), ("out_cache_loc", -1)]
)
def test_a_page_out_of_range_is_refused(model, name, value):
    step = step_input([(sequences(1, 3)[0], IDS[:6])])
    getattr(step.pages[0], name)[0] = value

    with pytest.raises(KernelError, match=rf"{name}\[0\] is {value}"):
        model.step(step)


def test_a_step_beyond_the_limits_is_refused(model):
    ids = np.zeros(513, np.int32)

    with pytest.raises(KernelError, match="num_tokens is 513, must be 1 to 512"):
        model.step(step_input([(sequences(1, 33)[0], ids)], out_tokens=[0]))


def test_arrays_that_do_not_fit_each_other_are_refused(model):
    step = step_input([(sequences(1, 3)[0], IDS[:6])])
    short = type(step)(**{**{name: getattr(step, name) for name in step.__slots__}, "positions": step.positions[:3]})

    with pytest.raises(KernelError, match=r"positions has shape \(3,\), must be \(6,\)"):
        model.step(short)


def test_a_missing_tensor_is_named(pool):
    spec = small_spec()
    weights = small_weights(spec)
    del weights["blk.1.ffn_up.weight"]

    with pytest.raises(KernelError, match="role 14, layer 1 is missing"):
        small_model(pool, spec, weights)


def test_a_tensor_without_a_kernel_is_refused(pool):
    spec = small_spec()
    weights = small_weights(spec)
    weights["blk.0.ffn_gate_exps.weight"] = weights["blk.0.ffn_up.weight"]

    with pytest.raises(KernelError, match="ffn_gate_exps"):
        small_model(pool, spec, weights)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 48}, "head_dim is 48, must be a multiple of 32"),
        ({"num_kv_heads": 4}, "num_q_heads is 6, not a multiple of num_kv_heads 4"),
        ({"hidden_size": 100}, "hidden_size is 100"),
    ],
)
def test_a_shape_that_the_kernels_lack_is_refused(pool, changes, message):
    with pytest.raises(KernelError, match=message):
        small_model(pool, small_spec(**changes), {})


def test_every_tokens_state_is_the_one_its_logits_came_from(model):
    (seq,) = sequences(1, 20)
    step = replace(step_input([(seq, IDS)], out_tokens=range(len(IDS))), wants_all_hidden=True)
    output = model.step(step)

    assert np.array_equal(output.all_hidden[-1], output.last_hidden[0])
    for size in (1, 7, 16, len(IDS)):
        assert np.array_equal(model.logits(output.all_hidden[:size]), output.logits[:size]), size
    assert model.logits(output.all_hidden[:0]).shape == (0, model.spec.vocab_size)


def test_the_output_layer_alone_refuses_other_states(model):
    with pytest.raises(KernelError, match=r"states has shape \(2, 5\)"):
        model.logits(np.zeros((2, 5), np.float32))
    with pytest.raises(KernelError, match="num_states"):
        model.logits(np.zeros((model.limits.max_tokens + 1, model.spec.hidden_size), np.float32))


def test_reserving_pages_changes_their_number_and_no_result(pool):
    spec = small_spec(**GEMMA)
    weights = small_weights(spec, extras=GEMMA_PARTS, matrix_type=Q5_0)
    with small_model(pool, spec, weights) as plain, small_model(pool, spec, weights, num_pages=(2, 2)) as grown:
        expected = prefill(plain, IDS)
        with pytest.raises(KernelError, match="kv_indices"):
            prefill(grown, IDS)
        grown.reserve_pages((90, 33))
        assert [grown.kv_pages(group).shape[1] for group in (0, 1)] == [90, 33]
        np.testing.assert_array_equal(prefill(grown, IDS).logits, expected.logits)
        with pytest.raises(KernelError, match="num_pages is 1, must be 2 to"):
            grown.reserve_pages((90, 1))
        with pytest.raises(KernelError, match="names 1 sub-pools"):
            grown.reserve_pages((90,))
        assert grown.limits.num_pages == (90, 33)
