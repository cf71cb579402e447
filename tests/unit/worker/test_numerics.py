import pytest
import torch

from protos.wire.errors import UnsupportedFeature
from worker_svc.numerics import (
    CHECKED_ROWS,
    FastNumerics,
    PaddedProduct,
    ReproducibleNumerics,
    check_rows,
    numerics_by_name,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [None, torch.randn(30)])
@pytest.mark.parametrize("numerics", [ReproducibleNumerics(), FastNumerics()])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
def test_a_product_is_the_linear_map(numerics, count, bias):
    rows, weight = torch.randn(count, 64), torch.randn(30, 64)
    found = numerics.product(weight, bias)(rows)
    known = rows.double() @ weight.double().T + (0 if bias is None else bias)
    assert found.shape == (count, 30)
    torch.testing.assert_close(found.double(), known, atol=1e-4, rtol=0)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [(960, 576), (576, 1536), (48, 80), (33, 48)])
def test_padded_products_do_not_depend_on_the_number_of_rows(threads, size):
    torch.set_num_threads(threads)
    rows, product = torch.randn(300, size[1]), PaddedProduct(torch.randn(size), None)
    known = product(rows)
    for count in (*CHECKED_ROWS, 100, 257):
        assert torch.equal(product(rows[300 - count :]), known[300 - count :])
    torch.set_num_threads(1)


@pytest.mark.parametrize("activation", ["gated_silu", "gated_gelu"])
def test_the_activation_does_not_depend_on_the_number_of_rows(activation):
    gated, rows = getattr(ReproducibleNumerics(), activation), torch.randn(300, 2 * 77) * 5
    known = gated(rows)
    for count in CHECKED_ROWS:
        assert torch.equal(gated(rows[300 - count :]), known[300 - count :])


@pytest.mark.parametrize("numerics", [ReproducibleNumerics(), FastNumerics()])
def test_gelu_is_its_tanh_form(numerics):
    gate, up = torch.linspace(-9, 9, 200)[None], torch.randn(1, 200)
    known = torch.nn.functional.gelu(gate.double(), approximate="tanh") * up
    torch.testing.assert_close(numerics.gated_gelu(torch.cat((gate, up), 1)).double(), known, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("numerics", [ReproducibleNumerics(), FastNumerics()])
@pytest.mark.parametrize("activation", ["gated_silu", "gated_gelu"])
def test_the_activation_survives_extreme_gates(numerics, activation):
    gate_up = torch.tensor([[-200.0, 200.0, 0.0, -1e20, 2.0, 3.0, 4.0, 5.0]])
    torch.testing.assert_close(getattr(numerics, activation)(gate_up), torch.tensor([[0.0, 600.0, 0.0, 0.0]]))


def test_norms_of_a_width_are_proved_once_and_fast_numerics_promise_nothing():
    numerics = ReproducibleNumerics()
    numerics.check_norm(256)
    numerics.check_norm(256)
    FastNumerics().check_norm(256)


def test_a_cpu_on_which_rows_differ_is_refused():
    def unsteady(rows: torch.Tensor) -> torch.Tensor:
        return rows + (1e-6 if len(rows) < 12 else 0)

    with pytest.raises(UnsupportedFeature, match=r"a sum gives other bits for 1 rows .* use numerics fast"):
        check_rows(unsteady, width=8, what="a sum")


def test_a_cpu_on_which_places_differ_is_refused():
    def unsteady(rows: torch.Tensor) -> torch.Tensor:
        return rows + torch.arange(len(rows))[:, None] * 1e-6

    with pytest.raises(UnsupportedFeature):
        check_rows(unsteady, width=8, what="a sum")


@pytest.mark.parametrize(
    ("name", "dtype", "device", "message"),
    [
        ("exact", torch.float32, "cpu", "numerics is 'exact', known: fast, reproducible"),
        ("reproducible", torch.bfloat16, "cpu", "need dtype float32, it is bfloat16"),
        ("reproducible", torch.float32, "cuda", "need device cpu, it is cuda"),
    ],
)
def test_what_cannot_be_kept_is_not_promised(name, dtype, device, message):
    with pytest.raises(UnsupportedFeature, match=message):
        numerics_by_name(name, dtype=dtype, device=torch.device(device))


def test_known_names():
    assert isinstance(numerics_by_name("fast", dtype=torch.bfloat16, device=CPU), FastNumerics)
    assert isinstance(numerics_by_name("reproducible", dtype=torch.float32, device=CPU), ReproducibleNumerics)
