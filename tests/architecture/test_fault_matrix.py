"""The tables of faults and of the execution layer's mechanisms name tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = {f"1.{number}" for number in (*range(1, 7), 9, 13, *range(15, 21))}
"""Of the execution layer's mechanisms that are built."""


def rows_of(name):
    return [line for line in (ROOT / "tests" / name).read_text().splitlines() if line.startswith("| ")][2:]


FAULTS, MECHANISMS = rows_of("FAULT_MATRIX.md"), rows_of("EXECUTION_LINES.md")


@pytest.mark.parametrize("row", [*FAULTS, *MECHANISMS], ids=lambda row: row.split("|")[1].strip())
def test_every_line_has_a_test_that_exists(row):
    named = re.findall(r"`(tests/[\w/]+\.py)::(\*|\w+)`", row)
    assert named
    for path, name in named:
        text = (ROOT / path).read_text()
        assert name == "*" or re.search(rf"def {name}\(", text), f"{path} has no {name}"


def test_every_mechanism_that_is_built_has_a_line():
    assert {row.split("|")[1].split()[0] for row in MECHANISMS} == SECTIONS
    assert FAULTS
