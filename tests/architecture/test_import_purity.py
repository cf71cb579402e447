"""Importing reads nothing, opens nothing and touches no device; what needs no torch brings none."""

import json
import subprocess
import sys

import pytest

from tests.support.code_measures import ROOT, source_files

PROBE = """
import importlib, json, os, sys, threading

root, names = sys.argv[1], sys.argv[2:]
ours = tuple(os.path.join(root, name) + os.sep for name in ("protos", "scheduler_svc", "worker_svc", "kernels"))
deeds = []

def blamed():
    # The file of ours that acts: nearest in the stack, unless other people's code is nearer.
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib") or "site-packages" in file:
            return None
        if file.startswith(ours) and "_pb2" not in file:
            return file
        frame = frame.f_back
    return None

WATCHED = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.system", "subprocess.Popen", "socket.__new__",
           "socket.connect", "socket.bind", "os.fork", "os.putenv", "signal.signal")

def watch(event, arguments):
    if event in WATCHED:
        file = blamed()
        if file:
            deeds.append(f"{file}: {event} {arguments[:1]!r}")

class Watched(type(os.environ)):
    def __getitem__(self, key):
        file = blamed()
        if file:
            deeds.append(f"{file}: environment {key!r}")
        return super().__getitem__(key)

sys.addaudithook(watch)
os.environ.__class__ = Watched
for name in names:
    importlib.import_module(name)
deeds += [f"thread {thread.name}" for thread in threading.enumerate() if thread is not threading.main_thread()]
torch = sys.modules.get("torch")
is_initialized = torch is not None and torch.cuda.is_initialized()
print(json.dumps({"deeds": deeds, "modules": sorted(sys.modules), "cuda": is_initialized}))
"""


def modules_of(*folders):
    paths = [path.relative_to(ROOT).with_suffix("") for path in source_files(*folders)]
    return [".".join(path.parts) for path in paths if path.name not in ("__init__", "__main__")]


def imported(*names):
    """What importing `names`, in a process of their own, does."""
    command = [sys.executable, "-c", PROBE, str(ROOT), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def roots(report):
    return {name.split(".")[0] for name in report["modules"]}


def test_the_scheduler_and_the_contract_import_purely_and_without_torch():
    names = modules_of("protos", "scheduler_svc")

    report = imported(*names)

    assert report["deeds"] == []
    assert len(names) > 50
    assert not roots(report) & {"torch", "kernels", "worker_svc", "transformers", "huggingface_hub", "triton"}


def test_what_lies_above_the_executor_needs_no_torch():
    above = ("worker_svc/protocol", "worker_svc/rpc")

    report = imported("worker_svc.executor", *modules_of(*above))

    assert report["deeds"] == []
    assert not roots(report) & {"torch", "scheduler_svc"}


def test_the_worker_imports_purely_and_touches_no_device():
    report = imported(*modules_of("worker_svc", "kernels"))

    assert report["deeds"] == []
    assert report["cuda"] is False
    assert not roots(report) & {"scheduler_svc", "transformers", "huggingface_hub"}


@pytest.mark.parametrize(
    ("body", "deed"),
    [
        ("open(__file__)", "open"),
        ("import os; os.environ.get('HOME')", "environment 'HOME'"),
        ("from pathlib import Path; Path.home()", "environment 'HOME'"),
        ("import socket; socket.socket().close()", "socket.__new__"),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "thread Thread-1"),
    ],
)
def test_a_module_that_acts_on_import_is_found(body, deed, tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/acting.py").write_text(body)
    command = [sys.executable, "-c", PROBE, str(tmp_path), "kernels.acting"]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)

    found = json.loads(done.stdout.splitlines()[-1])["deeds"]
    assert found
    assert all(deed in line for line in found)
