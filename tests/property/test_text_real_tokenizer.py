"""The default model's own tokenizer, streamed: the parts, joined, are what the library says of the whole."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from protos.client.serve_command import ServeOptions, resolve_model
from scheduler_svc.text.stream_text import StreamText
from scheduler_svc.text.tokenizer import TextTokenizer

pytestmark = pytest.mark.model


@functools.cache
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_file(resolve_model(ServeOptions(), Console(quiet=True)).tokenizer)


def parts(ids: list[int], *, keep_special: bool) -> list[str]:
    text: StreamText[None] = StreamText(tokenizer().decoder(keep_special=keep_special))
    given: list[str] = []
    for token_id in ids:
        text.push([token_id])
        given.append(text.take().text)
    text.finish()
    return [*given, text.take().text]


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49_151 + 5), max_size=40), keep_special=st.booleans())
def test_any_ids(ids: list[int], keep_special: bool) -> None:
    assert "".join(parts(ids, keep_special=keep_special)) == tokenizer().decode(ids, keep_special=keep_special)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60))
def test_no_part_of_a_text_breaks_a_character(text: str) -> None:
    ids = tokenizer().encode(text)
    assert tokenizer().least_tokens(text) <= len(ids)
    given_parts = parts(ids, keep_special=True)
    whole = tokenizer().decode(ids, keep_special=True)
    assert "".join(given_parts) == whole
    # Not compared with `text`: the model's vocabulary lacks a few bytes, which the tokenizer drops.
    assert "\ufffd" in whole or not any("\ufffd" in part for part in given_parts)
