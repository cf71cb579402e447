"""What holds for every test: imports from the root, no network but loopback, nothing left behind."""

import asyncio
import importlib
import ipaddress
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

settings.register_profile("ci", deadline=None, database=None, print_blob=True)
settings.load_profile("ci")

LASTING_THREADS = ("_poll_wrapper", "channel_spin", "grpc", "asyncio_", "pytest_timeout", "tqdm_monitor")
"""Parts of the names of threads that libraries keep for the process's life."""
REAL_TIME = ("e2e", "contract", "deploy", "unit/links", "unit/bridge", "unit/worker_rpc", "unit/scheduler_shell")
"""Folders of tests whose processes, sockets and timers run in real time beside whatever else the machine does."""
PATIENCE_S = 20.0
"""How long threads, children and tasks may take to end after their test."""


def pytest_runtest_setup(item):
    """Tests of a GPU are skipped by name where there is none."""
    if item.get_closest_marker("gpu") and not importlib.import_module("torch").cuda.is_available():
        pytest.skip("no CUDA device")


def pytest_collection_modifyitems(items):
    """A test of real time that fails runs once more, and the closing lines name it (D-125)."""
    folders = tuple(str(ROOT / "tests" / name) for name in REAL_TIME)
    for item in items:
        if str(item.path).startswith(folders):
            item.add_marker(pytest.mark.flaky(reruns=1))


def _is_allowed(address) -> bool:
    if not isinstance(address, tuple):
        return True  # Unix sockets
    host = address[0]
    if host in ("", "localhost"):
        return True
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    return found.is_loopback or found.is_unspecified


@pytest.fixture(scope="session", autouse=True)
def no_network():
    """Python sockets may connect to this machine only."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            original = getattr(socket.socket, name)

            def guarded(self, address, original=original):
                assert _is_allowed(address), f"a test wants to connect to {address}"
                return original(self, address)

            patch.setattr(socket.socket, name, guarded)
        yield


def _threads() -> set[threading.Thread]:
    alive = (thread for thread in threading.enumerate() if thread.is_alive())
    return {thread for thread in alive if not any(part in thread.name for part in LASTING_THREADS)}


def _children() -> set[str]:
    """Process ids of our direct children, zombies too."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update((task / "children").read_text().split())
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """Fails a test that leaves a thread or a child process; asynchronous ones also for tasks."""
    if request.node.get_closest_marker("asyncio"):
        request.getfixturevalue("no_task_left")
    threads, children = _threads(), _children()
    yield
    end = time.monotonic() + PATIENCE_S
    while (left := (_threads() - threads, _children() - children)) != (set(), set()) and time.monotonic() < end:
        time.sleep(0.005)
    assert left == (set(), set()), f"left behind: threads {left[0]}, child processes {left[1]}"


@pytest.fixture
async def no_task_left():
    """Fails a test at whose end a task that it started is still running."""
    before = asyncio.all_tasks()
    yield
    end = time.monotonic() + PATIENCE_S
    # A stopped gRPC server has cancelled its calls, and their tasks end when its completion queue's thread says so.
    while (left := asyncio.all_tasks() - before - {asyncio.current_task()}) and time.monotonic() < end:
        await asyncio.sleep(0.005)
    assert not left, f"left behind: {left}"


@pytest.fixture
def free_port():
    """A function that returns a port nobody listens on now."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    return find


@pytest.fixture
def clean_environment(monkeypatch):
    """No setting of ours in the environment."""
    for name in [name for name in os.environ if name.startswith("FORWARDPLANE_")]:
        monkeypatch.delenv(name)
