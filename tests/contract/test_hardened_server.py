"""S17: what a server holds before and beside its calls, and what runs under it."""

import re
import subprocess
import sys
import time

import pytest

from protos.service.lifecycle import ExitCode
from protos.service.runtime import assert_protobuf_backend
from protos.service.server import HealthServer, PortProfile, ServerOptions, bind_port, build_server
from protos.wire.errors import UnsafeRuntime
from tests.support.code_measures import ROOT
from tests.support.http2_frames import PREFACE, SETTINGS, frame, frames_until_closed, opened


@pytest.mark.parametrize("profile", PortProfile)
async def test_s15_a_half_open_handshake_ends_and_a_whole_one_stays(profile, to_thread):
    server = build_server(options=ServerOptions(profile=profile, handshake_timeout_ms=200))
    HealthServer(()).add_to(server)
    port = bind_port(server, "127.0.0.1", 0)
    await server.start()
    try:
        for sends in (b"", PREFACE[:5]):
            with opened(port, sends=sends) as silent:
                begun = time.monotonic()
                await to_thread(frames_until_closed, silent)
                assert 0.1 < time.monotonic() - begun < 9
        with opened(port, sends=PREFACE + frame(SETTINGS)) as whole:
            whole.settimeout(0.5)
            with pytest.raises(TimeoutError):
                await to_thread(read_on, whole)
    finally:
        await server.stop(None)


def read_on(connection):
    while connection.recv(1 << 16):
        pass


@pytest.fixture
def to_thread():
    import asyncio

    return asyncio.to_thread


def test_s17_only_the_c_back_end_of_protobuf_is_used():
    assert_protobuf_backend()
    with pytest.raises(UnsafeRuntime, match="'python'"):
        assert_protobuf_backend("python")


@pytest.mark.parametrize("module", ["worker_svc", "scheduler_svc"])
def test_s17_a_service_on_another_back_end_does_not_start(module):
    done = subprocess.run(
        [sys.executable, "-m", module],
        env={"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python", "PATH": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == ExitCode.BAD_INPUT
    assert "UNSAFE_RUNTIME" in done.stderr


def test_s17_the_grpc_family_is_pinned_to_one_version_and_images_use_the_pins():
    pins = dict(re.findall(r"^(grpcio[\w-]*)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert set(pins) >= {"grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status"}
    assert len(set(pins.values())) == 1
    for image in (ROOT / "k8s" / "images").glob("*.Dockerfile"):
        text = image.read_text()
        assert text.count("pip install") <= text.count("constraint"), image.name
