"""A mode is a row of the trait table: only `forward_mode.py` asks which one it is."""

import ast
from collections.abc import Iterator

import pytest

from tests.support.code_measures import PACKAGES, ROOT, source_files

ALLOWED = "worker_svc/batch/forward_mode.py"
NAME = "ForwardMode"


def _names_a_mode(node: ast.AST) -> bool:
    return any(
        isinstance(found, ast.Attribute) and isinstance(found.value, ast.Name) and found.value.id == NAME
        for found in ast.walk(node)
    )


def comparisons(source: str) -> list[int]:
    """Lines on which a member of ForwardMode is compared, matched or looked for."""
    return sorted(set(_lines(ast.parse(source))))


def _lines(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(_names_a_mode(side) for side in (node.left, *node.comparators)):
            yield node.lineno
        elif isinstance(node, ast.match_case) and _names_a_mode(node.pattern):
            yield node.pattern.lineno


def test_modes_are_compared_in_one_file():
    found = {
        place: lines
        for path in source_files(*PACKAGES)
        if (place := str(path.relative_to(ROOT))) != ALLOWED
        and (lines := comparisons(path.read_text(encoding="utf-8")))
    }

    assert found == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("x = mode == ForwardMode.DECODE", [1]),
        ("if ForwardMode.IDLE is mode: pass", [1]),
        ("y = mode in (ForwardMode.EXTEND, ForwardMode.MIXED)", [1]),
        ("match mode:\n    case ForwardMode.DECODE: pass\n    case _: pass", [2]),
        ("f(ForwardMode.DECODE)", []),
        ("traits(mode) == x", []),
        ("x = {ForwardMode.DECODE: 1}[mode]", []),
    ],
)
def test_every_kind_of_comparison_is_found(source, lines):
    assert comparisons(source) == lines
