"""`forwardplane serve` and Ctrl-C: however often and whenever it comes, no process and no folder is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from protos.client.generation_client import GenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from protos.client.serve_command import ServeOptions
from protos.wire.errors import EngineError
from tests.support.served import PORT_FIELDS, on_free_ports

pytestmark = pytest.mark.timeout(120)


def read(target: str, first: threading.Event) -> None:
    """A stream that goes on for longer than a stop waits."""
    options = GenerateOptions(max_tokens=5000, ignore_eos=True)
    with GenerationClient(target, resume_s=0.0) as client, suppress(EngineError):
        for _ in client.stream(TokenIds((1, 2)), options):
            first.set()


def test_a_second_ctrl_c_ends_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    place = tmp_path / "t"
    place.mkdir()
    ports = on_free_ports(ServeOptions()).ports
    flags = [part for name in PORT_FIELDS for part in ("--" + name.replace("_", "-"), str(getattr(ports, name)))]
    simulated = ("--device", "simulated", "--model-cache", str(tmp_path / "models"), "--simulated-step-ms", "50")
    command = [sys.executable, "-m", "protos.client.command", "serve", *simulated, *flags]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(place)}, start_new_session=True
    )
    try:
        for line in process.stderr:
            if "ready after" in line:
                break
        family = psutil.Process(process.pid).children(recursive=True)
        folders = list(place.glob("forwardplane-*"))
        assert folders
        first = threading.Event()
        reader = threading.Thread(target=read, args=(f"127.0.0.1:{ports.port}", first))
        reader.start()
        assert first.wait(30)
        process.send_signal(signal.SIGINT)
        time.sleep(1.0)
        assert process.poll() is None
        assert all(folder.is_dir() for folder in folders)
        process.send_signal(signal.SIGINT)
        process.wait(15)  # a drain would last longer
        reader.join(30)
        assert list(place.iterdir()) == []
        _, alive = psutil.wait_procs(family, timeout=30)
        assert alive == []
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
