"""The two distributions, built, installed into an empty environment, and used there: a simulated model is served."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from k8s import wheels
from kernels.build import LIBRARY, OLD_GLIBC_PLATFORM
from tests.support.served import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LIMIT_S = 60.0


def run(*command, cwd, check=True):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FORWARDPLANE"))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    run(sys.executable, "-m", "k8s.wheels", str(folder), cwd=wheels.ROOT)
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    """An environment with both; torch is left out, since a simulated device needs none."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", str(folder / "venv"), cwd=folder)
    pip = (str(folder / "venv" / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--constraint", str(wheels.ROOT / "constraints.txt"), str(built["forwardplane"]), cwd=folder)
    return folder


def packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {Path(name).parts[0] for name in archive.namelist() if ".dist-info" not in name}


def test_each_distribution_holds_its_own_packages_and_no_tests(built):
    assert packages(built["forwardplane"]) == {"protos", "scheduler_svc"}
    assert packages(built["forwardplane_worker"]) == {"worker_svc", "kernels"}


def test_each_holds_its_data_files(built):
    for name, wanted in (
        ("forwardplane", ["protos/forwardplane/v1/plan.proto"]),
        ("forwardplane_worker", ["worker_svc/simulated/step_times_h100_8b.toml"]),
    ):
        with zipfile.ZipFile(built[name]) as archive:
            assert set(wanted) <= set(archive.namelist())


def test_a_library_that_ships_needs_no_newer_glibc_than_the_wheels_name_says(built, tmp_path):
    platform = built["forwardplane_worker"].stem.rpartition("-")[2]
    with zipfile.ZipFile(built["forwardplane_worker"]) as archive:
        library = archive.extract(f"kernels/lib/{LIBRARY}", tmp_path)
    needed = {tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", Path(library).read_bytes())}

    assert needed
    if importlib.util.find_spec("ziglang") is None:
        assert platform == "linux_x86_64"
    else:
        assert platform == OLD_GLIBC_PLATFORM
        assert max(needed) <= (2, 17)


def test_a_scheduler_is_installed_without_torch_and_without_a_worker(environment):
    probe = (
        "import importlib.util as u; print([n for n in ('torch', 'kernels', 'worker_svc', 'tests') if u.find_spec(n)])"
    )
    python = str(environment / "venv" / "bin" / "python")

    assert run(python, "-c", probe, cwd=environment).stdout.strip() == "[]"
    assert "--epoch-source" in run(python, "-m", "scheduler_svc", "--help", cwd=environment).stdout


def test_both_together_serve_and_answer(environment, built):
    binaries = environment / "venv" / "bin"
    pip = (str(binaries / "python"), "-m", "pip", "install", "--quiet", "--no-deps")
    run(*pip, str(built["forwardplane_worker"]), cwd=environment)
    names = ("port", "health-port", "metrics-port", "edge-metrics-port", "worker-port", "worker-health-port")
    ports = dict(zip((*names, "worker-metrics-port"), free_ports(7), strict=True))
    flags = [part for name, port in ports.items() for part in (f"--{name}", str(port))]
    cache = ("--model-cache", str(environment / "models"))
    command = [str(binaries / "forwardplane"), "serve", "--device", "simulated", "--http-port", "0", *cache, *flags]
    serving = subprocess.Popen(command, cwd=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        ask = (str(binaries / "forwardplane"), "generate", "--raw", "Hello", "--max-tokens", "5", "--json")
        end = time.monotonic() + LIMIT_S
        while (done := run(*ask, "--target", f"127.0.0.1:{ports['port']}", cwd=environment, check=False)).returncode:
            assert serving.poll() is None, serving.stderr.read()
            assert time.monotonic() < end, done.stderr
            time.sleep(0.3)
        assert re.search(r'"finish_reason": *"length"', done.stdout.lower()), done.stdout
    finally:
        serving.send_signal(signal.SIGINT)
        _, log = serving.communicate(timeout=40)
    assert serving.returncode == 0, log
