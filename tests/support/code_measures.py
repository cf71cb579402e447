"""Measures source files against the size limits of the project. Pure: text in, breaches out."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protos", "scheduler_svc", "worker_svc", "kernels")
COMPOSITION_ROOTS = ("app.py", "app_simulated.py", "__main__.py")

FILE_LINES, TEST_FILE_LINES = 400, 600
FUNCTION_LINES, CLASS_LINES = 60, 300
PUBLIC_METHODS, SELF_ATTRIBUTES, FIELDS = 12, 15, 16
PARAMETERS, POSITIONAL_PARAMETERS, NESTING = 6, 4, 3
OWN_IMPORTS = 12

Function = ast.FunctionDef | ast.AsyncFunctionDef
OF_TESTS_TOO = {"lines of a file", "lines of a function", "lines of a class", "nested blocks"}
"""Fixtures are parameters, rules of a state machine are methods: the other measures say nothing about tests."""

_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Breach:
    """One limit that one place is over."""

    place: str
    what: str
    value: int
    limit: int

    def __str__(self) -> str:
        return f"{self.place}: {self.what} {self.value}, limit {self.limit}"


def source_files(*folders: str) -> list[Path]:
    """Every file of ours under `folders`; generated code apart."""
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in files if "_pb2" not in path.name)


def breaches(source: str, path: Path) -> list[Breach]:
    """What in `source` is over a limit. `path` is relative to the root."""
    tree = ast.parse(source)
    is_test = path.parts[0] == "tests"
    found = [
        Breach(place=str(path), what=what, value=value, limit=limit)
        for what, value, limit in (
            ("lines of a file", len(source.splitlines()), TEST_FILE_LINES if is_test else FILE_LINES),
            ("own modules imported", 0 if _is_root(path) else len(own_imports(tree)), OWN_IMPORTS),
        )
    ]
    for node in ast.walk(tree):
        measures = ()
        if isinstance(node, Function):
            measures = _of_function(node)
        elif isinstance(node, ast.ClassDef):
            measures = _of_class(node)
        place = f"{path}:{getattr(node, 'lineno', 0)} {getattr(node, 'name', '')}"
        found += [Breach(place=place, what=what, value=value, limit=limit) for what, value, limit in measures]
    counted = (breach for breach in found if not is_test or breach.what in OF_TESTS_TOO)
    return sorted(breach for breach in counted if breach.value > breach.limit)


def own_imports(tree: ast.Module) -> set[str]:
    """Names of the modules of ours that are imported."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name for name in names if name.split(".")[0] in PACKAGES}


def _is_root(path: Path) -> bool:
    return path.name in COMPOSITION_ROOTS or path.parts[0] == "tests"


def _of_function(node: Function) -> Iterator[tuple[str, int, int]]:
    arguments = node.args
    own = [found for found in (*arguments.posonlyargs, *arguments.args) if found.arg not in ("self", "cls")]
    yield "lines of a function", _length(node), FUNCTION_LINES
    yield "parameters", len(own) + len(arguments.kwonlyargs), PARAMETERS
    yield "positional parameters", len(own), POSITIONAL_PARAMETERS
    yield "nested blocks", _nesting(node.body), NESTING


def _of_class(node: ast.ClassDef) -> Iterator[tuple[str, int, int]]:
    methods = [item for item in node.body if isinstance(item, Function)]
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.dump(item)]
    yield "lines of a class", _length(node), CLASS_LINES
    yield "public methods", sum(not method.name.startswith("_") for method in methods), PUBLIC_METHODS
    yield "attributes on self", len(_self_attributes(node)), SELF_ATTRIBUTES
    yield "fields", len(fields), FIELDS


def _length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _self_attributes(node: ast.ClassDef) -> set[str]:
    return {
        found.attr
        for found in ast.walk(node)
        if isinstance(found, ast.Attribute)
        and isinstance(found.ctx, ast.Store)
        and isinstance(found.value, ast.Name)
        and found.value.id == "self"
    }


def _nesting(body: Iterable[ast.AST]) -> int:
    """Deepest count of blocks within one another; `elif` is no deeper than its `if`; inner functions count anew."""
    return max((_depth(node) for node in body), default=0)


def _depth(node: ast.AST) -> int:
    if isinstance(node, _SCOPES):
        return 0
    inside = _nesting(ast.iter_child_nodes(node))
    if not isinstance(node, _BLOCKS):
        return inside
    if isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        return max(1 + _nesting(node.body), _depth(node.orelse[0]))
    return 1 + inside
