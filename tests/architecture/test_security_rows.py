"""Each class of weaknesses S1 to S17 (DECISIONS, SECURITY) has tests that are named after it."""

import re

from tests.support.code_measures import ROOT

ROWS = range(1, 18)
_NAME = re.compile(r"^\s*(?:async )?def test((?:_s\d+)+)_\w+\(", re.MULTILINE)


def rows_with_tests() -> set[int]:
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(texts) > 200
    return {int(row) for text in texts for names in _NAME.findall(text) for row in re.findall(r"\d+", names)}


def test_every_class_of_weaknesses_has_a_test_of_its_name():
    assert rows_with_tests() == set(ROWS)
