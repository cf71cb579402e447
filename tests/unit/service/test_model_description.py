"""What cannot be served is refused from headers alone, by file, field and value, before any tensor is read."""

import json

import numpy as np
import pytest

from protos.client.fetch_model import fetch_model, model_for_device
from protos.client.simulated_model import SIMULATED_MODEL
from protos.service.model_description import check_model, describe_weights
from protos.service.model_tensors import ParameterSpec, chosen_tensors
from protos.service.safetensors_folder import StoredTensor
from protos.wire.errors import EngineError, InvalidModelFile, UnsupportedFeature
from tests.support import gguf_bytes as g
from tests.support.hub_models import CASES, config_of, make_tensors, write_hub
from tests.support.tiny_llama import Shape, gguf_content, metadata, parameters, tiny_folder
from tests.support.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

LLAMA = "llama, grouped queries"


def gguf_of(path, *, shape=None, without=(), extra=None, keys=()):
    shape = Shape(num_layers=1) if shape is None else shape
    weights = {name: values for name, values in parameters(shape).items() if name not in without} | (extra or {})
    tensors = [g.f32_tensor(name, values) for name, values in weights.items()]
    return g.write(path / "mine.gguf", g.gguf(metadata=[*metadata(shape), *keys], tensors=tensors))


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"shape": Shape(architecture="phi3")}, "general.architecture", "is 'phi3', supported: llama, qwen2, qwen3"),
        ({"without": ["token_embd.weight"]}, "tensor 'token_embd.weight'", "is missing"),
        ({"without": ["blk.0.ffn_up.weight"]}, "tensor 'blk.0.ffn_up.weight'", "is missing, the architecture needs"),
        ({"extra": {"blk.0.what.weight": np.ones(4)}}, "tensor 'blk.0.what.weight'", "has no use in this model"),
        ({"extra": {"blk.1.ffn_up.weight": np.ones(4)}}, "tensor 'blk.1.ffn_up.weight'", "has no use in this model"),
        (
            {"extra": {"blk.0.ffn_up.weight": np.ones((80, 32))}},
            "tensor 'blk.0.ffn_up.weight'",
            r"has shape \[80, 32\], the architecture needs \[80, 48\]",
        ),
        ({"extra": {"blk.0.attn_q.bias": np.ones(96)}}, "tensor 'blk.0.attn_k.bias'", "is missing"),
        ({"keys": [g.entry("llama.vocab_size", g.U32, 301)]}, "llama.vocab_size", "is 301, tensor .* has 300 rows"),
        ({"keys": [g.entry("llama.expert_count", g.U32, 8)]}, "llama.expert_count", "is 8, .* mixtures of experts"),
        (
            {"keys": [g.entry("llama.attention.sliding_window", g.U32, 64)]},
            "llama.attention.sliding_window",
            "is 64, .* sliding window",
        ),
        (
            {"keys": [g.entry("llama.rope.scaling.type", g.STRING, "yarn")]},
            "llama.rope.scaling.type",
            "is 'yarn', supported: none, linear",
        ),
    ],
)
def test_a_gguf_file_that_no_worker_computes_is_refused_by_file_field_and_value(tmp_path, changes, field, message):
    file = gguf_of(tmp_path, **changes)
    with pytest.raises(EngineError, match=rf"^mine\.gguf: .*{message}") as caught:
        check_model(file)
    assert isinstance(caught.value, InvalidModelFile | UnsupportedFeature)
    assert caught.value.field == field


def test_more_tokens_than_rows_of_the_embedding_are_refused(tmp_path):
    wide, narrow = Shape(num_layers=1), Shape(num_layers=1, vocab_size=298)
    tensors = [g.f32_tensor(name, values) for name, values in parameters(narrow).items()]
    file = g.write(tmp_path / "mine.gguf", g.gguf(metadata=metadata(wide), tensors=tensors))
    with pytest.raises(InvalidModelFile, match=r"mine\.gguf: tokenizer\.ggml\.tokens has 300 tokens, .* has 298 rows"):
        check_model(file)


