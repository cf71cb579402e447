"""Reproducible numerics: a row's logits have the same bits alone, in any batch, in any chunks, decoded or prefilled."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.forwards import ForwardDriver, Row
from tests.support.model import model_folder
from tests.support.tiny_llama import Shape, tiny_folder


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    torch.set_num_threads(1)
    return ForwardDriver(tiny_folder(tmp_path_factory.mktemp("tiny"), Shape()), num_pages=600)


def random_ids(seed: int, length: int, vocab: int = 300) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, length)


def run_together(driver: ForwardDriver, rows: list[Row], draw_chunk, budget: int) -> None:
    """Mixed plans: every unfinished row gets a chunk until the budget is spent, so rows drift apart."""
    while any(row.left for row in rows):
        chosen, lens, left = [], [], budget
        for row in rows:
            if row.left and left:
                chosen.append(row)
                lens.append(min(draw_chunk(), row.left, left))
                left -= lens[-1]
        driver.step(chosen, lens, all_logits=True)


@settings(max_examples=25)
@given(data=st.data())
def test_logits_of_a_row_do_not_depend_on_chunks_or_batch_mates(driver, data):
    driver.release_all()
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=12))
    budget = data.draw(st.sampled_from([1, 5, 16, 64, 2048]))
    known = [driver.all_logits(random_ids(seed, length), [length]) for seed, length in enumerate(lengths)]
    rows = [driver.row(random_ids(seed, length)) for seed, length in enumerate(lengths)]

    run_together(driver, rows, lambda: data.draw(st.sampled_from([1, 1, 3, 7, 8, 13, 64, 200])), budget)

    for row, expected in zip(rows, known, strict=True):
        assert torch.equal(torch.stack(row.logits), expected)
    driver.release(*rows)


@pytest.mark.parametrize("size", [2, 3, 5, 12, 17, 33, 64])
def test_decode_rows_equal_the_row_alone_at_every_batch_size(driver, size):
    driver.release_all()
    prompts = [random_ids(seed, 3 + seed % 70) for seed in range(size)]
    known = [driver.all_logits(prompt, [len(prompt) - 1, 1])[-1] for prompt in prompts]
    rows = [driver.row(prompt) for prompt in prompts]
    driver.step(rows, [len(prompt) - 1 for prompt in prompts])

    output = driver.step(rows, [1] * size)

    assert torch.equal(output.logits, torch.stack(known))
    driver.release(*rows)


@pytest.mark.parametrize("numerics", ["reproducible", "fast"])
def test_what_unused_slots_and_the_sink_hold_does_not_matter(tmp_path, numerics):
    driver = ForwardDriver(tiny_folder(tmp_path), numerics=numerics)
    prompts = [random_ids(seed, length) for seed, length in enumerate((1, 15, 16, 17, 40, 65))]

    def run() -> list[torch.Tensor]:
        rows = [driver.row(prompt) for prompt in prompts]
        for lens in ([1, 8, 16, 10, 33, 64], [5, 5, 1, 1]):
            chosen = [row for row in rows if row.left]
            driver.step(chosen, [min(n, row.left) for n, row in zip(lens, chosen, strict=False)], all_logits=True)
        while chosen := [row for row in rows if row.left]:
            driver.step(chosen, [1] * len(chosen), all_logits=True)
        driver.release(*rows)
        return [torch.stack(row.logits) for row in rows]

    clean = run()
    driver.poison(float("nan"))

    assert all(torch.equal(before, after) for before, after in zip(clean, run(), strict=True))
    assert all(logits.isfinite().all() for logits in clean)


@pytest.fixture(params=[1, 2])
def threads(request):
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.model
@pytest.mark.timeout(600)  # two threads wait for each other where neighbours have the cores
@pytest.mark.usefixtures("threads")
def test_the_real_model_gives_the_same_bits_in_any_batch_and_chunks():
    driver = ForwardDriver(model_folder(), num_pages=128)
    prompts = [random_ids(seed, length, 49152) for seed, length in enumerate((2, 19, 45))]
    known = [driver.all_logits(prompt, [len(prompt)]) for prompt in prompts]
    rows = [driver.row(prompt) for prompt in prompts]
    sizes = iter([1, 5, 33, 7, 1, 12, 1, 1] * 100)

    run_together(driver, rows, lambda: next(sizes), budget=40)

    for row, expected in zip(rows, known, strict=True):
        assert torch.equal(torch.stack(row.logits), expected)
