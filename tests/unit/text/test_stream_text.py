import time
from pathlib import Path

from scheduler_svc.text.stream_text import Released, StopFound, StreamText
from tests.support.tiny_tokenizer import text_tokenizer


def stream_text(tmp_path: Path, *, stops=(), **options) -> StreamText:
    return StreamText(text_tokenizer(tmp_path).decoder(keep_special=False, **options), stop_strings=stops)


def test_ids_leave_with_their_text(tmp_path: Path) -> None:
    text = stream_text(tmp_path)
    text.push(b"ab", logprobs=["p", "q"])
    assert text.has_release
    assert text.take() == Released(0, [97, 98], "ab", 0, ["p", "q"])
    assert not text.has_release
    text.push("é".encode())
    assert text.take() == Released(2, [0xC3, 0xA9], "é", 2, [])
    text.push(b"c")
    assert text.take() == Released(4, [99], "c", 4, [])


def test_a_split_character_is_held_with_its_ids(tmp_path: Path) -> None:
    text = stream_text(tmp_path)
    text.push([97, *"🙂".encode()[:2]])
    assert text.take().ids == [97]
    assert text.held_ids == 2
    assert not text.has_release
    text.finish()
    assert text.has_release
    assert text.take() == Released(1, [0xF0, 0x9F], "\ufffd", 1, [])


def test_a_possible_stop_is_held_and_let_go(tmp_path: Path) -> None:
    text = stream_text(tmp_path, stops=["END"])
    text.push(b"xEN")
    assert text.take() == Released(0, [ord("x")], "x", 0, [])
    text.push(b"!")
    assert text.take() == Released(1, list(b"EN!"), "EN!", 1, [])


def test_a_stop_cuts_inside_its_token_and_drops_what_follows(tmp_path: Path) -> None:
    tokenizer = text_tokenizer(tmp_path)
    (hello,) = tokenizer.encode("hello")
    text = StreamText(tokenizer.decoder(keep_special=False), stop_strings=["ell"])
    text.push([97, hello, 98, 99], logprobs=[1, 2, 3, 4])
    text.push([100], logprobs=[5])
    assert text.stop == StopFound("ell", 1)
    assert text.take() == Released(0, [97, hello], "ah", 0, [1, 2])
    text.finish()
    assert text.take().ids == []
    assert text.next_pos == 2


def test_silent_ids_count_but_have_no_text(tmp_path: Path) -> None:
    text = stream_text(tmp_path, silent_ids=frozenset([98]))
    text.push(b"ab")
    assert text.take() == Released(0, [97, 98], "a", 0, [])


def test_cost_per_id_does_not_grow(tmp_path: Path) -> None:
    # An endless run of broken characters behind an open stop string: the worst case for what is held.
    text = stream_text(tmp_path, stops=["\ufffd" * 200 + "x"])

    def push(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            text.push([0xF0])
            text.has_release  # noqa: B018
        return time.perf_counter() - began

    push(255)
    first = push(1000)
    push(8000)
    assert push(1000) < 20 * first
