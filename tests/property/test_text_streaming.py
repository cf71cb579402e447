"""For any ids and any split of them: the parts, joined, are what the tokenizer says of the whole."""

import functools
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.text.stream_text import StreamText
from scheduler_svc.text.tokenizer import TextTokenizer
from tests.support.tiny_tokenizer import byte_fallback_tokenizer, byte_level_tokenizer, text_tokenizer

KINDS = {
    "byte_level": byte_level_tokenizer,
    "byte_fallback": byte_fallback_tokenizer,
    "byte_fallback_strip": functools.partial(byte_fallback_tokenizer, strip_left=1),
}
# Bytes that begin, continue or break UTF-8 characters come up often.
NASTY_IDS = st.sampled_from(
    [0xF0, 0x9F, 0x98, 0x80, 0xE2, 0x82, 0xAC, 0xC3, 0xA9, 0xED, 0xA0, 0xE0, 0xFF, 0xC0, 97, 32]
)
IDS = st.lists(st.one_of(st.integers(0, 285), NASTY_IDS), max_size=40)


@functools.cache
def tokenizer_of(kind: str) -> TextTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return text_tokenizer(Path(folder), KINDS[kind]())


def stream(tokenizer: TextTokenizer, ids: list[int], sizes: list[int], **options: object):
    """Feed `ids` in parts of `sizes` (the rest at once), taking whatever may leave after each part."""
    text = StreamText(tokenizer.decoder(keep_special=bool(options.pop("keep_special", False))), **options)
    rest = list(ids)
    for size in [*sizes, len(ids)]:
        text.push(rest[:size], logprobs=rest[:size])
        rest = rest[size:]
        yield text, text.take()
    text.finish()
    yield text, text.take()


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=300, deadline=None)
@given(ids=IDS, sizes=st.lists(st.integers(1, 4), max_size=20), keep_special=st.booleans())
def test_parts_join_to_the_whole(kind: str, ids: list[int], sizes: list[int], keep_special: bool) -> None:
    tokenizer = tokenizer_of(kind)
    given_ids: list[int] = []
    given_text = ""

    for _, part in stream(tokenizer, ids, sizes, keep_special=keep_special):
        assert part.first_pos == len(given_ids)
        assert part.text_offset == len(given_text.encode())
        assert part.logprobs == part.ids
        given_ids += part.ids
        given_text += part.text
        # What a caller holds at any time is the text of the ids it holds.
        assert given_text == tokenizer.decode(given_ids, keep_special=keep_special)

    assert given_ids == ids


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=300, deadline=None)
@given(
    ids=IDS,
    sizes=st.lists(st.integers(1, 4), max_size=20),
    stops=st.lists(st.text("a bé\u20ac!\ufffd", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_stop_strings_cut_where_a_search_of_the_whole_would(
    kind: str, ids: list[int], sizes: list[int], stops: list[str]
) -> None:
    tokenizer = tokenizer_of(kind)
    given_ids: list[int] = []
    given_text = ""
    found = None

    for text, part in stream(tokenizer, ids, sizes, stop_strings=stops):
        given_ids += part.ids
        given_text += part.text
        found = text.stop

    whole = tokenizer.decode(ids, keep_special=False)
    ends = [(whole.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in whole]
    if not ends:
        assert found is None
        assert (given_ids, given_text) == (ids, whole)
        return
    end, _, stop = min(ends)
    assert found is not None
    assert found.stop_string == stop
    assert given_text == whole[: end - len(stop)]
    assert given_ids == ids[: found.position + 1]
    # The token of the match is the first that makes it certain.
    assert stop in tokenizer.decode(ids[: found.position + 1], keep_special=False)[:end]


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=150, deadline=None)
@given(
    ids=IDS,
    sizes=st.lists(st.integers(1, 4), max_size=20),
    stops=st.lists(st.text("a bé\u20ac!\ufffd", min_size=1, max_size=4), max_size=3),
    moves=st.sets(st.integers(0, 20)),
)
def test_a_stream_that_goes_on_elsewhere_from_what_was_taken_is_the_same(
    kind: str, ids: list[int], sizes: list[int], stops: list[str], moves: set[int]
) -> None:
    tokenizer = tokenizer_of(kind)

    def begin() -> StreamText:
        return StreamText(tokenizer.decoder(keep_special=False), stop_strings=stops)

    undisturbed = begin()
    undisturbed.push(ids)
    undisturbed.finish()
    whole = undisturbed.take()

    text, taken_ids, taken_text = begin(), list[int](), ""
    for turn, size in enumerate([*sizes, len(ids)]):
        if turn in moves:
            text = begin()
            assert text.resume(taken_ids, num_bytes=len(taken_text.encode()))
        text.push(ids[text.next_pos : text.next_pos + size])
        part = text.take()
        assert (part.first_pos, part.text_offset) == (len(taken_ids), len(taken_text.encode()))
        taken_ids += part.ids
        taken_text += part.text
        if text.stop is not None:
            break
    while text.stop is None and text.next_pos < len(ids):
        text.push(ids[text.next_pos :])
    text.finish()
    part = text.take()
    assert (taken_ids + part.ids, taken_text + part.text) == (whole.ids, whole.text)
    assert text.stop == undisturbed.stop
