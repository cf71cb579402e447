import json

import pytest

from protos.service.model_files import (
    CARD_FILE,
    TEMPLATE_FILE,
    GenerationDefaults,
    ModelCard,
    encode_card,
    read_model_folder,
)
from protos.wire.errors import InvalidModelFile

CARD = ModelCard(
    name="m",
    architecture="llama",
    context_tokens=64,
    vocab_size=300,
    eos_token_ids=(2, 5),
    bos_token_id=1,
    add_bos=True,
    generation=GenerationDefaults(temperature=0.5, top_k=3),
    weights_fingerprint="ab",
    tokenizer_fingerprint="cd",
)


@pytest.fixture
def folder(tmp_path):
    for name in ("model.gguf", "tokenizer.json", TEMPLATE_FILE):
        (tmp_path / name).write_text("x")
    (tmp_path / CARD_FILE).write_bytes(encode_card(CARD))
    return tmp_path


def test_a_card_comes_back_as_it_was_written(folder):
    found = read_model_folder(folder)

    assert found.card == CARD
    assert found.weights == folder / "model.gguf"
    assert found.tokenizer == folder / "tokenizer.json"
    assert found.chat_template == folder / TEMPLATE_FILE


def test_a_base_model_has_no_template(folder):
    (folder / TEMPLATE_FILE).unlink()
    assert read_model_folder(folder).chat_template is None


@pytest.mark.parametrize("name", ["model.gguf", "tokenizer.json", CARD_FILE])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(InvalidModelFile, match=f"has no {name}") as caught:
        read_model_folder(folder)
    assert str(folder.parent) not in caught.value.message


def test_what_is_no_folder_is_refused(folder):
    with pytest.raises(InvalidModelFile, match=r"model\.gguf is not a model folder"):
        read_model_folder(folder / "model.gguf")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"context_tokens": 0}, "context_tokens"),
        ({"vocab_size": "300"}, "vocab_size"),
        ({"eos_token_ids": [-1]}, "eos_token_ids.0"),
        ({"surprise": 1}, "surprise"),
        ({"generation": {"temperature": "hot"}}, "generation.temperature"),
    ],
)
def test_a_bad_field_of_the_card_is_named(folder, change, field):
    card = {**json.loads(encode_card(CARD)), **change}
    (folder / CARD_FILE).write_text(json.dumps(card))
    with pytest.raises(InvalidModelFile) as caught:
        read_model_folder(folder)
    assert caught.value.field == field


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null", b" " * (2 << 20)])
def test_what_is_no_card_is_refused(folder, content):
    (folder / CARD_FILE).write_bytes(content)
    with pytest.raises(InvalidModelFile, match=r"model\.json"):
        read_model_folder(folder)
