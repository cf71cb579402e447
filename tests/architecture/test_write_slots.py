"""Binding the step's write plan is the only way to set where a batch writes."""

import ast

from tests.support.code_measures import ROOT

MAY_SET = {"worker_svc/batch/builder.py", "worker_svc/batch/page_group.py"}
"""The builder, from what it bound; a group, with sinks added, taken away or put in a slot's place."""
MAKERS = {"PageGroup", "replace"}


def sets_slots(node):
    is_making = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS
    return is_making and any(keyword.arg == "out_cache_loc" for keyword in node.keywords)


def setters():
    for path in sorted((ROOT / "worker_svc").rglob("*.py")):
        if any(map(sets_slots, ast.walk(ast.parse(path.read_text(encoding="utf-8"))))):
            yield path.relative_to(ROOT).as_posix()


def test_write_slots_are_set_where_they_are_bound_and_nowhere_else():
    assert set(setters()) == MAY_SET


def test_the_builder_takes_them_from_the_write_plan_only():
    text = (ROOT / "worker_svc/batch/builder.py").read_text(encoding="utf-8")
    assert "write_plan.bind(" in text
    assert ".slots(" not in text
