"""The table of faults names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [line for line in (ROOT / "tests/FAULT_MATRIX.md").read_text().splitlines() if line.startswith("| ")][2:]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_every_fault_has_a_test_that_exists(row):
    named = re.findall(r"`(tests/[\w/]+\.py)::(\*|\w+)`", row)
    assert named
    for path, name in named:
        text = (ROOT / path).read_text()
        assert name == "*" or re.search(rf"def {name}\(", text), f"{path} has no {name}"
