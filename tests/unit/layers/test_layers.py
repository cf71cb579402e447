import pytest
import torch

from worker_svc.layers.mlp import GatedMlp
from worker_svc.layers.norm import RmsNorm
from worker_svc.layers.rotary import RotaryTable, inverse_frequencies, rotate
from worker_svc.numerics import FastNumerics, ReproducibleNumerics

CPU = torch.device("cpu")


def test_norm_scales_to_unit_size_and_gives_the_asked_dtype():
    hidden, weight = torch.randn(5, 48) * 9, torch.rand(48)
    found = RmsNorm(weight, epsilon=1e-5, dtype=torch.bfloat16)(hidden)
    known = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, RmsNorm(weight, epsilon=1e-5, dtype=torch.float32)(hidden).bfloat16())
    torch.testing.assert_close(found.float(), known, atol=0, rtol=0.01)


def table() -> RotaryTable:
    return RotaryTable(inverse_frequencies(16, base=10_000.0), num_positions=64, device=CPU)


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    query, key = torch.randn(1, 2, 16), torch.randn(1, 2, 16)

    def score(at: int, other: int) -> torch.Tensor:
        turned = rotate(query, *table().at(torch.tensor([at])))
        return (turned * rotate(key, *table().at(torch.tensor([other])))).sum(-1)

    torch.testing.assert_close(score(9, 4), score(60, 55), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(score(9, 4), score(9, 5))
    turned = rotate(query, *table().at(torch.tensor([31])))
    torch.testing.assert_close(turned.norm(dim=-1), query.norm(dim=-1))


def test_position_zero_is_not_turned():
    heads = torch.randn(1, 2, 16)
    assert torch.equal(rotate(heads, *table().at(torch.tensor([0]))), heads)


@pytest.mark.parametrize("numerics", [FastNumerics(), ReproducibleNumerics()])
def test_the_gated_layer_computes_its_formula(numerics):
    hidden = torch.randn(7, 48)
    gate, up, down = torch.randn(80, 48), torch.randn(80, 48), torch.randn(48, 80)
    layer = GatedMlp(
        gate_up=numerics.product(torch.cat((gate, up))), down=numerics.product(down), gated=numerics.gated_silu
    )
    inner = torch.nn.functional.silu(hidden @ gate.T) * (hidden @ up.T)
    torch.testing.assert_close(layer(hidden), inner @ down.T, atol=2e-3, rtol=1e-4)