def test_a_type_of_tensors_that_cannot_be_read_is_refused(tmp_path):
    shape = Shape(num_layers=1)
    tensors = [g.f32_tensor(name, values) for name, values in parameters(shape).items() if name != "output_norm.weight"]
    tensors.append(g.Tensor(name="output_norm.weight", shape=(48,), type_number=26, raw=bytes(192)))
    file = g.write(tmp_path / "mine.gguf", g.gguf(metadata=metadata(shape), tensors=tensors))
    with pytest.raises(
        InvalidModelFile, match=r"mine\.gguf: tensor 'output_norm\.weight' has type I32, supported: F32"
    ):
        check_model(file)


def test_an_optional_parameter_may_be_missing(tmp_path):
    described = describe_weights(gguf_of(tmp_path))
    table = [ParameterSpec(name="maybe", shape=(5,), is_optional=True)]
    assert chosen_tensors({}, table, of="x") == {}
    entry = described.tensors["output_norm.weight"].entry
    stored = {"maybe": StoredTensor(path=tmp_path / "x", entry=entry)}
    with pytest.raises(InvalidModelFile, match="has shape"):
        chosen_tensors(stored, table, of="x")


@pytest.mark.parametrize("case", CASES)
def test_every_supported_variant_is_described_from_its_headers(tmp_path, case):
    source = write_hub(tmp_path / "hub", config_of(case), make_tensors(config_of(case)))
    check_model(source)
    found = describe_weights(source)
    assert found.config.num_layers == config_of(case)["num_hidden_layers"]
    assert found.config.biases.mlp == config_of(case).get("mlp_bias", False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "phi3"}, "config.json: model_type is 'phi3', supported: llama, mistral, qwen2, qwen3, gemma3"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "config.json: model_type is 'mixtral', supported: "),
        ({"vocab_size": 99}, "model.safetensors: tensor 'model.embed_tokens.weight' has 96 rows, vocab_size in"),
        ({"hidden_act": "relu"}, "config.json: hidden_act is 'relu', supported: silu"),
        ({"quantization_config": {"bits": 4}}, "config.json: quantization_config is {'bits': 4}, supported: absent"),
        ({"num_hidden_layers": 4}, "hub: tensor 'model.layers.3.input_layernorm.weight' is missing, a model as conf"),
        ({"num_hidden_layers": 2}, "model.safetensors: tensor 'model.layers.2."),
        ({"num_hidden_layers": 0}, "config.json: num_hidden_layers is 0, must be 1 to 512"),
    ],
)
def test_a_hub_folder_is_refused_in_its_own_words_and_nothing_is_written(tmp_path, changes, message):
    config = config_of(LLAMA)
    source = write_hub(tmp_path / "hub", config | changes, make_tensors(config))
    write_tokenizer(source, byte_level_tokenizer())
    with pytest.raises(EngineError) as caught:
        model_for_device(str(source), device="cpu", cache=tmp_path / "cache")
    assert caught.value.message.startswith(message)
    assert not (tmp_path / "cache").exists()


def test_a_prepared_folder_is_checked_again_against_its_card(tmp_path):
    folder = tiny_folder(tmp_path)
    assert model_for_device(str(folder.path), device="cpu") == folder
    card = folder.path / "model.json"
    card.write_text(json.dumps(json.loads(card.read_text()) | {"vocab_size": 7}))
    with pytest.raises(InvalidModelFile, match=r"model\.json: vocab_size is 7, the weights beside it have 300"):
        model_for_device(str(folder.path), device="cpu")
    g.write(folder.weights.resolve(), gguf_content(Shape(architecture="phi3"), parameters(Shape())))
    with pytest.raises(UnsupportedFeature, match="'phi3'"):
        model_for_device(str(folder.path), device="cpu")


def test_a_simulated_device_serves_what_no_other_computes(tmp_path):
    file = gguf_of(tmp_path, shape=Shape(architecture="phi3"))
    folder = model_for_device(str(file), device="simulated", cache=tmp_path / "cache")
    assert folder.card.architecture == "phi3"
    fetch_model(SIMULATED_MODEL, cache=tmp_path / "cache")
    assert model_for_device(SIMULATED_MODEL, device="simulated", cache=tmp_path / "cache").card.name == SIMULATED_MODEL
    with pytest.raises(UnsupportedFeature, match="is 'simulated', supported: llama"):
        model_for_device(SIMULATED_MODEL, device="cpu", cache=tmp_path / "cache")
