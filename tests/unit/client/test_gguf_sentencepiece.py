import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from protos.client.gguf_tokenizer import tokenizer_json
from protos.service.model_files import ModelCard
from protos.wire.errors import InvalidModelFile
from tests.support import golden
from tests.support.model import GEMMA3, model_folder

BYTES = tuple(f"<0x{value:02X}>" for value in range(256))
PIECES = {"a": -5.0, "b": -6.0, "▁": -4.0, "ab": -2.0, "ba": -1.0, "▁a": -3.0, "bab": -2.5, "▁ba": -1.5}
TOKENS = ("<s>", "</s>", "<unk>", *BYTES, *PIECES, "  ", "\n\n")
TYPES = (3, 3, 2, *[6] * 256, *[1] * len(PIECES), 4, 4)
SCORES = (0.0, 0.0, 0.0, *[0.0] * 256, *PIECES.values(), -1000.0, -1000.0)


def metadata(**changes):
    found = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": np.array(TYPES),
        "tokenizer.ggml.scores": np.array(SCORES, np.float32),
        "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.add_space_prefix": False,
    }
    found |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return {key: value for key, value in found.items() if value is not None}


def tokenizer(**changes) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json(metadata(**changes)).decode())


def tokens(text: str, **changes) -> list[str]:
    return tokenizer(**changes).encode(text, add_special_tokens=False).tokens


def by_score(text: str) -> list[str]:
    """SentencePiece's rule, spelled out: join the neighbours with the best joint score, leftmost of equals."""
    parts = list(text.replace(" ", "▁"))
    while True:
        joint = ["".join(pair) for pair in itertools.pairwise(parts)]
        pairs = [(PIECES[piece], -index) for index, piece in enumerate(joint) if piece in PIECES]
        if not pairs:
            return parts
        index = -max(pairs)[1]
        parts[index : index + 2] = [parts[index] + parts[index + 1]]


@given(text=st.text("ab ", max_size=12).filter(lambda text: "  " not in text))
def test_pieces_are_joined_best_score_first(text):
    assert tokens(text) == by_score(text)


def test_what_no_piece_covers_becomes_bytes_and_comes_back():
    text = "aé世\tb"
    assert tokens(text) == ["a", *(f"<0x{byte:02X}>" for byte in "é世\t".encode()), "b"]
    assert tokenizer().decode(tokenizer().encode(text).ids) == text


def test_users_pieces_are_matched_before_anything_is_joined():
    assert tokens("a   b\n\nb") == ["a", "  ", "▁", "b", "\n\n", "b"]


def test_control_tokens_are_special():
    added = {token["content"]: token["special"] for token in json.loads(tokenizer_json(metadata()))["added_tokens"]}
    assert added == {"<s>": True, "</s>": True, "  ": False, "\n\n": False}


def test_a_blank_in_front_is_added_where_the_file_says_so_and_taken_off_again():
    made = tokenizer(add_space_prefix=True)
    assert made.encode("ab", add_special_tokens=False).tokens == ["▁", "ab"]
    assert made.decode(made.encode("ab").ids) == "ab"
    assert tokens("a", add_space_prefix=None) == ["▁a"]


def test_without_a_named_unknown_token_the_one_of_that_kind_is_used():
    assert json.loads(tokenizer_json(metadata(unknown_token_id=None)))["model"]["unk_token"] == "<unk>"


def test_a_hostile_piece_makes_no_merges():
    long = "a" * 100_000
    changes = {
        "tokens": (*TOKENS, long),
        "token_type": np.array([*TYPES, 1]),
        "scores": np.array([*SCORES, 0.0], np.float32),
    }
    merges = json.loads(tokenizer_json(metadata(**changes)))["model"]["merges"]
    assert merges == json.loads(tokenizer_json(metadata()))["model"]["merges"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "scores must hold one finite number for each of"),
        ({"scores": np.zeros(3, np.float32)}, "scores must hold one finite number"),
        ({"scores": np.full(len(TOKENS), np.nan, np.float32)}, "scores must hold one finite number"),
        ({"scores": ("a",)}, "scores must hold one finite number"),
        ({"unknown_token_id": len(TOKENS)}, "unknown_token_id is .*, must be an integer from 0"),
        ({"unknown_token_id": "x"}, "unknown_token_id is 'x'"),
        ({"tokens": ("a", "a")}, "holds a token twice"),
    ],
)
def test_what_cannot_be_used_is_refused(changes, message):
    with pytest.raises(InvalidModelFile, match=message):
        tokenizer_json(metadata(**changes))


@pytest.mark.model
def test_gemmas_known_prompts_have_the_known_ids():
    folder = model_folder(GEMMA3)
    card: ModelCard = folder.card
    made = Tokenizer.from_file(str(folder.tokenizer))
    assert (card.bos_token_id, card.add_bos, card.eos_token_ids) == (2, True, (1,))
    assert folder.chat_template is None
    cases = golden.cases("gemma3_greedy.json")
    assert cases
    for case in cases:
        ids = made.encode(case["prompt"], add_special_tokens=False).ids
        assert [card.bos_token_id, *ids] == case["prompt_ids"]
        assert made.decode(case["greedy_ids"]) == case["text"]
