"""What a hub folder says is checked before it is used: configs, names of tensors, and the card made from them."""

import json
import re

import numpy as np
import pytest
import torch
from tokenizers import processors

from protos.client.fetch_model import prepare_folder
from protos.wire.errors import EngineError, InvalidModelFile, UnsupportedFeature
from tests.support.hub_folders import hub_folder, hub_folder_of
from tests.support.hub_models import config_of, make_tensors, safetensors_bytes, write_hub
from tests.support.tiny_tokenizer import byte_level_tokenizer, write_tokenizer
from worker_svc.models.registry import ModelSource
from worker_svc.numerics import FastNumerics

BANDS = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
LLAMA, QWEN2, GEMMA = "llama, grouped queries", "qwen2, biases, tied", "gemma3, one kv head"


def load(folder):
    return ModelSource(folder).load(numerics=FastNumerics(), dtype=torch.float32, device=torch.device("cpu"))


def load_changed(tmp_path, case, **changes):
    config = config_of(case)
    changed = {key: value for key, value in (config | changes).items() if value != "absent"}
    return load(hub_folder_of(tmp_path, changed, make_tensors(config)))


def test_the_card_is_made_from_the_folders_files(tmp_path):
    source = write_hub(tmp_path / "My model", config_of(LLAMA), make_tensors(config_of(LLAMA)))
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    write_tokenizer(source, tokenizer)
    (source / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 5], "temperature": 0.6, "top_k": 64})
    )
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))

    folder = prepare_folder(source, cache=tmp_path / "cache")

    card = folder.card
    assert (card.name, card.architecture, card.context_tokens, card.vocab_size) == ("My-model", "llama", 256, 96)
    assert (card.bos_token_id, card.eos_token_ids, card.add_bos) == (1, (2, 5), True)
    assert (card.generation.temperature, card.generation.top_k, card.generation.top_p) == (0.6, 64, None)
    assert folder.chat_template.read_text() == "{{ messages }}"
    assert folder.weights.resolve() == source
    assert prepare_folder(source, cache=tmp_path / "cache") == folder
    (source / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    changed = prepare_folder(source, cache=tmp_path / "cache")
    assert changed.path != folder.path
    assert (changed.card.add_bos, changed.chat_template) == (False, None)


@pytest.mark.parametrize(
    ("file", "said", "field"),
    [
        ("generation_config.json", {"temperature": "hot"}, "temperature"),
        ("generation_config.json", {"top_p": True}, "top_p"),
        ("generation_config.json", {"do_sample": "no"}, "do_sample"),
        ("generation_config.json", {"do_sample": False, "min_p": []}, "min_p"),
        ("generation_config.json", {"top_k": 5.5}, "top_k"),
        ("generation_config.json", {"top_k": -1}, "top_k"),
        ("tokenizer_config.json", {"add_bos_token": "yes"}, "add_bos_token"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template"),
        ("tokenizer_config.json", {"chat_template": [{"name": "rag", "template": "x"}]}, "chat_template"),
    ],
)
def test_a_setting_of_another_kind_is_refused_by_file_and_key(tmp_path, file, said, field):
    source = write_hub(tmp_path / "hub", config_of(LLAMA), make_tensors(config_of(LLAMA)))
    write_tokenizer(source, byte_level_tokenizer())
    (source / file).write_text(json.dumps(said))
    with pytest.raises(InvalidModelFile, match=f"^{re.escape(file)}: {field} ") as caught:
        prepare_folder(source, cache=tmp_path / "cache")
    assert caught.value.field == field


def test_of_several_templates_the_default_one_is_taken(tmp_path):
    source = write_hub(tmp_path / "hub", config_of(LLAMA), make_tensors(config_of(LLAMA)))
    write_tokenizer(source, byte_level_tokenizer())
    named = [{"name": "rag", "template": "a"}, {"name": "default", "template": "{{ messages }}"}]
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    folder = prepare_folder(source, cache=tmp_path / "cache")
    assert folder.chat_template.read_text() == "{{ messages }}"


def test_weights_changed_after_the_card_was_made_are_refused(tmp_path):
    folder = hub_folder(tmp_path, LLAMA)
    tensors = make_tensors(config_of(LLAMA))
    tensors["lm_head.weight"] += 1
    (folder.weights / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    with pytest.raises(InvalidModelFile, match="SHA-256"):
        load(folder)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_weights_are_read(tmp_path, dtype):
    config = config_of(LLAMA)
    tensors = make_tensors(config)
    source = write_hub(tmp_path / "hub", config, tensors)
    kind = torch.float16 if dtype == "F16" else torch.bfloat16
    halves = {name: torch.from_numpy(values).to(kind) for name, values in tensors.items()}
    raw = {name: values.view(torch.int16).numpy() for name, values in halves.items()}
    (source / "model.safetensors").write_bytes(safetensors_bytes(raw, dtype=dtype))
    write_tokenizer(source, byte_level_tokenizer())
    loaded = load(prepare_folder(source, cache=tmp_path / "cache"))
    assert torch.equal(loaded.model._embedding, halves["model.embed_tokens.weight"].float())


@pytest.mark.parametrize(
    ("case", "changes", "field"),
    [
        (LLAMA, {"model_type": "mamba"}, "model_type"),
        (LLAMA, {"model_type": 3}, "model_type"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA, {"attention_bias": "yes"}, "attention_bias"),
        (LLAMA, {"attention_bias": True}, "tensor 'model.layers.0.self_attn.q_proj.bias'"),
        (LLAMA, {"mlp_bias": True}, "tensor 'model.layers.0.mlp.gate_proj.bias'"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        (QWEN2, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "rope_type"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (LLAMA, {"rope_scaling": BANDS | {"factor": 0}}, "factor"),
        (LLAMA, {"rope_scaling": BANDS | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        (LLAMA, {"rope_scaling": BANDS | {"original_max_position_embeddings": 0}}, "original_max_position_embeddings"),
        (GEMMA, {"rope_scaling": BANDS}, "rope_type"),
        (LLAMA, {"rope_parameters": [1]}, "rope_parameters"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA, {"torch_dtype": "float12"}, "torch_dtype"),
        (LLAMA, {"torch_dtype": "float8_e4m3fn"}, "torch_dtype"),
        (LLAMA, {"torch_dtype": 16}, "torch_dtype"),
        (LLAMA, {"torch_dtype": "absent", "dtype": "int8"}, "dtype"),
        *((LLAMA, {"torch_dtype": known}, None) for known in (None, "float32", "float16", "bfloat16")),
        (LLAMA, {"dtype": "bfloat16"}, None),
        (LLAMA, {"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        (QWEN2, {"use_sliding_window": "no"}, "use_sliding_window"),
        (LLAMA, {"sliding_window": 64}, "sliding_window"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": "x"}, "sliding_window"),
        (QWEN2, {"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types"),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        (LLAMA, {"num_hidden_layers": 10_000}, "num_hidden_layers"),
        (LLAMA, {"num_hidden_layers": "absent"}, "num_hidden_layers"),
        (LLAMA, {"num_hidden_layers": "x"}, "num_hidden_layers"),
        (LLAMA, {"num_key_value_heads": 5}, "num_key_value_heads"),
        (LLAMA, {"rope_theta": True}, "rope_theta"),
        (LLAMA, {"vocab_size": 97}, "vocab_size"),
        (LLAMA, {"head_dim": 15}, "head_dim"),
        (LLAMA, {"rms_norm_eps": "absent"}, "rms_norm_eps"),
        (LLAMA, {"tie_word_embeddings": "absent"}, None),
        (GEMMA, {"layer_types": ["full_attention"]}, "layer_types"),
        (GEMMA, {"sliding_window": None}, "sliding_window"),
        (GEMMA, {"hidden_activation": "gelu"}, "hidden_activation"),
        (GEMMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (GEMMA, {"query_pre_attn_scalar": "x"}, "query_pre_attn_scalar"),
    ],
)
def test_a_config_that_no_layer_computes_is_refused_by_field(tmp_path, case, changes, field):
    if field is None:
        load_changed(tmp_path, case, **changes)
        return
    with pytest.raises(EngineError) as caught:
        load_changed(tmp_path, case, **changes)
    assert isinstance(caught.value, InvalidModelFile | UnsupportedFeature)
    assert caught.value.field == field
    assert len(caught.value.message) < 300
    assert not re.search(r"llama\.|gemma3\.|qwen2\.|block_count|head_count", caught.value.message), "GGUF's words"
    assert ".json: " in caught.value.message or "tensor" in caught.value.message


def test_new_and_old_forms_of_rope_mean_the_same(tmp_path):
    new = {
        "rope_theta": "absent",
        "rope_local_base_freq": "absent",
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }
    assert load_changed(tmp_path / "new", GEMMA, **new).config == load_changed(tmp_path / "old", GEMMA).config


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight' is missing"),
        ("model.norm.weight", r"tensor 'model\.norm\.weight' is missing"),
        ("lm_head.weight", r"tensor 'lm_head\.weight' is missing"),
    ],
)
def test_a_missing_tensor_is_named_as_in_the_folder(tmp_path, name, message):
    tensors = make_tensors(config_of(LLAMA))
    del tensors[name]
    with pytest.raises(InvalidModelFile, match=message):
        load(hub_folder_of(tmp_path, config_of(LLAMA), tensors))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.3.mlp.up_proj.weight",
        "model.layers.00.mlp.up_proj.weight",
        "x" * 200,
    ],
)
def test_a_tensor_without_a_use_is_refused(tmp_path, name):
    tensors = make_tensors(config_of(LLAMA)) | {name: np.zeros(96, np.float32)}
    with pytest.raises(
        InvalidModelFile, match=r"model\.safetensors: tensor .* has no use in a model as config\.json describes it"
    ) as caught:
        load(hub_folder_of(tmp_path, config_of(LLAMA), tensors))
    assert len(caught.value.message) < 200


def test_buffers_that_no_model_reads_are_passed_over(tmp_path):
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "lm_head.weight": np.ones((96, 96)),
    }
    case = "llama, one kv head, tied"
    load(
        hub_folder_of(
            tmp_path,
            config_of(case),
            make_tensors(config_of(case)) | {k: v.astype(np.float32) for k, v in extra.items()},
        )
    )


def test_a_wrong_shape_is_named_as_in_the_folder(tmp_path):
    tensors = make_tensors(config_of(LLAMA))
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].T.copy()
    with pytest.raises(InvalidModelFile, match=r"'model\.layers\.0\.mlp\.up_proj\.weight' has shape \[96, 112\], the"):
        load(hub_folder_of(tmp_path, config_of(LLAMA), tensors))


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_an_incomplete_folder_leaves_nothing_in_the_cache(tmp_path, name):
    source = write_hub(tmp_path / "hub", config_of(LLAMA), make_tensors(config_of(LLAMA)))
    write_tokenizer(source, byte_level_tokenizer())
    (source / name).unlink()
    with pytest.raises(InvalidModelFile):
        prepare_folder(source, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists() or [p for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock"] == []
