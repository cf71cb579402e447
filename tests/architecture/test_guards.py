"""The guards of conftest.py catch what they are for."""

import re
import subprocess
import sys

from tests.support.code_measures import ROOT

SINNERS = """
import asyncio, socket, subprocess, sys, threading, time
from tests import conftest

conftest.PATIENCE_S = 0.2

def test_network():
    with socket.socket() as talker:
        talker.settimeout(0.1)
        talker.connect(("192.0.2.1", 9))

def test_name():
    with socket.socket() as talker:
        talker.connect(("example.invalid", 9))

def test_thread():
    threading.Thread(target=time.sleep, args=(1,), daemon=True).start()

def test_child():
    keep.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"]))

keep = []

async def test_task():
    keep.append(asyncio.create_task(asyncio.sleep(60)))

async def test_good():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        await asyncio.create_task(asyncio.sleep(0))
    worker = threading.Thread(target=time.sleep, args=(0.05,))
    worker.start()
    subprocess.run([sys.executable, "-c", ""], check=True)
"""
COMMAND = (
    sys.executable,
    "-m",
    "pytest",
    "-c",
    "pyproject.toml",
    "-rA",
    "-o",
    "asyncio_default_fixture_loop_scope=function",
    "-p",
    "tests.conftest",
)


def test_each_guard_fails_the_test_that_offends_and_no_other(tmp_path):
    (tmp_path / "test_sinners.py").write_text(SINNERS)

    done = subprocess.run([*COMMAND, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    outcomes = set(re.findall(r"^(FAILED|ERROR|PASSED) \S+::(\w+)", done.stdout, re.MULTILINE))
    assert outcomes == {
        *(("FAILED", "test_network"), ("FAILED", "test_name")),
        *(("PASSED", "test_thread"), ("ERROR", "test_thread"), ("PASSED", "test_child"), ("ERROR", "test_child")),
        *(("PASSED", "test_task"), ("ERROR", "test_task"), ("PASSED", "test_good")),
    }, done.stdout + done.stderr
