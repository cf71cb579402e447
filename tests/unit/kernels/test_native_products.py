"""Products on quantised weights: against a reference, and the same bits in any company."""

import numpy as np
import pytest

from kernels.errors import KernelError, KernelStatus
from kernels.native_ops import linear
from kernels.native_types import Variant
from kernels.reference.quantised import dequantise
from kernels.reference.quantised import linear as reference_linear
from tests.support.native_cases import BLOCKS, Q4_1, Q5_0, Q8_0, raw_matrix

NIBBLES = {2, 3, 12}
INTEGER = [Variant.AVX2, Variant.AVX512_VNNI]
N = 41
"""Not a multiple of a panel."""


def need(native, variant):
    if not native.supports(variant):
        pytest.skip(f"this machine lacks {variant.name}")


def case(tensor_type, num_rows, k=512):
    rng = np.random.default_rng(tensor_type)
    x = rng.normal(size=(num_rows, k)).astype(np.float32)
    x[0, 32:64] = 0
    return x, raw_matrix(rng, tensor_type, N, k)


@pytest.mark.parametrize("tensor_type", BLOCKS)
@pytest.mark.parametrize("variant", INTEGER)
def test_a_product_is_that_of_rounded_activations(native, pool, variant, tensor_type):
    need(native, variant)
    x, raw = case(tensor_type, 13)
    weights = dequantise(raw, tensor_type, (N, x.shape[1]))

    got = linear(pool, x, raw, tensor_type=tensor_type, num_outputs=N, variant=variant)

    expected = reference_linear(x, weights, levels=127 if tensor_type in NIBBLES else 32767)
    np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("tensor_type", BLOCKS)
def test_the_check_variant_rounds_nothing(pool, tensor_type):
    x, raw = case(tensor_type, 3)
    expected = x @ dequantise(raw, tensor_type, (N, x.shape[1])).T

    got = linear(pool, x, raw, tensor_type=tensor_type, num_outputs=N, variant=Variant.CHECK)

    np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("tensor_type", BLOCKS)
@pytest.mark.parametrize("variant", INTEGER)
def test_a_row_has_the_same_bits_in_any_batch(native, pool, variant, tensor_type):
    need(native, variant)
    x, raw = case(tensor_type, 64, k=1024)
    run = {"tensor_type": tensor_type, "num_outputs": N, "variant": variant}
    alone = np.concatenate([linear(pool, x[i : i + 1], raw, **run) for i in range(64)])

    for size in (2, 3, 5, 7, 8, 9, 16, 33, 64):
        assert np.array_equal(linear(pool, x[:size], raw, **run), alone[:size]), size


@pytest.mark.parametrize("tensor_type", BLOCKS)
def test_instruction_sets_give_the_same_bits(native, pool, tensor_type):
    need(native, Variant.AVX512_VNNI)
    x, raw = case(tensor_type, 11, k=1792)
    run = {"tensor_type": tensor_type, "num_outputs": N}

    narrow = linear(pool, x, raw, variant=Variant.AVX2, **run)

    assert np.array_equal(linear(pool, x, raw, variant=Variant.AVX512_VNNI, **run), narrow)


@pytest.mark.parametrize("variant", INTEGER)
def test_the_largest_integers_do_not_overflow(native, pool, variant):
    """A block of 32 products of 15 * 127 is the most that int16 sums must hold."""
    need(native, variant)
    raw = raw_matrix(np.random.default_rng(0), Q4_1, N, 64).reshape(-1, 20)
    raw[:, 4:] = 0xFF
    x = np.full((9, 64), 3, np.float32)
    weights = dequantise(raw, Q4_1, (N, 64))

    got = linear(pool, x, raw, tensor_type=Q4_1, num_outputs=N, variant=variant)

    np.testing.assert_allclose(got, x @ weights.T, rtol=1e-5)


def test_the_minimum_is_multiplied_by_the_sum_of_rounded_activations(pool):
    """With the exact sum instead, the rounding of the activations would not cancel in a matrix of equal weights."""
    raw = raw_matrix(np.random.default_rng(0), Q4_1, 16, 32).reshape(-1, 20)
    raw[:, 0:2] = np.float16(0.5).reshape(1).view(np.uint8)
    raw[:, 2:4] = np.float16(-4).reshape(1).view(np.uint8)
    raw[:, 4:] = 0x88
    x = np.random.default_rng(1).normal(size=(1, 32)).astype(np.float32)

    got = linear(pool, x, raw, tensor_type=Q4_1, num_outputs=16, variant=Variant.AVX2)

    np.testing.assert_allclose(got, 0, atol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("tensor_type", [Q4_1, Q8_0])
def test_a_broken_row_stays_broken_and_alone(pool, tensor_type, value):
    x, raw = case(tensor_type, 5)
    whole = linear(pool, x, raw, tensor_type=tensor_type, num_outputs=N)
    x[2, 70] = value

    got = linear(pool, x, raw, tensor_type=tensor_type, num_outputs=N)

    assert not np.isfinite(got[2]).any()
    others = [0, 1, 3, 4]
    assert np.array_equal(got[others], whole[others])


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"tensor_type": 99}, KernelStatus.UNSUPPORTED, "type 99"),
        ({"num_outputs": 40}, KernelStatus.INVALID, "bytes, must have"),
        ({"tensor_type": 0}, KernelStatus.INVALID, "bytes, must have"),
    ],
)
def test_a_matrix_that_does_not_fit_is_refused(pool, change, status, message):
    x, raw = case(Q5_0, 1)

    with pytest.raises(KernelError, match=message) as caught:
        linear(pool, x, raw, **{"tensor_type": Q5_0, "num_outputs": N, **change})

    assert caught.value.status is status
