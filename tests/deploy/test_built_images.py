"""The images of the scheduler and of CPU workers, built without a Docker engine and run as their pods run them.

Minutes long: `make test-images`.
"""

import pytest

from protos.service.config import EX_CONFIG
from tests.support.image_builder import ImageBuilder, missing_programs
from tests.support.manifest_policy import SCHEDULER
from tests.support.manifests import Manifest, objects

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing_programs()), reason=f"missing: {missing_programs()}: make setup-images"),
]
MOST_BYTES = 300_000_000
BASE_BYTES = 131_000_000
"""Of python:3.11-slim, which the base made here stands for."""
INSIDE = """
import importlib, importlib.util as u, os, pkgutil, runpy, shutil, sys
print(os.getuid(), [n for n in ("torch", "kernels", "tests", "pip") if u.find_spec(n)], shutil.which("gcc"))
print(all(u.find_spec(n) for n in ("grpc", "kubernetes_asyncio", "opentelemetry")))
for package in ("protos", "scheduler_svc"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
try:
    open("/x", "w")
except OSError as error:
    print(error.strerror)
sys.argv = ["scheduler_svc", "--help"]
runpy.run_module("scheduler_svc", run_name="__main__")
"""
INSIDE_WORKER = """
import importlib.util as u, os, runpy, shutil, sys
from kernels.native import load_native
print(os.getuid(), [n for n in ("scheduler_svc", "tests", "pip") if u.find_spec(n)], shutil.which("g++"))
print(type(load_native()).__name__)
try:
    open("/x", "w")
except OSError as error:
    print(error.strerror)
sys.argv = ["worker_svc", "--help"]
runpy.run_module("worker_svc", run_name="__main__")
"""


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    made = ImageBuilder(tmp_path_factory.mktemp("images"))
    made.make_base()
    return made


@pytest.fixture(scope="module")
def scheduler(builder):
    return builder.build("scheduler")


def test_it_runs_as_nobody_on_a_read_only_root_with_what_it_needs_and_no_more(builder, scheduler):
    done = builder.run(scheduler, "-c", INSIDE, options=("--entrypoint", "python3"))

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == ["10001 [] None", "True", "Read-only file system"]
    assert "--lease-object" in done.stdout


def test_it_is_small(builder, scheduler):
    added = builder.added_bytes(scheduler)
    print(f"beyond its base: {added / 1e6:.0f} MB, in all {(BASE_BYTES + added) / 1e6:.0f} MB")

    assert 0 < BASE_BYTES + added < MOST_BYTES


@pytest.fixture(scope="module")
def worker(builder):
    return builder.build("worker-cpu", torch_index=builder.torch_index())


def test_a_cpu_workers_image_has_the_native_kernels_and_no_compiler(builder, worker):
    done = builder.run(worker, "-c", INSIDE_WORKER, options=("--entrypoint", "python3"))

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == ["10001 [] None", "Native", "Read-only file system"]
    assert "--memory-fraction" in done.stdout
    print(f"a worker, beyond its base: {builder.added_bytes(worker) / 1e6:.0f} MB")


def test_a_workers_wrong_settings_end_it_with_every_problem(builder, worker):
    given = ("--env", "FORWARDPLANE_PORT=x", "--env", "FORWARDPLANE_GRAPH=some")
    done = builder.run(worker, options=given)

    assert done.returncode == EX_CONFIG, done.stderr
    assert "port = x" in done.stderr
    assert "graph = some" in done.stderr


def test_wrong_settings_of_a_config_map_end_it_with_every_problem(builder, scheduler):
    settings = {**Manifest(objects("local")).settings(SCHEDULER), "FORWARDPLANE_PORT": "x", "FORWARDPLANE_EDGES": "0"}
    given = [part for name, value in settings.items() for part in ("--env", f"{name}={value}")]
    done = builder.run(scheduler, options=tuple(given))

    assert done.returncode == EX_CONFIG, done.stderr
    assert "port = x" in done.stderr
    assert "edges = 0" in done.stderr
