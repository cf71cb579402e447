import pytest

from scheduler_svc.text.stop_strings import StopMatch, StopMatcher


def feed_all(stops, parts):
    matcher = StopMatcher(stops)
    for index, part in enumerate(parts):
        match = matcher.feed(part)
        if match is not None:
            return index, match
    return None, matcher.hold


@pytest.mark.parametrize(
    ("stops", "parts", "expected"),
    [
        (["END"], ["xxEND"], (0, StopMatch("END", 5))),
        (["END"], ["E", "N", "D!"], (2, StopMatch("END", 1))),
        (["aab"], ["aaaa", "b"], (1, StopMatch("aab", 1))),
        (["abac"], ["ababac"], (0, StopMatch("abac", 6))),
        # The one that ends first wins, whatever the order of the list.
        (["cdef", "de"], ["abcdef"], (0, StopMatch("de", 5))),
        # Of two that end together, the longest.
        (["d", "bcd"], ["abcd"], (0, StopMatch("bcd", 4))),
        (["bcd", "d"], ["abcd"], (0, StopMatch("bcd", 4))),
        (["\n\n"], ["a\n", "\nb"], (1, StopMatch("\n\n", 1))),
    ],
)
def test_first_match(stops, parts, expected) -> None:
    assert feed_all(stops, parts) == expected


@pytest.mark.parametrize(
    ("stops", "parts", "hold"),
    [
        ([], ["anything"], 0),
        (["END"], ["xxE"], 1),
        (["END"], ["xxEN"], 2),
        (["END"], ["xxENx"], 0),
        (["aab"], ["aaaa"], 2),
        (["xyz", "zzzzzz"], ["xy"], 2),
        (["xyz", "zzzz"], ["zzz"], 3),
    ],
)
def test_text_that_may_begin_a_stop_is_held(stops, parts, hold) -> None:
    assert feed_all(stops, parts) == (None, hold)
