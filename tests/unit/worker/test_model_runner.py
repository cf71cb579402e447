import pytest
import torch

from protos.wire.errors import InternalFault
from tests.support.forwards import ForwardDriver
from tests.support.tiny_llama import tiny_folder
from worker_svc.kv.sub_pools import LayerPlace


@pytest.fixture
def driver(tmp_path):
    torch.set_num_threads(1)
    return ForwardDriver(tiny_folder(tmp_path))


def test_gives_the_last_hidden_state_of_every_row_and_the_wanted_logits(driver):
    rows = [driver.row(range(10, 10 + length)) for length in (5, 1, 20)]
    output = driver.step(rows, [5, 1, 20])

    assert output.last_hidden.shape == (3, 48)
    assert output.logits.shape == (3, 300)
    assert output.logits.dtype == torch.float32
    assert output.finite.tolist() == [True] * 3
    torch.testing.assert_close(driver.loaded.model.logits(output.last_hidden), output.logits)


def test_the_finite_flag_tells_a_poisoned_row_from_its_neighbours(driver):
    rows = [driver.row(range(length)) for length in (20, 20, 20)]
    driver.step(rows, [19, 19, 19])
    driver.pool.values(0)[:, rows[1].pages[0], 3] = float("nan")

    output = driver.step(rows, [1, 1, 1])

    assert output.finite.tolist() == [True, False, True]


def test_attention_outside_a_forward_raises(driver):
    empty = torch.empty(0, 6, 16)
    with pytest.raises(InternalFault, match="outside a bound forward"):
        driver.context.attend(empty, empty, empty, place=LayerPlace(0, 0))


def test_a_failed_forward_leaves_nothing_bound(driver):
    row = driver.row([999_999])
    with pytest.raises((IndexError, RuntimeError)):
        driver.step([row], [1])
    with pytest.raises(InternalFault):
        driver.context.attend(torch.empty(0), torch.empty(0), torch.empty(0), place=LayerPlace(0, 0))


def test_results_are_owned_by_the_caller(driver):
    first = driver.step([driver.row([1, 2])], [2])
    kept = first.logits.clone()
    driver.step([driver.row([3, 4, 5])], [3])
    assert torch.equal(first.logits, kept)
