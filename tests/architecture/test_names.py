"""Names follow the glossary: one word a thing, and no name that says nothing."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.code_measures import PACKAGES, ROOT, source_files

EMPTY_FILE_NAMES = {"util", "utils", "helper", "helpers", "common", "misc", "tools", "base_utils", "manager"}
EMPTY_LAST_WORDS = ("Manager", "Helper", "Helpers", "Util", "Utils", "Handler", "Data", "Info", "Impl")
ALLOWED_CLASSES = {"WorkerInfo"}
"""A name of the wire."""

FORBIDDEN = {
    *("rid", "uid", "table_idx", "seq_index", "position_ids", "context_lens", "query_len", "cached_len"),
    *("block_table", "block_size", "slot_mapping", "mem_index", "cu_seqlens", "b_start_loc", "max_batched_tokens"),
    *("num_blocks", "infer_state", "model_input", "graph_vars", "non_padded", "can_run", "memory_manager"),
    *("n_head", "qo_head", "preempt", "preempted", "preemption", "preemptions", "piggyback", "piecewise"),
}
MARKERS = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
UNEXPLAINED = re.compile(r"#\s*(type:\s*ignore(\[[^\]]*\])?|noqa(:\s*[A-Z0-9, ]+)?)\s*$", re.MULTILINE)

FILES = source_files(*PACKAGES)


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that is bound, read or taken as a parameter, with its line."""
    for node in ast.walk(tree):
        for attribute in ("id", "attr", "arg", "name"):
            name = getattr(node, attribute, None)
            if isinstance(name, str):
                yield name, getattr(node, "lineno", 0)


def banned(source: str) -> list[str]:
    return sorted({name for name, _ in identifiers(ast.parse(source)) if name.strip("_").lower() in FORBIDDEN})


def empty_classes(source: str) -> list[str]:
    names = [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return [name for name in names if name.endswith(EMPTY_LAST_WORDS) and name not in ALLOWED_CLASSES]


def test_no_file_is_called_after_nothing():
    assert [path for path in FILES if path.stem in EMPTY_FILE_NAMES] == []


def test_no_class_ends_in_a_word_that_says_nothing():
    found = {str(path.relative_to(ROOT)): empty_classes(path.read_text(encoding="utf-8")) for path in FILES}

    assert {place: names for place, names in found.items() if names} == {}


def test_no_word_of_the_glossary_s_right_column_is_used():
    found = {str(path.relative_to(ROOT)): banned(path.read_text(encoding="utf-8")) for path in FILES}

    assert {place: names for place, names in found.items() if names} == {}


def test_the_worker_knows_no_request():
    """It keeps state of steps only: `request_id` is a word of the scheduler."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in source_files("worker_svc", "kernels")
        for name, line in identifiers(ast.parse(path.read_text(encoding="utf-8")))
        if name == "request_id"
    ]

    assert found == []


@pytest.mark.parametrize(("pattern", "what"), [(MARKERS, "unfinished"), (UNEXPLAINED, "silenced without a reason")])
def test_nothing_is_unfinished_or_silenced_without_a_reason(pattern, what):
    found = [
        f"{path.relative_to(ROOT)}: {what}: {match.group(0)}"
        for path in FILES
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]

    assert found == []


@pytest.mark.parametrize(
    "source", ["def preempt(): pass", "x = block_table", "f(rid=1)", "a.slot_mapping = 1", "class _Preemption: pass"]
)
def test_forbidden_words_are_found_wherever_they_stand(source):
    assert len(banned(source)) == 1


def test_classes_without_meaning_are_found():
    assert empty_classes("class PageManager: pass\nclass WorkerInfo: pass\nclass PageAllocator: pass") == [
        "PageManager"
    ]


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("x = 1  # noqa", True),
        ("x = 1  # noqa: E501", True),
        ("x = y  # type: ignore[attr-defined]", True),
        ("x = 1  # noqa: N802 - the name is gRPC's", False),
        ("x = y  # type: ignore[attr-defined]  # the stub lacks it", False),
    ],
)
def test_a_reason_must_stand_beside_a_silenced_check(line, is_found):
    assert bool(UNEXPLAINED.search(line)) is is_found
