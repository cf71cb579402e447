from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from protos.wire.errors import InvalidModelFile
from scheduler_svc.text.tokenizer import TextTokenizer
from tests.support.tiny_tokenizer import byte_level_tokenizer, text_tokenizer


def test_text_survives_the_round_trip(tmp_path: Path) -> None:
    tokenizer = text_tokenizer(tmp_path)
    text = "hello the 🙂 a€\n"
    ids = tokenizer.encode(text)
    assert len(ids) < len(text.encode())
    assert tokenizer.decode(ids, keep_special=False) == text


def test_special_tokens_have_text_only_when_kept(tmp_path: Path) -> None:
    tokenizer = text_tokenizer(tmp_path)
    ids = tokenizer.encode("a<|im_end|>b")
    assert len(ids) == 3
    assert ids[1] in tokenizer.special_ids
    assert tokenizer.decode(ids, keep_special=False) == "ab"
    assert tokenizer.decode(ids, keep_special=True) == "a<|im_end|>b"


def test_silent_ids_have_no_text_even_when_specials_are_kept(tmp_path: Path) -> None:
    tokenizer = text_tokenizer(tmp_path)
    ids = tokenizer.encode("a<|im_start|><|im_end|>")
    decoder = tokenizer.decoder(keep_special=True, silent_ids=frozenset(ids[2:]))
    assert [decoder.push(token_id).text for token_id in ids] == ["a", "<|im_start|>", ""]


def test_a_text_has_no_fewer_tokens_than_is_said_of_it(tmp_path: Path) -> None:
    tokenizer = text_tokenizer(tmp_path)
    longest = max(len(tokenizer.token_bytes(token_id)) for token_id in range(300))
    assert tokenizer.least_tokens("ab1" * longest) == 3
    for text in ("", "hello the", "hello" * 50, "🙂" * 50, "<|im_end|>" * 50, " the" * 50):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


def test_nothing_is_said_of_a_tokenizer_that_may_swallow_text(tmp_path: Path) -> None:
    stripping = byte_level_tokenizer()
    stripping.add_tokens([AddedToken("<x>", lstrip=True, normalized=False)])
    lower = byte_level_tokenizer()
    lower.normalizer = normalizers.Strip()
    for tokenizer in (stripping, lower):
        assert text_tokenizer(tmp_path, tokenizer).least_tokens("a" * 10_000) == 0


@pytest.mark.parametrize(
    "content", ["", "not json", "[]", "{}", '{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}']
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(InvalidModelFile, match=r"tokenizer\.json"):
        TextTokenizer.from_file(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"GGUF\xff\xfe\x00")
    with pytest.raises(InvalidModelFile, match="cannot be read"):
        TextTokenizer.from_file(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelFile, match=r"has no tokenizer\.json"):
        TextTokenizer.from_file(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    "decoder",
    [decoders.WordPiece(), decoders.CTC(), decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])],
)
def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path: Path, decoder: decoders.Decoder) -> None:
    tokenizer: Tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoder
    with pytest.raises(InvalidModelFile, match="not supported"):
        text_tokenizer(tmp_path, tokenizer)


def test_a_tokenizer_without_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelFile, match="not supported"):
        text_tokenizer(tmp_path, Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
