from pathlib import Path

import pytest

from scheduler_svc.text.detokenizer import Decoded
from tests.support.tiny_tokenizer import byte_fallback_tokenizer, text_tokenizer

SMILE = list("🙂".encode())


def decode_all(decoder, ids):
    return [tuple(decoder.push(token_id)) for token_id in ids]


def test_a_character_comes_out_with_its_last_byte(tmp_path: Path) -> None:
    decoder = text_tokenizer(tmp_path).decoder(keep_special=False)
    assert decode_all(decoder, SMILE) == [("", "", True)] * 3 + [("", "🙂", False)]


def test_a_broken_character_is_settled_by_the_id_that_breaks_it(tmp_path: Path) -> None:
    decoder = text_tokenizer(tmp_path).decoder(keep_special=False)
    assert decode_all(decoder, [*SMILE[:2], ord("a")])[-1] == ("\ufffd", "a", False)


def test_broken_bytes_at_the_end_come_out_as_replacements(tmp_path: Path) -> None:
    decoder = text_tokenizer(tmp_path).decoder(keep_special=False)
    decode_all(decoder, SMILE[:3])
    assert decoder.finish() == "\ufffd"
    assert decoder.finish() == ""


@pytest.mark.parametrize("token_id", [-1, 100_000])
def test_an_id_without_token_has_no_text(tmp_path: Path, token_id: int) -> None:
    decoder = text_tokenizer(tmp_path).decoder(keep_special=True)
    assert decoder.push(token_id) == Decoded("", "", is_open=False)


def test_a_run_of_raw_bytes_waits_for_its_end(tmp_path: Path) -> None:
    tokenizer = text_tokenizer(tmp_path, byte_fallback_tokenizer())
    after = tokenizer.encode("b")
    decoder = tokenizer.decoder(keep_special=False)
    assert decode_all(decoder, SMILE) == [("", "", True)] * 4
    assert decode_all(decoder, after) == [("🙂", "b", False)]
