"""The back-end with breaks and what it is made of stay as small as the published one: 521 lines of code."""

import ast

from tests.support.code_measures import ROOT

MOST_LINES = 521
FILES = (
    "worker_svc/graph_backends/base.py",
    "worker_svc/graph_backends/breakable.py",
    "worker_svc/graph_backends/kept_tensors.py",
    "worker_svc/device/break_points.py",
    "worker_svc/device/device_graph.py",
    "worker_svc/device/cuda_graphs.py",
)
"""The published figure is of a GPU's; what stands in for the GPU on a CPU, the tape, is not part of it."""


def code_lines(source: str) -> int:
    """Lines that are neither blank nor a comment nor part of a docstring."""
    texts = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(source.splitlines(), start=1)
    return sum(1 for number, line in lines if number not in texts and line.strip() and not line.strip().startswith("#"))


def test_code_lines_are_counted_without_blanks_comments_and_docstrings():
    assert code_lines('"""Doc\n\nmore."""\n\nx = 1  # one\n# none\ndef f():\n    """Doc."""\n    return 2\n') == 3


def test_breaks_take_no_more_code_than_the_published_figure():
    assert sum(code_lines((ROOT / name).read_text(encoding="utf-8")) for name in FILES) <= MOST_LINES
