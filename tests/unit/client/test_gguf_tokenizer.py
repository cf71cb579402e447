import json

import jinja2
import numpy as np
import pytest
from tokenizers import Tokenizer

from protos.client.gguf_tokenizer import tokenizer_json
from protos.wire.errors import InvalidModelFile, UnsupportedFeature
from tests.support import golden
from tests.support.model import model_folder

TOKENS = ("a", "b", "ab", "Ġ", "1", "<|end|>", "<user>")


def metadata(**changes):
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": np.array([1, 1, 1, 1, 1, 3, 4]),
        "tokenizer.ggml.merges": ("a b",),
    }
    found |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return {key: value for key, value in found.items() if value is not None}


def ids(text: str, **changes) -> list[int]:
    tokenizer = Tokenizer.from_str(tokenizer_json(metadata(**changes)).decode())
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_merges_digits_and_control_tokens():
    assert ids("abb<|end|>11 a") == [2, 1, 5, 4, 4, 3, 0]


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe", None])
def test_the_other_pre_tokenizers_load_and_cut_words(pre):
    assert ids("ab a", pre=pre) == [2, 3, 0]


def test_whole_words_need_no_merge_where_the_model_says_so():
    assert ids("ab", pre="llama-bpe", merges=()) == [2]
    assert ids("ab", pre="qwen2", merges=()) == [0, 1]


def test_control_tokens_are_special_and_user_tokens_are_not():
    added = json.loads(tokenizer_json(metadata()))["added_tokens"]
    assert [(token["id"], token["special"]) for token in added] == [(5, True), (6, False)]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "bert"}, UnsupportedFeature, "'bert', supported: 'gpt2', 'llama'"),
        ({"model": None}, UnsupportedFeature, "is None"),
        ({"pre": "other"}, UnsupportedFeature, "'other', supported: gpt-2"),
        ({"pre": 3}, UnsupportedFeature, "is 3"),
        ({"tokens": None}, InvalidModelFile, "tokens is missing"),
        ({"tokens": ("a", "a")}, InvalidModelFile, "holds a token twice"),
        ({"token_type": np.array([1])}, InvalidModelFile, "one number for each of 7"),
        ({"merges": None}, InvalidModelFile, "merges is missing"),
        ({"merges": ("a b", "a")}, InvalidModelFile, r"merges\[1\] is no pair"),
        ({"merges": ("a b c",)}, InvalidModelFile, r"merges\[0\] is no pair"),
    ],
)
def test_what_cannot_be_used_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        tokenizer_json(metadata(**changes))


@pytest.mark.model
def test_the_known_prompts_have_the_known_ids():
    folder = model_folder()
    tokenizer = Tokenizer.from_file(str(folder.tokenizer))
    template = jinja2.Environment().from_string(folder.chat_template.read_text())
    cases = golden.cases("smollm2_greedy.json")
    assert cases
    for case in cases:
        text = case["prompt"]
        if case["kind"] == "chat":
            text = template.render(messages=[{"role": "user", "content": text}], add_generation_prompt=True)
        assert tokenizer.encode(text, add_special_tokens=False).ids == case["prompt_ids"]
        assert tokenizer.decode(case["greedy_ids"]) == case["text"]
