"""The Llama family against a dense float64 computation from the same file, through pages, chunks and batches."""

import numpy as np
import pytest
import torch

from protos.client.fetch_model import prepare_folder
from protos.wire.errors import InvalidModelFile, UnsupportedFeature
from tests.support import gguf_bytes as g
from tests.support.dense_llama import dense_logits
from tests.support.forwards import ForwardDriver
from tests.support.tiny_llama import Shape, gguf_content, metadata, parameters, tiny_folder
from worker_svc.models.registry import ModelSource
from worker_svc.numerics import FastNumerics

IDS = np.random.default_rng(1).integers(0, 300, 83).tolist()
BIASED = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
SHAPES = {
    "llama": Shape(),
    "untied": Shape(is_tied=False),
    "every head its own kv": Shape(num_q_heads=3, num_kv_heads=3),
    "one kv head": Shape(num_q_heads=5, num_kv_heads=1, num_layers=1),
    "qwen2 with biases": Shape(architecture="qwen2"),
    "biases everywhere": Shape(biased_parts=BIASED),
    "wide heads": Shape(head_dim=32, num_layers=1),
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def folder_of(tmp_path, shape, weights):
    tmp_path.mkdir(exist_ok=True)
    return prepare_folder(g.write(tmp_path / "m.gguf", gguf_content(shape, weights)), cache=tmp_path / "cache")


@pytest.mark.parametrize("numerics", ["reproducible", "fast"])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_dense_model(tmp_path, name, numerics):
    shape = SHAPES[name]
    driver = ForwardDriver(tiny_folder(tmp_path, shape, seed=4), numerics=numerics)
    known = dense_logits(shape, parameters(shape, seed=4), IDS)
    for chunks in ([len(IDS)], [30, 17, 9], [80, 1]):
        np.testing.assert_allclose(driver.all_logits(IDS, chunks), known, atol=2e-4)


@pytest.mark.parametrize("numerics", ["reproducible", "fast"])
@pytest.mark.parametrize("page_size", [1, 16, 48, 128])
def test_any_page_size_gives_the_same_logits(tmp_path, page_size, numerics):
    driver = ForwardDriver(tiny_folder(tmp_path), numerics=numerics, page_size=page_size, num_pages=300)
    known = dense_logits(Shape(), parameters(Shape()), IDS)
    np.testing.assert_allclose(driver.all_logits(IDS, [50, 1]), known, atol=2e-4)


@pytest.mark.parametrize("numerics", ["reproducible", "fast"])
def test_a_mixed_batch_equals_its_rows_alone(tmp_path, numerics):
    driver = ForwardDriver(tiny_folder(tmp_path), numerics=numerics)
    lengths = (1, 2, 16, 17, 33, 83)
    rows = [driver.row(IDS[:length]) for length in lengths]
    driver.step(rows[2:], [15, 5, 1, 64], all_logits=True)
    driver.step(rows, [1, 2, 1, 12, 32, 19], all_logits=True)
    known = dense_logits(Shape(), parameters(Shape()), IDS)
    for row, length in zip(rows, lengths, strict=True):
        np.testing.assert_allclose(torch.stack(row.logits), known[:length], atol=2e-4)


def test_stored_rope_factors_are_used(tmp_path):
    shape = Shape(num_layers=1)
    weights = parameters(shape) | {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    driver = ForwardDriver(folder_of(tmp_path, shape, weights))
    np.testing.assert_allclose(driver.all_logits(IDS, [83]), dense_logits(shape, weights, IDS), atol=2e-4)


def test_bfloat16_stays_near(tmp_path):
    driver = ForwardDriver(tiny_folder(tmp_path), numerics="fast", dtype="bfloat16")
    known = dense_logits(Shape(), parameters(Shape()), IDS)
    found = driver.all_logits(IDS, [40, 1]).numpy()
    assert driver.pool.keys(0).dtype == torch.bfloat16
    assert found.dtype == np.float32
    assert np.abs(found - known).mean() < 0.02 * np.abs(known).mean()


def test_a_tensor_without_a_use_is_refused_and_a_buffer_that_no_model_reads_is_not(tmp_path):
    shape = Shape(num_layers=1)
    with pytest.raises(InvalidModelFile, match=r"m\.gguf: tensor 'more' has no use"):
        ForwardDriver(folder_of(tmp_path, shape, parameters(shape) | {"more": np.ones(3, np.float32)}))
    unread = {"blk.0.attn_rot_embd.weight": np.ones(8, np.float32)}
    ForwardDriver(folder_of(tmp_path / "other", shape, parameters(shape) | unread))


def test_a_missing_layer_is_refused(tmp_path):
    weights = parameters(Shape())
    del weights["blk.1.ffn_up.weight"]
    with pytest.raises(InvalidModelFile, match=r"'blk\.1\.ffn_up\.weight' is missing"):
        ForwardDriver(folder_of(tmp_path, Shape(), weights))


def test_another_architecture_is_refused(tmp_path):
    shape = Shape(architecture="mamba")
    with pytest.raises(
        UnsupportedFeature,
        match=r"tiny\.gguf: general\.architecture is 'mamba', supported: llama, qwen2, qwen3, gemma3",
    ):
        ForwardDriver(tiny_folder(tmp_path, shape))


def test_weights_that_are_not_the_cards_are_refused(tmp_path):
    folder = tiny_folder(tmp_path)
    other = gguf_content(Shape(), parameters(Shape(), seed=9))
    g.write(folder.weights.resolve(), other)
    with pytest.raises(InvalidModelFile, match="SHA-256"):
        ModelSource(folder).load(numerics=FastNumerics(), dtype=torch.float32, device=torch.device("cpu"))


def test_a_card_of_another_model_is_refused(tmp_path):
    folder = tiny_folder(tmp_path)
    g.write(
        folder.weights.resolve(),
        g.gguf(
            metadata=metadata(Shape(context_tokens=64)),
            tensors=[g.f32_tensor(name, values) for name, values in parameters(Shape()).items()],
        ),
    )
    with pytest.raises(InvalidModelFile, match=r"model\.json: context_tokens is 512, the weights beside it have 64"):
        ModelSource(folder).load(numerics=FastNumerics(), dtype=torch.float32, device=torch.device("cpu"))
