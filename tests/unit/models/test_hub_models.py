"""Small random models of every family, from folders of a model hub, against what transformers computes for them."""

import json

import numpy as np
import pytest
import torch

from protos.client.fetch_model import prepare_folder
from tests.support.forwards import ForwardDriver
from tests.support.golden import GOLDEN
from tests.support.hub_folders import hub_folder
from tests.support.hub_models import CASES, IDS, PROMPT, config_of, make_tensors, safetensors_bytes, write_hub
from tests.support.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

TOLERANCE = 1e-4
WINDOWED = [case for case in CASES if "gemma3" in case or "window" in case]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def known():
    with np.load(GOLDEN / "hub_models.npz") as stored:
        return dict(stored)


def log_probs(driver, chunks):
    return torch.log_softmax(driver.all_logits(PROMPT, chunks).double(), -1)[:, IDS].numpy()


def test_every_case_has_a_known_answer(known):
    assert set(known) == set(CASES)
    assert {config_of(case)["model_type"] for case in CASES} == {"llama", "mistral", "qwen2", "qwen3", "gemma3_text"}


@pytest.mark.parametrize("numerics", ["reproducible", "fast"])
@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_equal_those_of_transformers_in_any_chunks(tmp_path, known, case, numerics):
    driver = ForwardDriver(hub_folder(tmp_path, case), numerics=numerics, num_pages=40)
    for chunks in ([len(PROMPT)], [16], [50, 1]):
        np.testing.assert_allclose(log_probs(driver, chunks), known[case], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", WINDOWED)
@pytest.mark.parametrize("page_size", [1, 8, 48])
def test_windows_hold_with_any_page_size(tmp_path, known, case, page_size):
    driver = ForwardDriver(hub_folder(tmp_path, case), page_size=page_size, num_pages=240)
    for chunks in ([70, 1], [9]):
        np.testing.assert_allclose(log_probs(driver, chunks), known[case], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", WINDOWED)
def test_reproducible_windows_have_the_same_bits_alone_batched_and_in_any_chunks(tmp_path, case):
    driver = ForwardDriver(hub_folder(tmp_path, case), num_pages=60)
    alone = driver.all_logits(PROMPT, [len(PROMPT)])
    for chunks in ([1], [16], [37, 3]):
        assert torch.equal(driver.all_logits(PROMPT, chunks), alone)
    rows = [driver.row(PROMPT[:length]) for length in (90, 33, 64, 5)]
    driver.step(rows, [65, 2, 40, 4], all_logits=True)
    driver.step(rows, [25, 31, 24, 1], all_logits=True)
    for row in rows:
        assert torch.equal(torch.stack(row.logits), alone[: len(row.ids)])


@pytest.mark.parametrize("numerics", ["reproducible", "fast"])
@pytest.mark.parametrize("case", ["gemma3, one kv head", "mistral, sliding window"])
def test_nothing_outside_a_window_reaches_an_output(tmp_path, case, numerics):
    """Slots that no row owns, of pages given up too, hold NaN."""
    driver = ForwardDriver(hub_folder(tmp_path, case), numerics=numerics, num_pages=40)
    clean = driver.all_logits(PROMPT, [33, 20, 1])
    driver.poison(float("nan"))
    assert torch.equal(driver.all_logits(PROMPT, [33, 20, 1]), clean)


def test_weights_in_several_files_are_the_same_model(tmp_path):
    case = "qwen3, biases, windows by layer"
    tensors = make_tensors(config_of(case))
    source = write_hub(tmp_path / "parts", config_of(case), tensors)
    (source / "model.safetensors").unlink()
    weight_map = {name: f"model-{index % 3}-of-3.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name, holder in weight_map.items() if holder == file}
        (source / file).write_bytes(safetensors_bytes(part))
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    write_tokenizer(source, byte_level_tokenizer())
    parts, whole = prepare_folder(source, cache=tmp_path / "cache"), hub_folder(tmp_path, case)
    logits = [ForwardDriver(folder, num_pages=40).all_logits(PROMPT, [len(PROMPT)]) for folder in (parts, whole)]
    assert torch.equal(*logits)
