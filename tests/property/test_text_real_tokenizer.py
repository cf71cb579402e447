"""The real models' own tokenizers, streamed: the parts, joined, are what the library says of the whole."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.text.stream_text import StreamText
from scheduler_svc.text.tokenizer import TextTokenizer
from tests.support.model import GEMMA3, SMOLLM2, model_folder

pytestmark = pytest.mark.model


WIDTHS = {SMOLLM2: 49_152, GEMMA3: 262_144}
names = st.sampled_from(sorted(WIDTHS))


@functools.cache
def tokenizer(name: str) -> TextTokenizer:
    return TextTokenizer.from_file(model_folder(name).tokenizer)


def parts(name: str, ids: list[int], *, keep_special: bool) -> list[str]:
    text: StreamText[None] = StreamText(tokenizer(name).decoder(keep_special=keep_special))
    given: list[str] = []
    for token_id in ids:
        text.push([token_id])
        given.append(text.take().text)
    text.finish()
    return [*given, text.take().text]


@st.composite
def streams(draw: st.DrawFn) -> tuple[str, list[int]]:
    """Any ids of a model, byte tokens among them more often than by chance."""
    name = draw(names)
    ids = st.integers(0, WIDTHS[name] + 5) | st.integers(0, 600)
    return name, draw(st.lists(ids, max_size=40))


@settings(max_examples=400, deadline=None)
@given(stream=streams(), keep_special=st.booleans())
def test_any_ids(stream: tuple[str, list[int]], keep_special: bool) -> None:
    name, ids = stream
    assert "".join(parts(name, ids, keep_special=keep_special)) == tokenizer(name).decode(
        ids, keep_special=keep_special
    )


@settings(max_examples=400, deadline=None)
@given(name=names, text=st.text(max_size=60))
def test_no_part_of_a_text_breaks_a_character(name: str, text: str) -> None:
    ids = tokenizer(name).encode(text)
    assert tokenizer(name).least_tokens(text) <= len(ids)
    given_parts = parts(name, ids, keep_special=True)
    whole = tokenizer(name).decode(ids, keep_special=True)
    assert "".join(given_parts) == whole
    # Not compared with `text`: SmolLM2's vocabulary lacks a few bytes, which the tokenizer drops.
    assert "\ufffd" in whole or not any("\ufffd" in part for part in given_parts)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60).filter(lambda text: "\u2581" not in text))
def test_gemmas_tokenizer_gives_every_text_back(text: str) -> None:
    """But for U+2581, which stands for a blank in its vocabulary."""
    ids = tokenizer(GEMMA3).encode(text)
    assert "".join(parts(GEMMA3, ids, keep_special=True)) == text
