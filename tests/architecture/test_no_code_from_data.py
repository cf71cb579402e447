"""S1, S9: nothing of ours turns data into code; checks of untrusted data are never assertions that -O takes away."""

import ast
import pickle
import subprocess
import sys

import pytest

from tests.support.audited import audit_environment, findings
from tests.support.code_measures import ROOT

PACKAGES = ("protos", "scheduler_svc", "worker_svc", "kernels", "k8s")
BANNED_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "multiprocessing.shared_memory",
    "google.protobuf.json_format",
    "google.protobuf.text_format",
    "torch.hub",
    "torch.package",
}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "breakpoint"}
BANNED_ATTRIBUTES = {
    ("torch", "load"),
    ("jit", "load"),
    ("hub", "load"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("numpy", "load"),
    ("os", "system"),
    ("os", "popen"),
}
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name)
DOORS = ("protos/wire", "protos/service", "scheduler_svc/edge", "worker_svc/protocol")


def problems(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in BANNED_MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            yield from names & BANNED_MODULES
        elif isinstance(node, ast.Call):
            yield from problems_of_call(node)


def problems_of_call(node: ast.Call):
    function = node.func
    if isinstance(function, ast.Name) and function.id in BANNED_CALLS:
        yield f"{function.id}()"
    if isinstance(function, ast.Attribute):
        owner = function.value
        name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        if (name, function.attr) in BANNED_ATTRIBUTES:
            yield f"{name}.{function.attr}()"
    for keyword in node.keywords:
        is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        if keyword.arg in ("allow_pickle", "shell", "trust_remote_code") and is_true:
            yield f"{keyword.arg}=True"


def test_s1_no_source_of_ours_turns_data_into_code():
    assert len(SOURCES) > 300
    found = {str(path.relative_to(ROOT)): list(problems(ast.parse(path.read_text()))) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from google.protobuf import json_format",
        "eval('1')",
        "exec(code)",
        "np.load(file, allow_pickle=True)",
        "subprocess.run(x, shell=True)",
        "from multiprocessing import shared_memory",
    ],
)
def test_the_search_finds_what_it_is_for(source):
    assert list(problems(ast.parse(source)))


READERS = {
    *("access", "admission", "caller_book", "caller_quotas", "checks", "codec", "codec_worker", "closed_fields"),
    *(
        "delta_columns",
        "field_rules",
        "frames",
        "generate_requests",
        "gguf_header",
        "hub_config",
        "json_cost",
        "limits",
    ),
    *("message_scan", "model_config", "plan_intake", "plan_reader", "prompt_encoder", "ragged", "readable"),
    *("request_body", "resolve_request", "resume_tickets", "resuming", "safetensors_header", "tls_files", "tokenizer"),
}
"""Modules that read or check what others sent."""


def test_s9_validation_modules_refuse_and_do_not_assert():
    """`python -O` takes assertions away: what comes from others is checked by `raise`."""
    asserting = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        if path.stem.startswith("validate") or path.stem in READERS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert asserting == []
    assert {path.stem for path in SOURCES} >= READERS


class Evil:
    def __reduce__(self):
        return (print, ("code from data",))


@pytest.mark.parametrize(
    ("act", "event"),
    [
        (f"import pickle; pickle.loads({pickle.dumps(Evil())!r})", "pickle.find_class"),
        ("eval('1 + 1')", "compile"),
        ("exec(compile('x = 1', 'data', 'exec'))", "exec"),
        ("import marshal; marshal.loads(marshal.dumps(compile('1', 'd', 'eval')))", "marshal.loads"),
    ],
)
def test_s1_the_hook_that_watches_whole_runs_sees_code_from_data(tmp_path, act, event):
    (tmp_path / "acting").mkdir()
    (tmp_path / "acting" / "__main__.py").write_text(f"def act():\n    {act}\n\nact()\n")
    log = tmp_path / "log"
    subprocess.run(
        [sys.executable, "-m", "acting"], env=audit_environment(log), cwd=tmp_path, check=True, capture_output=True
    )
    watched, found = findings(log)
    assert len(watched) == 1
    assert any(line.startswith(event) for line in found), found


FETCHING = {"urllib.request", "http.client", "requests", "httpx", "ftplib", "smtplib", "socketserver", "xmlrpc"}


def test_s8_nothing_of_the_serving_path_can_fetch():
    """Model folders come from settings; addresses that a process connects to, from settings and the cluster."""
    served = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in ("scheduler_svc", "worker_svc", "kernels")]
    found = {}
    for path in served:
        tree = ast.parse(path.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        calls = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & {"ClientSession", "urlopen"}
        if names & FETCHING or calls:
            found[str(path.relative_to(ROOT))] = sorted(names & FETCHING | calls)
    assert len(served) > 200
    assert found == {}
